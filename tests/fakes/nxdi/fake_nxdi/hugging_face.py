"""The hook that fills an InferenceConfig from a Hugging Face config.json."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from fake_nxdi.config import to_torch_dtype


def load_pretrained_config(model_path_or_name: Any = None, hf_config: Any = None) -> Any:
    def load_config(self: Any) -> None:
        if (model_path_or_name is None) == (hf_config is None):
            raise ValueError('Please provide only one of "model_path_or_name" or "hf_config"')
        config = hf_config if model_path_or_name is None else AutoConfig.from_pretrained(model_path_or_name)
        values = config.to_dict()
        dtype = values.pop("dtype", None)
        other = values.pop("torch_dtype", None)
        dtype = dtype if dtype is not None else other
        if dtype is not None and self.neuron_config is not None and not self.neuron_config.overrides_torch_dtype:
            self.neuron_config.torch_dtype = to_torch_dtype(dtype) if isinstance(dtype, str) else dtype
        # NxDI is pinned to transformers 4.57, which has these two fields where 5 has one.
        rope = values.get("rope_parameters") or {}
        if "rope_theta" in rope:
            values.setdefault("rope_theta", rope["rope_theta"])
            scaled = rope.get("rope_type", "default") != "default"
            values.setdefault("rope_scaling", dict(rope) if scaled else None)
        for key in values:
            if isinstance(getattr(config, key, None), PretrainedConfig):
                values[key] = SimpleNamespace(**values[key])
        vars(self).update(values)
        if hasattr(config, "attribute_map"):
            self.attribute_map = config.attribute_map

    return load_config
