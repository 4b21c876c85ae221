"""The fake Neuron compiler: only its version is looked at."""

import fake_nxdi

if not fake_nxdi.SETTINGS.compiler:
    raise ModuleNotFoundError("No module named 'neuronxcc'", name="neuronxcc")
__version__ = "2.24.0"
