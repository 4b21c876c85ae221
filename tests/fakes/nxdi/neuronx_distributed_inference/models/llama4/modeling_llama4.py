from fake_nxdi.families import family, since

since(7, __name__)

from fake_nxdi.pictures import ImageToTextConfig, llama4  # noqa: E402

from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM  # noqa: E402

_Config, _ = family("Llama4", __name__, NeuronBaseForCausalLM)


class Llama4InferenceConfig(ImageToTextConfig):
    """The configuration of text and images."""

    get_neuron_config_cls = _Config.get_neuron_config_cls


NeuronLlama4ForCausalLM = llama4(NeuronBaseForCausalLM)
NeuronLlama4ForCausalLM.get_config_cls = classmethod(lambda cls: Llama4InferenceConfig)
