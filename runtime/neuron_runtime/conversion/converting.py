"""Makes a converted model an entry of a store, beside its source: found if it is there, else converted by one process
while others wait.

Called by the command `convert`. It may be killed and run again at any time. In a store in S3 a model is complete before
perplexities are computed: who is killed meanwhile repeats no more than that.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from neuron_runtime.backend.torch.architecture import decoder_config, tensor_shapes
from neuron_runtime.backend.torch.naming import as_named
from neuron_runtime.checkpoint import (
    CONFIG_FILE,
    GRAPHS_CONFIG_FILE,
    INDEX_FILE,
    QUANTIZATION_FILE,
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

NOT_COPIED = {CONFIG_FILE, INDEX_FILE, GRAPHS_CONFIG_FILE, QUANTIZATION_FILE}
"""Small files that are written anew, or belong to the unconverted weights."""
MEASURING = "measuring"
"""A file beside a conversion whose perplexities are being computed."""
MAX_ATTEMPTS = 3
"""To compute them: each may end with a process that is killed, if there is not enough memory."""
MAX_REASON = 200
"""Characters of the reason for a figure that is missing."""


class Measuring(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far it is. figures: None until they are there."""

    attempts: int = 0
    figures: ConversionFigures | None = None


class Note(Protocol):
    """Where that is told, for a process that goes on."""

    def read(self) -> bytes: ...

    def write(self, raw: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class InFile:
    path: Path

    def read(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    def write(self, raw: bytes) -> None:
        self.path.write_bytes(raw)


@dataclass(frozen=True, slots=True)
class BesideEntry:
    remote: RemoteStore
    key: str

    def read(self) -> bytes:
        return self.remote.note(self.key)

    def write(self, raw: bytes) -> None:
        self.remote.write_note(self.key, raw)


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
    fetched = fetch(model.uri, store, report(model.uri), source, remote=remote, tools=tools)
    title = f"{model.uri}, converted"
    entry = store.sound(digest) or (remote.download(digest, store, report(title)) if remote else None)
    if entry is None:
        store.prepare()
        with store.lock(digest, model.uri, "converts it") as work:
            entry = store.sound(digest, replace=True)
            if entry is None:
                shown = report(f"{model.uri}: converting to {conversion.format}")
                with naming(fetched.folder, model.uri):
                    made = _make(fetched.folder, conversion, source, digest, work=work, report=shown, tools=tools)
                    if remote is None:
                        made = _with_figures(made, fetched.folder, work)
                read_bytes = made.read_bytes
                manifest = Manifest(digest=digest, uri=model.uri, created=time.time(), files=made.files)
                entry = store.publish(digest, work, manifest)
    figures = figures_in(entry.folder)
    if remote is not None:
        remote.upload(entry, report(f"{title}, to {remote.address}"))
        if not figures.are_complete:
            with naming(fetched.folder, model.uri):
                figures = _measured(fetched.folder, entry.folder, figures, BesideEntry(remote, digest))
    weights = StoredWeights(digest=digest, bytes=entry.manifest.num_bytes, read_bytes=read_bytes)
    return Converted(weights, figures), str(entry.folder) if remote is None else remote.uri_of(digest)


def _present(digest: str, uri: str, store: Store, remote: RemoteStore | None) -> tuple[Converted, str] | None:
    """The entry with its address, where it is to be; None also if its perplexities are still to be computed."""
    if remote is None:
        entry = store.sound(digest)
        if entry is None:
            return None
        figures, manifest, address = figures_in(entry.folder), entry.manifest, str(entry.folder)
    else:
        present = remote.intact(digest)
        if present is None:
            return None
        with described(ModelSource(uri=uri, converted=digest), store.folder, remote.address) as (folder, _):
            figures = figures_in(folder)
        if not figures.are_complete:
            noted = _noted(BesideEntry(remote, digest)).figures
            if noted is None:
                return None
            figures = noted
        manifest, address = present.manifest.local, remote.uri_of(digest)
    return Converted(StoredWeights(digest=digest, bytes=manifest.num_bytes, read_bytes=0), figures), address


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
    """All files of the converted model, in `work/files`, without perplexities. source: the digest of what is in the
    folder."""
    checkpoint = read_whole_checkpoint(folder)
    check_tied_head(checkpoint)
    # All that can be refused is refused before anything is written.
    model = decoder_config(checkpoint.config)
    weights = Weights(as_named(checkpoint, model), tensor_shapes(model), conversion)
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
        config = {name: value for name, value in checkpoint.config.items() if name not in QUANTIZATION_FIELDS}
        if quantization := quantization_config(conversion):
            config["quantization_config"] = quantization
        _write_json(files / CONFIG_FILE, {**config, CONVERTER: {"source": source, **msgspec.to_builtins(figures)}})
        small = tuple(_stored(files, name) for name in (CONFIG_FILE, *names))
    return replace(written, files=(*written.files, *small))


def _with_figures(made: Written, source: Path, work: Path) -> Written:
    """With perplexities in config.json, for who finds the entry. source: the folder of the unconverted model."""
    files = work / "files"
    with writing(work):
        figures = _measured(source, files, figures_in(files), InFile(work / MEASURING))
        config = read_config(files)
        _write_json(files / CONFIG_FILE, {**config, CONVERTER: config[CONVERTER] | msgspec.to_builtins(figures)})
        others = (file for file in made.files if file.name != CONFIG_FILE)
        return replace(made, files=(*others, _stored(files, CONFIG_FILE)))


def _measured(source: Path, converted: Path, figures: ConversionFigures, note: Note) -> ConversionFigures:
    """The figures with perplexities, or why there are none. Both are folders of models."""
    before = _noted(note)
    if before.figures is not None:
        return before.figures
    checkpoint, attempts = read_checkpoint(source), before.attempts + 1
    reason = unmeasured(checkpoint, free_memory())
    if attempts > MAX_ATTEMPTS:
        reason = "processes were killed while they computed them"
    if not reason:
        note.write(msgspec.json.encode(Measuring(attempts)))
        try:
            figures = msgspec.structs.replace(
                figures,
                perplexity=perplexity(checkpoint, source),
                converted_perplexity=perplexity(read_checkpoint(converted), source),
            )
        except (RuntimeError, MemoryError, Unmeasured) as error:
            reason = str(error) or type(error).__name__
    if reason:
        figures = msgspec.structs.replace(figures, unmeasured=reason[:MAX_REASON])
    note.write(msgspec.json.encode(Measuring(attempts, figures)))
    return figures


def _noted(note: Note) -> Measuring:
    """What is told; of a damaged note nothing."""
    try:
        return msgspec.json.decode(note.read() or b"{}", type=Measuring)
    except msgspec.MsgspecError:
        return Measuring()


def _stored(files: Path, name: str) -> StoredFile:
    return StoredFile(name, (files / name).stat().st_size, sha256_of(files / name))


def _write_json(path: Path, value: Any) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def figures_in(folder: Path) -> ConversionFigures:
    """What config.json of a converted model tells."""
    try:
        return msgspec.convert(read_config(folder).get(CONVERTER), ConversionFigures)
    except msgspec.ValidationError as error:
        raise InvalidModel(f"{folder / CONFIG_FILE}: {CONVERTER}: {error}") from error
