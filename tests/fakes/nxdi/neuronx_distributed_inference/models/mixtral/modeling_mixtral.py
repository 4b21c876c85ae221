from fake_nxdi.families import family, since

since(7, __name__)

from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM  # noqa: E402

MixtralInferenceConfig, NeuronMixtralForCausalLM = family("Mixtral", __name__, NeuronBaseForCausalLM)
