"""Collects the facts about a model that the operator plans with, without reading weights or importing torch; and those
about an adapter, which is read once.

Called by `neuron-runtime inspect URI` (a Job of a few seconds before any device is held) and by `serve` for its own
arithmetic. It checks that a backend supports the architecture and that the files match each other.
"""

from __future__ import annotations

import json
import resource
import signal
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from neuron_runtime.adapters.peft import TEXT_FILES, AdapterRules
from neuron_runtime.backend.neuron.devices import named_platform
from neuron_runtime.backend.neuron.model_config import quantization_of as neuron_quantization_of
from neuron_runtime.backend.nxdi.library import sees_pictures
from neuron_runtime.backend.nxdi.models import (
    BY_APPLICATION,
    BY_ARCHITECTURE,
    family_of,
    is_private,
    text_config,
    window_of,
)
from neuron_runtime.backend.nxdi.vision import Counts, needs_of
from neuron_runtime.backend.optimum import models as optimum
from neuron_runtime.backend.optimum.hub_cache import cached_graphs, in_words
from neuron_runtime.backend.torch import vector_models
from neuron_runtime.backend.torch.architecture import FAMILIES, decoder_config, tensor_shapes
from neuron_runtime.backend.torch.naming import as_named
from neuron_runtime.backend.torch.towers import tower_of
from neuron_runtime.backend.torch.vector_models import computes_only_vectors, vector_model
from neuron_runtime.backend.transformers_neuronx import settings as neuronx
from neuron_runtime.checkpoint import (
    CONFIG_FILE,
    FUSION,
    Checkpoint,
    InvalidModel,
    check_tensors,
    check_tokenizer,
    read_checkpoint,
    read_config,
)
from neuron_runtime.config import TextOptions
from neuron_runtime.console import bytes_text
from neuron_runtime.conversion.contents import contents_of
from neuron_runtime.conversion.plan import conversion_of
from neuron_runtime.dtypes import BY_STORED
from neuron_runtime.engine.backends import PACKAGES, package_of
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.pictures.families import family_of as picture_family
from neuron_runtime.quantization import QUANTIZATION_FIELDS, Quantizing, has_known_method, quantization_of
from neuron_runtime.recipes import is_vector_model, read_recipe
from neuron_runtime.record import AdapterFacts, EncoderFacts, ModelFacts, PlannedConversion
from neuron_runtime.requests.generation_defaults import NEUTRAL
from neuron_runtime.requests.texts import Text, adapted_text
from neuron_runtime.text.tokenizer import load_tokenizer
from neuron_runtime.uris import HubModel, parse_uri
from neuron_runtime.weights.fetching import TEXT, fetch, fetch_adapter, naming, outline
from neuron_runtime.weights.store import Store

ON_TORCH = (*FAMILIES, *vector_models.ARCHITECTURES)
TORCH, NXDI, OPTIMUM, NEURONX = "torch", "nxdi", "optimum", "transformers-neuronx"
VLLM = "vllm"
"""No backend of this runtime: the operator says which models it runs, and only the configuration is read."""


def inspect_model(
    uri: str, backend: str = "", application_class: str = "", quantization: Quantizing = "auto", digest: str = ""
) -> ModelFacts:
    """Inspect a model: config.json, the index, the headers of the weights, and whether it has a tokenizer.

    Args:
        backend: the one that must support it; empty: any.
        application_class: the class that runs it with NxD Inference, whatever its architecture; empty: by that.
        quantization: as the field of the configuration.
        digest: that the model must have, such as a commit of its branch; empty: any.

    Raises:
        InvalidConfig: the URI is malformed or its scheme is not supported, the application class is malformed or
            for another backend, or the quantization is not that of the checkpoint.
        FatalError: MODEL_NOT_FOUND, WEIGHTS_UNAUTHORIZED, UNSUPPORTED_ARCHITECTURE, INVALID_MODEL or CHECKSUM_MISMATCH.
        SourceUnreachable: the source does not respond; retry later.
    """
    with (
        tempfile.TemporaryDirectory(prefix="neuron-inspect-") as scratch,
        outline(uri, Path(scratch), digest) as (folder, found),
    ):
        checkpoint = read_checkpoint(folder)
        if digest and (found := found or checkpoint.digest) != digest:
            raise FatalError(ExitCode.CHECKSUM_MISMATCH, f"{folder} has digest {found}, not {digest}")
        facts = model_facts(checkpoint, found, backend, application_class, quantization, uri=uri)
        check_tokenizer(folder)
        if backend == OPTIMUM:
            model = parse_uri(uri, "URI")
            cached = cached_graphs(folder, model.repository if isinstance(model, HubModel) else "")
            facts = msgspec.structs.replace(facts, graphs=in_words(cached, facts.num_layers))
        return facts


