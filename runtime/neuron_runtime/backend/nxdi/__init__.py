"""The NxD Inference backend: drives `neuronx-distributed-inference` on Neuron devices.

Importing this package is cheap: the Neuron libraries are imported only by `library`, when a model is compiled or
loaded.
"""
