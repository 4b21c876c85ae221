from fake_nxdi.parameters import check_parameters as _check
from fake_nxdi.parameters import inferred as infer_sampling_params
from fake_nxdi.parameters import prepare_sampling_params

__all__ = ["infer_sampling_params", "prepare_sampling_params", "validate_sampling_params"]


def validate_sampling_params(params, on_device_sampling_config):
    config = on_device_sampling_config
    _check(params, config["global_topk"] if isinstance(config, dict) else config.global_topk)
