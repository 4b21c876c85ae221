"""What replaces AWS's Neuron container, which only a registry has, as the base of `runtime-neuron`: the dependencies of
`runtime-cpu`, whose layers the nodes have already, and the fake NxD Inference in place of the Neuron libraries. Like
AWS's, it has a `vllm` too: the stand-in. Only `images` uses it; it is never published."""

from __future__ import annotations

import shutil
from pathlib import Path

from cluster.rig.cache import Cache, content_key

FAKES = Path(__file__).resolve().parents[2] / "fakes"
LIBRARIES, VLLM = FAKES / "nxdi", FAKES / "vllm_serve"
NEURON_FOLDER = "/opt/neuron"
"""The folder of the Neuron libraries. It is outside the Python environment, so that a test can run the
image without one of them."""

_BASE = "FROM ${NEURON_IMAGE} AS runtime-neuron\n"
_STAGE = f"""\
FROM base AS neuron-container
COPY --link --from=runtime-dependencies /opt/venv /opt/venv
COPY --link --from=neuron . {NEURON_FOLDER}
RUN ln -s {NEURON_FOLDER}/serve.py /usr/local/bin/vllm \\
    && python -m compileall -q --invalidation-mode unchecked-hash {NEURON_FOLDER}
ENV PYTHONPATH={NEURON_FOLDER} FAKE_NXDI_PLATFORM=inf2 FAKE_NXDI_DEVICES=/tmp/neuron-cores

FROM neuron-container AS runtime-neuron
"""


def neuron_recipe(dockerfile: Path, cache: Cache) -> Path:
    """A folder with the Dockerfile on top of the replacement, and with `neuron`, the context that this needs."""
    recipe = dockerfile.read_text()
    if recipe.count(_BASE) != 1:
        raise ValueError(f"{dockerfile} has no line {_BASE.strip()!r}")

    def write(folder: Path) -> None:
        (folder / dockerfile.name).write_text(recipe.replace(_BASE, _STAGE))
        for fake in (LIBRARIES, VLLM):
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(fake, folder / "neuron", ignore=ignore, dirs_exist_ok=True)

    key = content_key(Path(__file__), dockerfile, LIBRARIES, VLLM)
    return cache.entry("image", "neuron", key, write, max_entries=2)
