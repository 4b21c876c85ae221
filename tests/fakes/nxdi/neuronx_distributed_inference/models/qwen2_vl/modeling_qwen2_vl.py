from fake_nxdi.families import family, since

since(8, __name__)

from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM  # noqa: E402

Qwen2VLInferenceConfig, NeuronQwen2VLForCausalLM = family("Qwen2VL", __name__, NeuronBaseForCausalLM)
