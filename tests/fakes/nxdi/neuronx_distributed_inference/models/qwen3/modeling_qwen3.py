from fake_nxdi.families import family, since

since(7, __name__)

from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM  # noqa: E402

Qwen3InferenceConfig, NeuronQwen3ForCausalLM = family("Qwen3", __name__, NeuronBaseForCausalLM)
