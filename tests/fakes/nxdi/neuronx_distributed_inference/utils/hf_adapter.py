from fake_nxdi.hugging_face import load_pretrained_config

__all__ = ["load_pretrained_config"]