def inspect_head(uri: str) -> ModelFacts:
    """Inspect an EAGLE head, which has no tokenizer. Whether it fits a model in all its shapes, loading it says.

    Raises as `inspect_model`.
    """
    with (
        tempfile.TemporaryDirectory(prefix="neuron-inspect-") as scratch,
        outline(uri, Path(scratch)) as (folder, digest),
    ):
        checkpoint = read_checkpoint(folder)
        if not checkpoint.is_eagle_head:
            raise InvalidModel(f"{folder}: tensor {FUSION} is missing: this is no EAGLE head")
        layer = checkpoint.config.get("transformer_layer_config")
        config = {**checkpoint.config, **(layer if isinstance(layer, Mapping) else {})}
        flat = replace(checkpoint, config=config)
        return _facts(flat, _shape_by_config(flat, knows_limits=False), digest, tied_embeddings=False)


def inspect_adapter(uri: str, model_uri: str, rules: AdapterRules, *, tries_template: bool = True) -> AdapterFacts:
    """Inspect an adapter of a model: whether it fits, and its digest, for which all of it is read.

    Called on the main thread. tries_template: whether its chat template is used, and so has to be one of the model's
    tokens.

    Raises as `fetch_adapter`, and InvalidConfig and FatalError as `inspect_model` for what is wrong with the model.
    """
    with tempfile.TemporaryDirectory(prefix="neuron-inspect-") as scratch:
        with outline(model_uri, Path(scratch, "model"), parts=TEXT) as (folder, _):
            model_config = read_config(folder)
        store = Store(Path(scratch, "store"))
        found, facts = fetch_adapter(uri, store, lambda amount: None, model_config=model_config, rules=rules)
        if any((found.folder / name).exists() for name in TEXT_FILES):
            model = fetch(model_uri, Store(Path(scratch, "text")), lambda amount: None, parts=TEXT)
            _try_text(found.folder, uri, model.folder, tries_template=tries_template)
        return msgspec.structs.replace(facts, source_digest=found.digest)


TEMPLATE_SECONDS = 60.0
TEMPLATE_BYTES = 2**30
"""What chat templates may take while they are tried, in processor time and more memory."""


class _TooLongError(Exception):
    pass


