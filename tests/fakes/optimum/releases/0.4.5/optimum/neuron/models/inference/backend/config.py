from fake_optimum.config import NeuronConfig


class NxDNeuronConfig(NeuronConfig):
    pass
