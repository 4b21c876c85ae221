from types import SimpleNamespace

from fake_nxdi.config import InferenceConfig
from fake_nxdi.families import family
from fake_nxdi.pictures import of_text

from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM

_Config, NeuronLlama4TextForCausalLM = family("Llama4Text", __name__, NeuronBaseForCausalLM)


class LlamaInferenceConfig(_Config):
    """The configuration of a whole model; the decoder takes its `text_config`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        text = self.text_config
        text = vars(text) if isinstance(text, SimpleNamespace) else text
        self.text_config = InferenceConfig(self.neuron_config, **text)
        self.text_config._name_or_path = self._name_or_path


NeuronLlama4TextForCausalLM.convert_hf_to_neuron_state_dict = staticmethod(lambda found, config: of_text(found))
NeuronLlama4TextForCausalLM.get_config_cls = classmethod(lambda cls: LlamaInferenceConfig)
