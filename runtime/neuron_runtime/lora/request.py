"""`LoRARequest` where scripts for vLLM import it: `from neuron_runtime.lora.request import LoRARequest`."""

from neuron_runtime.offline.adapters import LoRARequest

__all__ = ["LoRARequest"]
