from fake_nxdi.families import since

since(8, __name__)

from fake_nxdi.config import NeuronConfig  # noqa: E402
from fake_nxdi.pictures import ImageToTextConfig, pixtral  # noqa: E402

from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM  # noqa: E402


class PixtralInferenceConfig(ImageToTextConfig):
    @classmethod
    def get_neuron_config_cls(cls):
        return NeuronConfig


NeuronPixtralForCausalLM = pixtral(NeuronBaseForCausalLM)
NeuronPixtralForCausalLM.get_config_cls = classmethod(lambda cls: PixtralInferenceConfig)
