from fake_nxdi.families import family, since

since(9, __name__)

from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM  # noqa: E402

MistralInferenceConfig, NeuronMistralForCausalLM = family("Mistral", __name__, NeuronBaseForCausalLM)
