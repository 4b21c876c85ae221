from fake_nxdi.families import family, since

since(9, __name__)

from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM  # noqa: E402

Gemma3InferenceConfig, NeuronGemma3ForCausalLM = family("Gemma3", __name__, NeuronBaseForCausalLM)
