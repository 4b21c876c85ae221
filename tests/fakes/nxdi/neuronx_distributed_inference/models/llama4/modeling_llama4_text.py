from fake_nxdi.families import family

from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM

LlamaInferenceConfig, NeuronLlama4TextForCausalLM = family("Llama4Text", __name__, NeuronBaseForCausalLM)
