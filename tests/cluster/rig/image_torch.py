"""A small wheel of the installed torch, for the images of the tests: the index's build for x86-64 needs 4 GB of CUDA
libraries that nothing uses on a machine without a GPU. The libraries that torch links are replaced by generated ones
whose functions return an error, the GPU code is zeroed, the CUDA packages are no longer required. `images` gives
the wheel to builds. This torch computes on CPUs as the original does; it is only for tests, never publish it."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from cluster.rig.cache import Cache, content_key
from cluster.rig.needs import NotPossibleHere, search_path

# Sorts above the original version, satisfies a pin of it, and is visible in `pip list`. Count it up when the wheel
# changes: installers keep a wheel by its version.
LOCAL_VERSION = "cputest2"

_GPU_REQUIREMENT = re.compile(r"Requires-Dist: (nvidia-|cuda-|triton)")
_LEFT_OUT = re.compile(r"torch/test/|torch/bin/(?!torch_shm_manager)|\.pyc$|\.a$|\.\./")
_LEFT_OUT_METADATA = frozenset({"INSTALLER", "RECORD", "REQUESTED", "direct_url.json", "uv_cache.json"})
_GPU_CODE_SECTIONS = frozenset({".nv_fatbin"})
# The one CUDA library that stays unchanged: it reports "no device" itself.
_REAL_LIBRARY = "libcudart"


def small_torch(cache: Cache) -> Path:
    """A folder with one wheel of the installed torch.

    Raises:
        NotPossibleHere: torch or binutils are not installed.
    """
    torch = distribution("torch")
    key = content_key(Path(__file__), torch.version, str(torch.read_text("RECORD")))
    return cache.entry("image", "torch", key, lambda folder: write_small_wheel(torch, folder), max_entries=1)


def write_small_wheel(torch: Distribution, folder: Path) -> None:
    """Writes a wheel of `torch` into `folder`. Raises NotPossibleHere without binutils."""
    version = f"{torch.version.partition('+')[0]}+{LOCAL_VERSION}"
    site = Path(str(torch.locate_file("")))
    with tempfile.TemporaryDirectory(dir=folder) as made, Wheel(folder, "torch", version, _tag(torch)) as wheel:
        for name, file in _kept_files(torch).items():
            wheel.add(name, _without_gpu_code(file) if name.endswith("libtorch_cuda.so") else file.read_bytes())
        for library in _missing_libraries(site, Path(made)):
            wheel.add(f"torch/lib/{library.name}", library.read_bytes())
        metadata = str(torch.read_text("METADATA"))
        lines = [line for line in metadata.splitlines() if not _GPU_REQUIREMENT.match(line)]
        head = [f"Version: {version}" if line == f"Version: {torch.version}" else line for line in lines]
        wheel.add_metadata("METADATA", "\n".join(head).encode() + b"\n")
        for name in ("WHEEL", "entry_points.txt"):
            wheel.add_metadata(name, str(torch.read_text(name)).encode())


def _tag(torch: Distribution) -> str:
    tags = re.findall(r"^Tag: (\S+)$", str(torch.read_text("WHEEL")), re.MULTILINE)
    return str(tags[0])


def _kept_files(torch: Distribution) -> dict[str, Path]:
    names = (str(file) for file in torch.files or ())
    return {
        name: Path(str(torch.locate_file(name)))
        for name in names
        if not _LEFT_OUT.search(name) and ".dist-info/" not in name
    }


class Wheel:
    """A wheel under construction; leaving the context adds its RECORD."""

    def __init__(self, folder: Path, name: str, version: str, tag: str) -> None:
        self.path = folder / f"{name}-{version}-{tag}.whl"
        self._info = f"{name}-{version}.dist-info"
        self._record: list[str] = []

    def __enter__(self) -> Wheel:
        self._zip = zipfile.ZipFile(self.path, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        return self

    def add(self, name: str, data: bytes) -> None:
        entry = zipfile.ZipInfo(name)  # a fixed time, so that the wheel is reproducible
        entry.compress_type = zipfile.ZIP_DEFLATED
        executable = PurePosixPath(name).parent.name == "bin"
        entry.external_attr = (0o100755 if executable else 0o100644) << 16
        self._zip.writestr(entry, data, compresslevel=1)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        self._record.append(f"{name},sha256={digest},{len(data)}")

    def add_metadata(self, name: str, data: bytes) -> None:
        self.add(f"{self._info}/{name}", data)

    def __exit__(self, *_: object) -> None:
        record = f"{self._info}/RECORD"
        self._zip.writestr(zipfile.ZipInfo(record), "\n".join([*self._record, f"{record},,"]) + "\n")
        self._zip.close()


class _Import(NamedTuple):
    name: str
    version: str
    """Version of the symbol; "" for none."""


@dataclass(frozen=True)
class _Library:
    needed: tuple[str, ...]
    imports: frozenset[_Import]


def _run(program: str, *arguments: str | Path) -> str:
    found = shutil.which(program, path=search_path())
    if found is None:
        raise NotPossibleHere("Debian packages are missing (binutils): run `make cluster-deps`")
    return subprocess.run(
        [found, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True, env={"LC_ALL": "C"}
    ).stdout


def _without_gpu_code(library: Path) -> bytes:
    data = bytearray(library.read_bytes())
    for line in _run("readelf", "--section-headers", "--wide", library).splitlines():
        fields = line.partition("]")[2].split()  # name, type, address, offset, size, ...
        if fields and fields[0] in _GPU_CODE_SECTIONS:
            offset, size = int(fields[3], 16), int(fields[4], 16)
            data[offset : offset + size] = bytes(size)
    return bytes(data)


def _read_library(path: Path) -> _Library:
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", _run("readelf", "--dynamic", "--wide", path))
    imports = set()
    for line in _run("nm", "--dynamic", "--undefined-only", path).splitlines():
        name, _, version = line.split()[-1].partition("@")
        imports.add(_Import(name, version.lstrip("@")))
    return _Library(tuple(needed), frozenset(imports))


def _missing_libraries(site: Path, made: Path) -> Iterable[Path]:
    """The libraries of the CUDA packages that torch's own libraries need: the real one, and generated replacements.

    Torch also searches its own folder (the end of its run path).
    """
    own = [_read_library(path) for path in (site / "torch" / "lib").glob("*.so*")]
    theirs = {path.name: path for path in (site / "nvidia").glob("**/*.so*")}
    imports = frozenset().union(*(library.imports for library in own))
    for name in sorted({name for library in own for name in library.needed} & theirs.keys()):
        if name.startswith(_REAL_LIBRARY):
            yield theirs[name]
        else:
            yield _stand_in(theirs[name], imports, made)


def _stand_in(original: Path, imports: frozenset[_Import], made: Path) -> Path:
    """A library of `original`'s name with those of its symbols that are in `imports`: functions return 999, which CUDA
    calls an unknown error, data is zeros."""
    versions_of: dict[str, set[str]] = defaultdict(set)
    for wanted in imports:
        versions_of[wanted.name].add(wanted.version)
    text, data = [".text"], [".bss"]
    by_version: dict[str, list[str]] = defaultdict(list)
    for line in _run("nm", "--dynamic", "--defined-only", "--print-size", original).splitlines():
        *numbers, kind, versioned = line.split()
        name = versioned.partition("@")[0]
        if name not in versions_of or kind == "A":
            continue
        if kind in "TtWwi":
            text += [f'.globl "{name}"', f'.type "{name}",@function', f'"{name}": mov $999,%eax', "ret"]
        else:
            size = int(numbers[1], 16) if len(numbers) == 2 else 8
            data += [f'.globl "{name}"', f'.type "{name}",@object', f'.size "{name}",{size}', ".balign 16"]
            data += [f'"{name}": .zero {size}']
        for version in versions_of.pop(name) - {""}:
            by_version[version].append(name)
    source, script, library = made / "source.s", made / "versions.map", made / original.name
    source.write_text("\n".join([*text, *data, '.section .note.GNU-stack,"",@progbits']) + "\n")
    # A versioned import of a library without version definitions fails an assertion of the loader.
    script.write_text(
        "".join(f"{v} {{ global: {' '.join(f'{n};' for n in names)} }};\n" for v, names in by_version.items())
    )
    _run("as", "-o", made / "object.o", source)
    scripts = [f"--version-script={script}"] if by_version else []
    _run("ld", "-shared", "-soname", original.name, *scripts, "-o", library, made / "object.o")
    return library
