"""Models that see pictures, by NxD Inference: tokens equal those of transformers, and what does not work is refused.

Runs on the fake in its strict mode, or with NXDI_UNDER_TEST=installed on the NxD Inference of this machine.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from helpers.nxdi_engine import backend_for, library, served, settings_for
from helpers.nxdi_pictures import SeeingModel

KINDS = ("Pixtral", "Llama 4")
SMALL: dict[str, Any] = {
    "layout": "slots",
    "limits": {"maxSequences": 4, "maxModelLength": 256},
    "buckets": {"context": [32, 64, 128, 256]},
    "media": {"maxImages": 3},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SeeingModel]:
    return {kind: SeeingModel(tmp_path_factory.mktemp("model") / "model", kind) for kind in KINDS}


@pytest.fixture(autouse=True)
def own_work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work"))


@pytest.mark.parametrize("sampling", ["Device", "Host", "DeviceWithLogits"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_those_of_transformers(
    models: dict[str, SeeingModel], tmp_path: Path, kind: str, sampling: str
) -> None:
    model, random = models[kind], Random(1)
    parts: list[list[int | tuple[int, int]]] = [
        [5, (2, 3), 7],
        [40],
        [(3, 1), (1, 4), 3],
        [1],
        [9, (4, 4)],
        [(1, 2), 6, (2, 2), 30, (1, 1)],
        [31],
        [32],
        [64],
        [(8, 1)],
        [2, (1, 1), 200],
    ]
    requests = [model.request(str(number), random, one) for number, one in enumerate(parts)]
    with library():
        settings = settings_for(model, **SMALL, sampling=sampling)
        answers = served(backend_for(model, settings, tmp_path / "artifact"), requests)
    for request in requests:
        model.check(request, answers[request.request_id])
