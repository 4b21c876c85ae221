from fake_nxdi.families import family, since

since(8, __name__)

from fake_nxdi.pictures import Qwen3VLConfig, qwen3_vl  # noqa: E402

from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM  # noqa: E402
from neuronx_distributed_inference.models.qwen3_vl.modeling_qwen3_vl_text import (  # noqa: E402, F401
    NeuronQwen3VLTextForCausalLM,
)

_Config, _ = family("Qwen3VL", __name__, NeuronBaseForCausalLM)


class Qwen3VLInferenceConfig(Qwen3VLConfig):
    get_neuron_config_cls = _Config.get_neuron_config_cls


NeuronQwen3VLForCausalLM = qwen3_vl(NeuronBaseForCausalLM)
NeuronQwen3VLForCausalLM.get_config_cls = classmethod(lambda cls: Qwen3VLInferenceConfig)
