from fake_nxdi.config import LoraServingConfig

__all__ = ["LoraServingConfig"]
