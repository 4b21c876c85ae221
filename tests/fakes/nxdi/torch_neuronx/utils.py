from fake_nxdi.platform import target as get_platform_target

__all__ = ["get_platform_target"]