def _try_text(folder: Path, uri: str, model_dir: Path, *, tries_template: bool) -> None:
    """Before a replica does, which a bad template would keep busy. Raises FatalError (INVALID_ADAPTER, or
    ADAPTER_NOT_SUPPORTED if it needs tokens that the model lacks; INVALID_MODEL for the model)."""
    # Sampling defaults are left to replicas: `generationConfig` may replace them. Ends of answers always apply.
    options = TextOptions(chat_template="" if tries_template else "replaced", generation_config=NEUTRAL)
    base = Text(load_tokenizer(model_dir, options.chat_template))

    def stop(*_: object) -> None:
        raise _TooLongError

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = min(limit for limit in (soft, hard, mapped + TEMPLATE_BYTES) if limit != resource.RLIM_INFINITY)
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        with naming(folder, uri):
            adapted_text(base, folder, options)
    except (_TooLongError, MemoryError) as error:
        message = f"{uri}: the chat template takes more than {TEMPLATE_SECONDS:g} s or {TEMPLATE_BYTES >> 20} MiB"
        raise FatalError(ExitCode.INVALID_ADAPTER, message) from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def model_facts(
    checkpoint: Checkpoint,
    digest: str | None = None,
    backend: str = "",
    application_class: str = "",
    quantization: Quantizing = "auto",
    *,
    uri: str = "",
) -> ModelFacts:
    """Facts of a model folder. The digest is its source's, or the checkpoint's own hash. See `inspect_model`.

    uri: where the model is. Needed for the digest of a conversion of a model that is read in place.

    Raises:
        FatalError: UNSUPPORTED_ARCHITECTURE, or INVALID_MODEL when tensors and configuration contradict one another.
    """
    _architectures(checkpoint)
    config, conversion = checkpoint.config, None
    if backend in PACKAGES and package_of(backend).TASKS == ("generate",) and computes_only_vectors(config):
        name = vector_models.architecture_of(config)
        task = "rerank" if vector_model(config).head else "embed"
        message = f"{name} generates no text, and the {backend} backend computes nothing else"
        cure = f"set the task {task} (serving.task, --task) and the backend torch"
        raise FatalError(ExitCode.UNSUPPORTED_ARCHITECTURE, f"{message}: {cure}")
    if quantization != "auto" and backend not in PACKAGES:
        raise InvalidConfig("--quantization", f"needs --backend: one of {', '.join(PACKAGES)}")
    if backend in PACKAGES and not checkpoint.is_sharded and not is_private(application_class):
        conversion = conversion_of(config, checkpoint.tensors, backend, quantization, "--quantization")
        if has_known_method(config) and not package_of(backend).QUANTIZED_WEIGHTS.reads(config):
            # What such a backend gets is converted, or has been.
            config = {name: value for name, value in config.items() if name not in QUANTIZATION_FIELDS}
    if application_class and backend not in ("", NXDI):
        raise InvalidConfig(
            "--application-class", f"is for the {NXDI} backend, not for {backend}: leave out one of them"
        )
    if application_class or backend == NXDI:
        family_of(config, application_class)
    if backend == OPTIMUM:
        optimum.family_of(checkpoint.config)
    if backend == NEURONX:
        # The variable names where the model will be served; the machine that inspects may be any.
        if (platform := named_platform()) is not None:
            neuronx.check_platform(platform, "--backend")
        neuronx.family_of(checkpoint.config)
    if backend == VLLM or is_private(application_class) or (checkpoint.is_sharded and backend in ("", NXDI)):
        # Its tensors are its own business.
        shape = _shape_by_config(checkpoint, knows_limits=backend != VLLM)
    else:
        try:
            shape = _checked_shape(checkpoint)
            if application_class or backend in (NXDI, OPTIMUM):
                config = text_config(checkpoint.config)
                shape["max_position_embeddings"] = _longest(shape["architecture"], config)
        except FatalError as error:
            unknown = error.exit_code == ExitCode.UNSUPPORTED_ARCHITECTURE
            if not (unknown and _runs_on_device(checkpoint, backend, application_class)):
                raise
            shape = _shape_by_config(checkpoint)
    tied = not any(name.endswith("lm_head.weight") for name in checkpoint.tensors) or (
        checkpoint.is_sharded and text_config(checkpoint.config).get("tie_word_embeddings") is True
    )
    facts = _facts(checkpoint, shape, digest, tied_embeddings=tied)
    sees = _sees_pictures(checkpoint, backend, application_class)
    encoder = _encoder(checkpoint, application_class, facts.hidden_size) if sees and backend == NXDI else None
    facts = msgspec.structs.replace(facts, sees_pictures=sees, encoder=encoder)
    planned = conversion and PlannedConversion(
        digest=conversion.digest(facts.digest, contents_of(uri, checkpoint) if uri else ""),
        format=conversion.format,
        bytes=conversion.num_bytes,
    )
    return msgspec.structs.replace(facts, conversion=planned)


