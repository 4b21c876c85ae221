"""The real optimum-neuron, in an environment that has it, without Neuron packages or devices.

Reads two lines of JSON, `{"model", "config"}` and `{"model", "repository"}`, and prints as JSON what the library says
of a model and the arguments of a configuration, and then which entries of a cache the model has. Its argument is a
folder with packages that the environment lacks, such as torch.
"""

import inspect
import json
import sys
import types

sys.path.append(sys.argv[1])

from optimum.neuron.cache.entries.single_model import SingleModelCacheEntry
from optimum.neuron.cache.hub_cache import get_hub_cached_entries, hub_registry_path
from optimum.neuron.models.inference.backend.config import NxDNeuronConfig
from transformers import AutoConfig

# A configuration has the compiler's version, and it is the only thing that is asked of the compiler here.
sys.modules["neuronxcc"] = types.ModuleType("neuronxcc")
sys.modules["neuronxcc"].__version__ = "2.21.33363.0+82129205"

TASK = "text-generation"

asked = json.loads(sys.stdin.readline())
config = NxDNeuronConfig(**asked["config"])
entry = SingleModelCacheEntry("acme/tiny", TASK, AutoConfig.from_pretrained(asked["model"]), config)
told = {
    "defaults": {name: one.default for name, one in inspect.signature(NxDNeuronConfig).parameters.items()},
    "written": config.to_dict(),
    "entry": json.loads(entry.serialize()),
    "digest": entry.arch_digest(),
}
print(json.dumps(told, default=str), flush=True)

asked = json.loads(sys.stdin.readline())
found = {
    "registry": hub_registry_path(asked["repository"]),
    "cached": get_hub_cached_entries(asked["model"], TASK, asked["repository"]),
}
print(json.dumps(found), flush=True)
