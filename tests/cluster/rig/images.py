"""The project's images, built from its Dockerfile by BuildKit, as archives for containerd. Used by the cluster, by
tests, and as `python -m cluster.rig.images [TARGET...]`. An image with unchanged inputs comes from the cache without a
builder. Base and torch are replacements for tests: never publish these images."""

from __future__ import annotations

import fnmatch
import json
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.rig.cache import Cache, content_key
from cluster.rig.image_base import OciLayout, base_image, empty_image
from cluster.rig.image_builder import Builder, BuildFailed, running_builder
from cluster.rig.image_neuron import neuron_recipe
from cluster.rig.image_torch import small_torch
from cluster.rig.image_vllm import vllm_root
from cluster.rig.machine import StartFailed
from cluster.rig.needs import NotPossibleHere

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = "Dockerfile.neuron"
PYTHON_IMAGE = "python:3.11-slim"
# The images that run in every cluster, the one whose Jobs compile, and the one with the fake NxD Inference.
TARGETS = ("operator", "runtime-cpu")
COMPILE_TARGET = "runtime-cpu-compile"
NEURON_TARGET = "runtime-neuron"
# Not one of the Dockerfile: an engine of another maker.
VLLM_TARGET = "vllm-cpu"

_MAX_ARCHIVES = 2
# Unpacks faster than gzip and is smaller; every containerd that Kubernetes supports reads it.
_OUTPUT = "compression=zstd,force-compression=true,oci-mediatypes=true"


@dataclass(frozen=True)
class Image:
    name: str
    """Tagged by its content: a changed image has another name."""
    archive: Path
    """OCI image layout as a tar."""
    digest: str
    """Digest of the manifest, `sha256:...`."""
    layers: tuple[tuple[str, int], ...]
    """Command and packed size in bytes of each layer, lowest first."""

    @property
    def size_bytes(self) -> int:
        """Size of a pull from a registry."""
        return sum(size for _, size in self.layers)


def build_image(
    target: str, *, cache: Cache | None = None, root: Path = ROOT, say: Callable[[str], None] = print
) -> Image:
    """The image of a target of the Dockerfile, rebuilt if an input has changed.

    Raises:
        NotPossibleHere: the machine lacks something (root, Debian packages, Go, mirrors); the message has the remedy.
        BuildFailed: a step failed.
    """
    cache = cache or Cache.default()
    inputs = BuildInputs.of(target, cache, root)
    name = f"neuron-serving.test/{target}:{inputs.key}"

    def build(folder: Path) -> None:
        say(f"building image {target}")
        archive = folder / "image.tar"
        with running_builder(cache, say) as builder:
            builder.build([*inputs.arguments(), f"--output=type=oci,name={name},dest={archive},{_OUTPUT}"])

    folder = cache.entry("image", target, inputs.key, build, max_entries=_MAX_ARCHIVES)
    return describe(folder / "image.tar")