def _facts(
    checkpoint: Checkpoint, shape: Mapping[str, Any], digest: str | None, *, tied_embeddings: bool
) -> ModelFacts:
    num_bytes_by_dtype: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        num_bytes_by_dtype[tensor.dtype] += tensor.num_bytes
    [(dtype, _)] = num_bytes_by_dtype.most_common(1)
    config = text_config(checkpoint.config)
    return ModelFacts(
        **shape,
        intermediate_size=_number(config, "intermediate_size"),
        num_experts=_number(config, "num_local_experts") or _number(config, "num_experts"),
        tied_embeddings=tied_embeddings,
        model_type=str(checkpoint.config.get("model_type", "")),
        parameters=checkpoint.num_parameters,
        weights_bytes=checkpoint.num_bytes,
        dtype=BY_STORED[dtype].name,
        quantization=_quantization(checkpoint.config)[:MAX_WORDS],
        digest=digest or checkpoint.digest,
    )


def _sees_pictures(checkpoint: Checkpoint, backend: str, application_class: str) -> bool:
    """Whether a backend computes pictures for a model, and the front end reads them; of "": whether torch does. That of
    the device needs a library that can, if one is installed."""
    config = checkpoint.config
    if backend == VLLM:
        return isinstance(config.get("vision_config"), Mapping)
    if backend == NXDI:
        computed = bool(_pictures_on_device(checkpoint, application_class)) and sees_pictures()
    else:
        computed = backend in ("", TORCH) and tower_of(config) is not None
    return computed and picture_family(config) is not None


def _pictures_on_device(checkpoint: Checkpoint, application_class: str) -> Counts | Literal[""]:
    """What the model's class of NxD Inference counts of pictures."""
    own = [BY_APPLICATION.get(application_class)] if application_class else []
    families = own or [BY_ARCHITECTURE.get(name) for name in _architectures(checkpoint)]
    return next((family.pictures for family in families if family and family.pictures), "")


def _encoder(checkpoint: Checkpoint, application_class: str, hidden: int) -> EncoderFacts | None:
    counts = _pictures_on_device(checkpoint, application_class)
    return EncoderFacts(**needs_of(checkpoint.config, counts, hidden)) if counts else None


MAX_WORDS = 200
"""Characters of how weights are stored, which config.json says: a record is small."""


def _quantization(config: Mapping[str, Any]) -> str:
    """How weights are stored, in words, also where nobody reads them."""
    try:
        stored = quantization_of(config)
    except FatalError:
        return neuron_quantization_of(config)
    return stored.in_words() if stored else ""


def _runs_on_device(checkpoint: Checkpoint, backend: str, application_class: str) -> bool:
    """Whether a backend for Neuron devices has the architecture. Raises as `family_of` if it computes it wrongly."""
    names = _architectures(checkpoint)
    if backend in ("", NXDI) and (application_class or BY_ARCHITECTURE.keys() & names):
        family_of(checkpoint.config, application_class)
        return True
    if backend in ("", OPTIMUM) and optimum.BY_ARCHITECTURE.keys() & names:
        optimum.family_of(checkpoint.config)
        return True
    return False


def _checked_shape(checkpoint: Checkpoint) -> dict[str, Any]:
    """The shape of an architecture of ours, whose tensors are known."""
    if computes_only_vectors(checkpoint.config) or is_vector_model(checkpoint.folder):
        model = vector_model(checkpoint.config)
        check_tensors(vector_models.as_named(checkpoint, model), vector_models.shapes_of(model), model.quantization)
        recipe = read_recipe(checkpoint.folder, checkpoint.config)
        task, size = ("rerank", 0) if model.head else ("embed", recipe.size(model.body.hidden_size))
        shape = {name: getattr(model.body, name) for name in SHAPE}
        return {"architecture": model.architecture, **shape, "task": task, "vector_size": size}
    config = decoder_config(checkpoint.config)
    check_tensors(as_named(checkpoint, config), tensor_shapes(config), config.quantization)
    return {"architecture": config.architecture, **{name: getattr(config, name) for name in SHAPE}}


SHAPE = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocabulary_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
"""Names of config.json by ours."""


def _architectures(checkpoint: Checkpoint) -> list[str]:
    names = checkpoint.config.get("architectures") or []
    if not isinstance(names, list):
        raise InvalidModel(f"{checkpoint.folder / CONFIG_FILE}: architectures must be a list of names, got {names!r}")
    return [str(name) for name in names]


