from fake_nxdi.families import family, since

since(7, __name__)

from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM  # noqa: E402

_, NeuronLlama4ForCausalLM = family("Llama4", __name__, NeuronBaseForCausalLM)


class Llama4InferenceConfig:
    """The configuration of text and images."""

    def __init__(self, text_neuron_config, vision_neuron_config, fused_spec_config=None, load_config=None, **kwargs):
        raise NotImplementedError("the fake computes no images")

    get_neuron_config_cls = _.get_neuron_config_cls


NeuronLlama4ForCausalLM.get_config_cls = classmethod(lambda cls: Llama4InferenceConfig)
