"""Makes a converted model an entry of a store, beside its source: found if it is there, else converted by one process
while others wait.

Called by the command `convert`. It may be killed and run again at any time.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from neuron_runtime.backend.torch.architecture import decoder_config, tensor_shapes
from neuron_runtime.checkpoint import (
    CONFIG_FILE,
    GRAPHS_CONFIG_FILE,
    INDEX_FILE,
    Checkpoint,
    InvalidModel,
    check_tied_head,
    check_tokenizer,
    read_checkpoint,
    read_config,
    read_whole_checkpoint,
)
from neuron_runtime.config import ModelSource
from neuron_runtime.conversion.contents import contents_of, small_files
from neuron_runtime.conversion.measuring import Unmeasured, perplexity, unmeasured
from neuron_runtime.conversion.plan import Conversion, conversion_of, quantization_config
from neuron_runtime.conversion.shards import index_of, shards_of
from neuron_runtime.conversion.weights import Weights
from neuron_runtime.conversion.writing import Written, sha256_of, write_weights
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.host import free_memory
from neuron_runtime.quantization import CONVERTER, QUANTIZATION_FIELDS, Quantizing
from neuron_runtime.record import ConversionFigures, Converted, StoredWeights
from neuron_runtime.weights.disk import make_folder, writing
from neuron_runtime.weights.fetching import described, fetch, naming
from neuron_runtime.weights.store import Manifest, Store, StoredFile
from neuron_runtime.weights.transfer import TOOLS, Amount, Tools

if TYPE_CHECKING:
    from neuron_runtime.weights.remote import RemoteStore

NOT_COPIED = {CONFIG_FILE, INDEX_FILE, GRAPHS_CONFIG_FILE}
"""Small files that are written anew, or belong to graphs of the unconverted weights."""
MEASURING = "measuring"
"""A file beside a conversion whose perplexities are being computed. Who finds one does not try again."""
MAX_REASON = 200
"""Characters of the reason for a figure that is missing."""

Report = Callable[[str], Callable[[Amount], None]]
"""For the title of a stage, what is told how far it is."""


def convert(
    model: ModelSource,
    store: Store,
    report: Report,
    *,
    backend: str,
    wanted: Quantizing,
    pinned: str = "",
    remote: RemoteStore | None = None,
    tools: Tools = TOOLS,
) -> tuple[Converted, str]:
    """The converted model as a complete entry of the store, and its address.

    Args:
        model: the source, in the store or where it is read in place; it is fetched if it is not there.
        store: a folder. With `remote`, on the way to that one.
        pinned: the digest that the converted model must have. If it is there, nothing is asked of the source.

    Raises:
        InvalidConfig: there is nothing to convert; as `conversion_of`.
        FatalError: as `fetch` and `write_weights`; INVALID_MODEL names the tensor that cannot be converted;
            CHECKSUM_MISMATCH if it would have another digest than the pinned one.
    """
    address = remote.address if remote else ""
    if pinned and (present := _present(pinned, model.uri, store, remote)):
        return present
    with described(model, store.folder, address) as (folder, source), naming(folder, model.uri):
        checkpoint = read_whole_checkpoint(folder)
        conversion = conversion_of(checkpoint.config, checkpoint.tensors, backend, wanted, "--quantization")
        check_tokenizer(folder)
        contents = contents_of(model.uri, checkpoint) if conversion else ""
    if conversion is None:
        message = f"there is nothing to convert: the {backend} backend takes the weights of {model.uri} as they are"
        raise InvalidConfig("--quantization", message)
    digest, read_bytes = conversion.digest(source, contents), 0
    if pinned and digest != pinned:
        raise FatalError(
            ExitCode.CHECKSUM_MISMATCH,
            f"{model.uri} would be converted to {digest}, but {pinned} is pinned: the model, or what converts it, has "
            "changed since; pin the current one (in a NeuronModel: set the refresh annotation)",
        )
    if present := _present(digest, model.uri, store, remote):
        return present
    entry = store.sound(digest)
    if entry is None:
        fetched = fetch(model.uri, store, report(model.uri), source, remote=remote, tools=tools)
        store.prepare()
        with store.lock(digest, model.uri, "converts it") as work:
            entry = store.sound(digest, replace=True)
            if entry is None:
                with naming(fetched.folder, model.uri):
                    shown = report(f"{model.uri}: converting to {conversion.format}")
                    made = _make(fetched.folder, conversion, source, digest, work=work, report=shown, tools=tools)
                read_bytes = made.read_bytes
                manifest = Manifest(digest=digest, uri=model.uri, created=time.time(), files=made.files)
                entry = store.publish(digest, work, manifest)
    if remote is not None:
        remote.upload(entry, report(f"{model.uri} to {remote.address}"))
    result = _result(digest, entry.folder, entry.manifest.num_bytes, read_bytes)
    return result, str(entry.folder) if remote is None else remote.uri_of(digest)


def _present(digest: str, uri: str, store: Store, remote: RemoteStore | None) -> tuple[Converted, str] | None:
    """The entry with its address, where it is to be."""
    if remote is None:
        entry = store.sound(digest)
        return (_result(digest, entry.folder, entry.manifest.num_bytes, 0), str(entry.folder)) if entry else None
    present = remote.intact(digest)
    if present is None:
        return None
    with described(ModelSource(uri=uri, converted=digest), store.folder, remote.address) as (folder, _):
        return _result(digest, folder, present.manifest.num_bytes, 0), remote.uri_of(digest)


def _make(
    folder: Path,
    conversion: Conversion,
    source: str,
    digest: str,
    *,
    work: Path,
    report: Callable[[Amount], None],
    tools: Tools,
) -> Written:
    """All files of the converted model, in `work/files`. source: the digest of what is in the folder."""
    checkpoint = read_whole_checkpoint(folder)
    check_tied_head(checkpoint)
    # All that can be refused is refused before anything is written.
    weights = Weights(checkpoint, tensor_shapes(decoder_config(checkpoint.config)), conversion)
    shards, files = shards_of(conversion.outputs), work / "files"
    written = write_weights(weights, shards, digest, work=work, report=report, tools=tools)
    with writing(work):
        names = small_files(folder) - NOT_COPIED
        for name in names:
            make_folder((files / name).parent)
            shutil.copyfile(folder / name, files / name)
        if index := index_of(shards):
            names.add(INDEX_FILE)
            _write_json(files / INDEX_FILE, index)
        figures = ConversionFigures(format=conversion.format, layer_error=written.layer_error)
        _write_config(files, checkpoint, conversion, source, figures)
        figures = _measured(checkpoint, work, figures)
        _write_config(files, checkpoint, conversion, source, figures)
        small = tuple(
            StoredFile(name, (files / name).stat().st_size, sha256_of(files / name)) for name in (CONFIG_FILE, *names)
        )
    return replace(written, files=(*written.files, *small))


def _measured(checkpoint: Checkpoint, work: Path, figures: ConversionFigures) -> ConversionFigures:
    """The figures with perplexities, or why there are none."""
    marker = work / MEASURING
    reason = "a process was killed while it computed them" if marker.exists() else unmeasured(checkpoint, free_memory())
    if not reason:
        marker.touch()
        try:
            before = perplexity(checkpoint, checkpoint.folder)
            after = perplexity(read_checkpoint(work / "files"), checkpoint.folder)
        except (RuntimeError, MemoryError, Unmeasured) as error:
            reason = str(error) or type(error).__name__
        finally:
            marker.unlink()
    if reason:
        return msgspec.structs.replace(figures, unmeasured=reason[:MAX_REASON])
    return msgspec.structs.replace(figures, perplexity=before, converted_perplexity=after)


def _write_config(
    files: Path, checkpoint: Checkpoint, conversion: Conversion, source: str, figures: ConversionFigures
) -> None:
    """config.json of the converted model, with the figures for who finds the entry."""
    config = {name: value for name, value in checkpoint.config.items() if name not in QUANTIZATION_FIELDS}
    if quantization := quantization_config(conversion):
        config["quantization_config"] = quantization
    _write_json(files / CONFIG_FILE, {**config, CONVERTER: {"source": source, **msgspec.to_builtins(figures)}})


def _write_json(path: Path, value: Any) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def _result(digest: str, folder: Path, num_bytes: int, read_bytes: int) -> Converted:
    try:
        figures = msgspec.convert(read_config(folder).get(CONVERTER), ConversionFigures)
    except msgspec.ValidationError as error:
        raise InvalidModel(f"{folder / CONFIG_FILE}: {CONVERTER}: {error}") from error
    return Converted(StoredWeights(digest=digest, bytes=num_bytes, read_bytes=read_bytes), figures)
