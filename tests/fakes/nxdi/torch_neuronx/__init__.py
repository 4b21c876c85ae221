"""The fake torch-neuronx: which chip there is."""

__version__ = "2.9.0.2.0.0"