def _shape_by_config(checkpoint: Checkpoint, *, knows_limits: bool = True) -> dict[str, Any]:
    """The shape of an architecture that this runtime has not. knows_limits: those of NxD Inference's families hold."""
    names = _architectures(checkpoint)
    known = next((name for name in names if name in BY_ARCHITECTURE), names[0] if names else "")
    config = dict(text_config(checkpoint.config))
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if config.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        config["head_dim"] = hidden // heads
    if knows_limits:
        config["max_position_embeddings"] = _longest(known, config)
    for name in SHAPE.values():
        if not isinstance(config.get(name), int) or config[name] < 1:
            path = checkpoint.folder / CONFIG_FILE
            raise InvalidModel(f"{path}: {name} must be a positive integer, got {config.get(name)!r}")
    return {"architecture": known, **{ours: config[name] for ours, name in SHAPE.items()}}


def _longest(architecture: str, config: Mapping[str, Any]) -> Any:
    """Positions of a model, or of its sliding window where no longer sequence is served, see `NxdiFamily.windows`."""
    family, longest = BY_ARCHITECTURE.get(architecture), config.get("max_position_embeddings")
    if family is None or family.windows not in ("ignored", "whole"):
        return longest
    window = window_of(family, config)
    return min(window, longest) if window and isinstance(longest, int) else window or longest


def _number(config: Mapping[str, Any], name: str) -> int:
    """A number that some models lack; 0 without it."""
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def facts_as_text(uri: str, facts: ModelFacts) -> str:
    """A summary for people, one line per fact."""
    heads = f"{facts.num_heads} heads, {facts.num_kv_heads} for keys and values, of {facts.head_dim}"
    tables: dict[str, Mapping[str, Any]] = {NXDI: BY_ARCHITECTURE, OPTIMUM: optimum.BY_ARCHITECTURE}
    on_device = " or ".join(name for name, table in tables.items() if facts.architecture in table)
    only = "" if facts.architecture in ON_TORCH else f", with backend {on_device or NXDI}"
    cache_bytes = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim
    rows = {
        "model": uri,
        "architecture": f"{facts.architecture} (supported{only})",
        "weights": f"{_amount(facts.parameters)} parameters, {bytes_text(facts.weights_bytes)} in {facts.dtype}",
        "shape": f"{facts.num_layers} layers of {facts.hidden_size}, {heads}",
        "vocabulary": f"{facts.vocabulary_size:,} tokens",
        "longest": f"{facts.max_position_embeddings:,} tokens",
        "cache": f"{cache_bytes:,} elements per token",
        **({"quantization": facts.quantization} if facts.quantization else {}),
        **({"converted": _conversion_in_words(facts.conversion)} if facts.conversion else {}),
        **({"graphs": facts.graphs} if facts.graphs else {}),
        **({"task": _task_in_words(facts)} if facts.task != "generate" else {}),
        "digest": facts.digest,
    }
    return "\n".join(f"{name + ':':<14}{value}" for name, value in rows.items())


def _task_in_words(facts: ModelFacts) -> str:
    return f"{facts.task}, vectors of {facts.vector_size}" if facts.vector_size else facts.task


def _conversion_in_words(conversion: PlannedConversion) -> str:
    form = "multiplied out" if conversion.format == "none" else f"to {conversion.format}"
    return f"{form}, {bytes_text(conversion.bytes)}, digest {conversion.digest}"


def adapter_as_text(uri: str, facts: AdapterFacts) -> str:
    """As `facts_as_text`, of an adapter."""
    rows = {
        "adapter": uri,
        "trained for": facts.base_model or "(it does not say)",
        "rank": str(facts.rank),
        "targets": ", ".join(facts.targets),
        "size": bytes_text(facts.num_bytes),
        "digest": facts.digest,
    }
    return "\n".join(f"{name + ':':<14}{value}" for name, value in rows.items())


def facts_as_json(facts: ModelFacts | AdapterFacts) -> str:
    """The facts as in the record, indented."""
    return json.dumps(msgspec.to_builtins(facts), indent=2)


def _amount(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