@dataclass(frozen=True)
class BuildInputs:
    """All inputs of a build."""

    target: str
    root: Path
    bases: Mapping[str, OciLayout]
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Further contexts of the Dockerfile, by name."""
    recipe: Path | None = None
    """The folder of the Dockerfile; None: the root."""

    @classmethod
    def of(cls, target: str, cache: Cache, root: Path = ROOT) -> BuildInputs:
        folders, recipe = {}, None
        if target != "operator":
            folders["wheels"] = small_torch(cache)
        if target == VLLM_TARGET:
            root = vllm_root(root, DOCKERFILE, cache)
        if target == NEURON_TARGET:
            recipe = neuron_recipe(root / DOCKERFILE, cache)
            folders["neuron"] = recipe / "neuron"
        return cls(target, root, {PYTHON_IMAGE: base_image(cache)}, folders, recipe)

    @property
    def key(self) -> str:
        context = [part for path in context_files(self.root) for part in (str(path.relative_to(self.root)), path)]
        digests = [base.digest for base in self.bases.values()]
        # These folders are in the cache, which names them by their content.
        folders = [str(path) for path in (*self.folders.values(), self.recipe) if path]
        return content_key(self.target, _OUTPUT, *digests, *folders, self.root / DOCKERFILE, *context)

    def arguments(self) -> list[str]:
        """Arguments of `buildctl build`."""
        arguments = [
            f"--local=context={self.root}",
            f"--local=dockerfile={self.recipe or self.root}",
            f"--opt=filename={DOCKERFILE}",
            f"--opt=target={self.target}",
        ]
        for number, (name, layout) in enumerate(self.bases.items()):
            arguments += [f"--oci-layout=base{number}={layout.path}"]
            arguments += [f"--opt=context:{name}=oci-layout://base{number}@{layout.digest}"]
        for name, folder in self.folders.items():
            arguments += [f"--local={name}={folder}", f"--opt=context:{name}=local:{name}"]
        return arguments


def context_files(root: Path) -> Iterator[Path]:
    """The files that `.dockerignore` lets into a build, in a fixed order.

    Supports the syntax that the project uses: `*`, then `!PATH` for included paths, then excluded patterns,
    `**/NAME` anywhere or PATH with wildcards.

    Raises:
        ValueError: the file uses other syntax.
    """
    lines = [line for line in (root / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    let_in = [line[1:] for line in lines if line.startswith("!")]
    left_out = lines[1 + len(let_in) :]
    if lines[:1] != ["*"] or any(line.startswith("!") for line in left_out):
        raise ValueError(f"{root / '.dockerignore'}: expected `*`, then lines with `!`, then excluded patterns")

    def stays_out(path: Path) -> bool:
        name = str(path.relative_to(root))
        return any(
            fnmatch.fnmatch(path.name, p[3:]) if p.startswith("**/") else fnmatch.fnmatch(name, p) for p in left_out
        )

    def walk(path: Path) -> Iterator[Path]:
        if stays_out(path):
            return
        if path.is_dir():
            for child in sorted(path.iterdir()):
                yield from walk(child)
        elif path.exists():
            yield path

    for name in sorted(let_in):
        yield from walk(root / name)


def lint(target: str, builder: Builder, cache: Cache, *, root: Path = ROOT) -> str:
    """Findings of BuildKit's checks for a target, "" for none. Nothing is built and no base is needed.

    Raises:
        BuildFailed: the Dockerfile cannot be read, or has no such target.
    """
    stand_in = empty_image(cache)
    bases = dict.fromkeys((PYTHON_IMAGE, neuron_image(root)), stand_in)
    return builder.ask("frontend.lint", BuildInputs(target, root, bases).arguments())


def neuron_image(root: Path = ROOT) -> str:
    """The default base image of `runtime-neuron`."""
    for line in (root / DOCKERFILE).read_text().splitlines():
        if line.startswith("ARG NEURON_IMAGE="):
            return line.partition("=")[2]
    raise ValueError(f"{DOCKERFILE} has no ARG NEURON_IMAGE with a default")


def read_manifest(archive: Path) -> tuple[Any, Any]:
    """Manifest and configuration of the image in an archive that BuildKit wrote."""
    with tarfile.open(archive) as tar:
        manifest = _read_blob(tar, _entry(tar)["digest"])
        return manifest, _read_blob(tar, manifest["config"]["digest"])


def _entry(tar: tarfile.TarFile) -> Any:
    (entry,) = _read_json(tar, "index.json")["manifests"]
    return entry


def _read_blob(tar: tarfile.TarFile, digest: str) -> Any:
    return _read_json(tar, f"blobs/{digest.replace(':', '/')}")


def _read_json(tar: tarfile.TarFile, name: str) -> Any:
    file = tar.extractfile(name)
    assert file is not None
    return json.load(file)


def describe(archive: Path) -> Image:
    """Reads name, digest and sizes from an archive that BuildKit wrote."""
    with tarfile.open(archive) as tar:
        entry = _entry(tar)
    manifest, config = read_manifest(archive)
    history = config["history"]
    made_by = [step["created_by"] for step in history if not step.get("empty_layer")]
    sizes = [layer["size"] for layer in manifest["layers"]]
    name = entry["annotations"]["io.containerd.image.name"]
    return Image(name, archive, entry["digest"], tuple(zip(made_by, sizes, strict=True)))


def main(names: Sequence[str]) -> int:
    """`python -m cluster.rig.images [TARGET...]`: builds, then prints each image's name, archive and layers."""
    known = (*TARGETS, COMPILE_TARGET, NEURON_TARGET, VLLM_TARGET)
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"no such target: {' '.join(unknown)}; there are {' '.join(known)}", file=sys.stderr)
        return 2
    try:
        for target in names or TARGETS:
            image = build_image(target, say=lambda line: print(line, flush=True))
            print(f"{image.name}  {image.size_bytes / 1e6:.1f} MB to pull\n  {image.archive}")
            for made_by, size in image.layers:
                print(f"  {size / 1e6:8.1f} MB  {' '.join(made_by.split())[:100]}")
            sys.stdout.flush()
    except (NotPossibleHere, StartFailed, BuildFailed) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
