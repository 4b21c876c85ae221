from fake_nxdi.families import family, since

since(8, __name__)

from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM  # noqa: E402

PixtralInferenceConfig, NeuronPixtralForCausalLM = family("Pixtral", __name__, NeuronBaseForCausalLM)
