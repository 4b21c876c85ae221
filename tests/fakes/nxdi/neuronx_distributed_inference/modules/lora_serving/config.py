from fake_nxdi import lora

LoraServingConfig = lora.config_class()
