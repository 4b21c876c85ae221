"""Whether Hugging Face's cache has a model's graphs: a look-up over the files of its registry, by HTTP.

Called by `inspection`, which needs neither a device nor the Neuron SDK. The cache is a repository with one folder for
each compiler, in it one for each release of optimum-neuron, and in that one for each architecture: any weights of an
architecture share its graphs. An entry of a folder says what graphs it stands for. Pure but for its requests.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

from neuron_runtime.backend.nxdi.graph_plan import COMPILE_SECONDS_PER_LAYER
from neuron_runtime.backend.optimum.library import COMPILER, OPTIMUM
from neuron_runtime.console import say
from neuron_runtime.uris import HubModel
from neuron_runtime.weights.hub import HubSource
from neuron_runtime.weights.source import TIMEOUT_SECONDS

REPOSITORY_VARIABLE = "CUSTOM_CACHE_REPO"
REPOSITORY = "aws-neuron/optimum-neuron-cache"
RELEASE = ("0.4.7.dev0", "2.26.6360.0")
"""Versions of optimum-neuron and of its compiler in our image, which are asked for where they are not installed."""
MAX_ENTRIES = 100
"""Entries of an architecture that are read."""
MAX_NAMED = 6
"""Kinds of graphs that are named at most: a record is short."""
NUM_GRAPHS = 2
"""That the library compiles of a model."""
TASK = "text-generation"

NOT_OF_ARCHITECTURE = (
    *("_name_or_path", "transformers_version", "_diffusers_version", "eos_token_id", "bos_token_id", "pad_token_id"),
    *("torchscript", "torch_dtype", "_commit_hash", "sample_size", "projection_dim", "_use_default_values"),
    *("_attn_implementation_autoset", "return_dict"),
)
"""Fields of a configuration that the library leaves out of the architecture."""
NOT_OF_CONFIGURATION = ("neuron", "_entry_class", "_model_id", "_task")
"""What an entry has besides the configuration."""


PLACES = {"trn1": "inf2 or trn1"}
"""Where graphs of a target run, if not there alone."""


class CachedGraphs(NamedTuple):
    target: str
    cores: int
    tokens: int
    """Of prompt plus output."""
    sequences: int

    def __str__(self) -> str:
        place = PLACES.get(self.target, self.target)
        return f"{place}, {self.cores} cores, {self.sequences} requests of {self.tokens} tokens"


class NotAsked(Exception):
    """The cache does not answer, or is no cache."""


def cached_graphs(model_dir: Path, repository: str = "") -> tuple[CachedGraphs, ...] | None:
    """What the cache has for the architecture of a model; None if it does not answer.

    repository: of the model at the hub. If the registry has it, its architecture is looked up there; otherwise it is
        computed from config.json, as transformers reads it.
    """
    try:
        return _Cache.from_environment().entries(model_dir, repository)
    except Exception as error:  # noqa: BLE001 - what fails between here and a hub, or reading what it sent, has no end
        say(f"the cache of compiled graphs does not tell what it has ({type(error).__name__}): taken as unknown")
        return None


def in_words(graphs: Sequence[CachedGraphs] | None, num_layers: int) -> str:
    """What need not be compiled; empty if that is unknown."""
    if graphs is None:
        return ""
    if not graphs:
        minutes = max(1, round(NUM_GRAPHS * COMPILE_SECONDS_PER_LAYER * num_layers / 60))
        return f"must be compiled, about {minutes} min"
    others = f"; and {len(graphs) - MAX_NAMED} more" if len(graphs) > MAX_NAMED else ""
    return f"cached for {'; '.join(map(str, graphs[:MAX_NAMED]))}{others}"


class _Cache:
    def __init__(self, source: HubSource) -> None:
        self._source = source

    @classmethod
    def from_environment(cls) -> _Cache:
        return cls(HubSource.from_environment(HubModel(os.environ.get(REPOSITORY_VARIABLE) or REPOSITORY)))

    def entries(self, model_dir: Path, repository: str) -> tuple[CachedGraphs, ...]:
        registry = self._registry()
        if registry is None:
            return ()
        config = json.loads((model_dir / "config.json").read_bytes())
        aliases = self._files(f"{registry}/{config['model_type']}/{repository}") if repository else []
        digest = digest_of_entry(self._read(aliases[0])) if aliases else digest_of_model(model_dir)
        found = {
            graphs
            for name in self._files(f"{registry}/{digest}")[:MAX_ENTRIES]
            if (graphs := _graphs(self._read(name)))
        }
        return tuple(sorted(found))

    def _registry(self) -> str | None:
        """The folder of the installed versions; None if the cache has none for them."""
        release, compiler = installed_release()
        # A folder's name has the commit of the compiler too.
        begins = f"neuronxcc-{compiler}"
        names = [name for name in self._listed("") if re.fullmatch(rf"{re.escape(begins)}(\+.*)?", name)]
        return f"{names[0]}/0_REGISTRY/{release}" if names else None

    def _files(self, folder: str) -> list[str]:
        return [name for name in self._listed(folder) if name.endswith(".json")]

    def _listed(self, folder: str) -> list[str]:
        """Paths directly in a folder; none if there is no such folder."""
        answer = self._get(f"api/models/{self._source.model.repository}/tree/main/{quote(folder)}".rstrip("/"))
        return [] if answer is None else [str(one["path"]) for one in answer]

    def _read(self, name: str) -> dict[str, Any]:
        answer = self._get(f"{self._source.model.repository}/resolve/main/{quote(name)}")
        if not isinstance(answer, dict):
            raise NotAsked(f"{name} is no entry")
        return answer

    def _get(self, path: str) -> Any:
        """An answer of JSON; None if there is no such path."""
        session: Any = get_session()
        headers = build_hf_headers(token=self._source.token or False)
        response = session.get(f"{self._source.endpoint}/{path}", headers=headers, timeout=TIMEOUT_SECONDS)
        if response.status_code == 404:
            return None
        hf_raise_for_status(response)
        return response.json()


def installed_release() -> tuple[str, str]:
    """Versions of optimum-neuron and of the compiler that it wants, whether that one is installed or not."""
    try:
        version, wanted = metadata.version(OPTIMUM), metadata.requires(OPTIMUM) or []
    except metadata.PackageNotFoundError:
        return RELEASE
    pinned = [match[1] for one in wanted if (match := re.match(rf"{COMPILER}==([0-9.]+)", one))]
    return version, pinned[0] if pinned else RELEASE[1]


def digest_of_entry(entry: Mapping[str, Any]) -> str:
    """The name of the folder of an entry's architecture."""
    return _digest({name: value for name, value in entry.items() if name not in NOT_OF_CONFIGURATION})


def digest_of_model(model_dir: Path) -> str:
    """The same for a model. It depends on what transformers takes for a default, so it fits the cache only with a
    release of transformers like the one that filled it, as it is in our image."""
    from transformers import AutoConfig  # noqa: PLC0415  (takes a second)

    return _digest(AutoConfig.from_pretrained(str(model_dir)).get_text_config().to_diff_dict())


def _digest(config: Mapping[str, Any]) -> str:
    kept = {name: value for name, value in config.items() if name not in NOT_OF_ARCHITECTURE}
    architecture = {"model_type": config["model_type"], "task": TASK, "config": kept}
    return hashlib.sha256(json.dumps(architecture, sort_keys=True).encode()).hexdigest()


def _graphs(entry: Mapping[str, Any]) -> CachedGraphs | None:
    """What an entry of a decoder stands for; None for another one."""
    neuron = entry.get("neuron")
    if not isinstance(neuron, Mapping) or not all(isinstance(neuron.get(name), int) for name in _NUMBERS):
        return None
    return CachedGraphs(str(neuron.get("target")), *(int(neuron[name]) for name in _NUMBERS))


_NUMBERS = ("tp_degree", "sequence_length", "batch_size")
