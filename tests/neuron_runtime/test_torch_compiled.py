"""Compiled decode steps: logits and tokens are the eager ones; they load without a compiler; others are refused."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from cluster.rig.cache import Cache
from helpers.artifacts import places
from helpers.torch_models import random_model, reference, reference_logits, runtime_config
from helpers.torch_parity import (
    TOLERANCE,
    Cut,
    check_greedy,
    feed,
    load_decoder_and_cache,
    random_sequences,
    traced_step,
)
from neuron_runtime.artifacts.compiling import make, wanted_artifact
from neuron_runtime.artifacts.loading import provide
from neuron_runtime.artifacts.store import artifact_store
from neuron_runtime.backend.torch import compiler
from neuron_runtime.backend.torch.compiled import CompiledDecoder, eager_because, load_library
from neuron_runtime.backend.torch.graphs import ONE_ROW, SEVERAL_ROWS
from neuron_runtime.config import EngineLimits
from neuron_runtime.core import Request, Sampling
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="steps are compiled for x86-64 only")

WINDOWED: dict[str, Any] = {
    "architecture": "Qwen2ForCausalLM",
    "use_sliding_window": True,
    "sliding_window": 40,
    "max_window_layers": 1,
}
# Rows join out of order, decode together and alone, past the window, and leave.
STEPS: list[list[Cut]] = [
    [(0, 0, 18), (2, 0, 24)],
    [(2, 24, 25), (0, 18, 19)],
    [(1, 0, 1), (3, 0, 64)],
    *[[(3, 64 + i, 65 + i), (0, 19 + i, 20 + i), (1, 1 + i, 2 + i)] for i in range(20)],
    *[[(3, 84 + i, 85 + i)] for i in range(4)],
]
LENGTHS = (39, 21, 25, 88)


class Compiled(NamedTuple):
    model_dir: Path
    store: Path
    artifact: Path


def silent(stage: str, share: float) -> None:
    pass


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """A model in the slot layout, compiled into a store: in half a minute, once for all that the artifact depends
    on."""
    config = msgspec.structs.replace(runtime_config(layout="slots"), compile=True)
    wanted = wanted_artifact(config, random_model(tmp_path_factory.mktemp("model"), **WINDOWED))

    def made(store: Path) -> tuple[Path, bool]:
        entry, reused = make(wanted, artifact_store(store), silent)
        return entry.folder, reused

    def build(store: Path) -> None:
        assert not made(store)[1]

    store = Cache.default().entry("compiled", "slots", wanted.key, build)
    artifact, reused = made(store)
    assert reused
    return Compiled(wanted.model_dir, store, artifact)


def check_logits(decoder: Any, cache: Any, lines: Any, model_dir: Path) -> None:
    sequences = random_sequences(*LENGTHS)
    found = feed(decoder, cache, lines, STEPS, sequences)
    model = reference(model_dir)
    for logits, tokens in zip(found, sequences, strict=True):
        fed = ~logits[:, 0].isnan()
        assert fed.any()
        torch.testing.assert_close(logits[fed], reference_logits(model, tokens)[fed], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_compiled_steps_over_slots_match_transformers(compiled: Compiled) -> None:
    decoder, cache, lines = load_decoder_and_cache(compiled.model_dir, "slots")
    check_logits(CompiledDecoder.load(decoder, compiled.artifact, blocks=False), cache, lines, compiled.model_dir)


@pytest.mark.long
def test_compiled_steps_over_blocks_match_transformers(tmp_path: Path) -> None:
    model_dir = random_model(tmp_path / "model", architecture="Qwen3ForCausalLM", head_dim=32, num_layers=1)
    config = runtime_config(layout="blocks", block_size=8)
    program = (
        "import sys; from pathlib import Path; from neuron_runtime.backend.torch import compiler; "
        "from neuron_runtime.config import parse_config; config = parse_config(sys.stdin.buffer.read()); "
        "compiler(config, Path('model').absolute()).graphs()[1].compile(Path())"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, input=msgspec.json.encode(config), check=True)
    decoder, cache, lines = load_decoder_and_cache(model_dir, "blocks")
    (tmp_path / ONE_ROW.file).symlink_to(tmp_path / SEVERAL_ROWS.file)
    several = CompiledDecoder.load(decoder, tmp_path, blocks=True)._several_rows
    check_logits(
        CompiledDecoder(decoder, traced_step(decoder, "blocks"), several, blocks=True), cache, lines, model_dir
    )


SERVE_WITHOUT_INDUCTOR = """
import json, sys
from pathlib import Path

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[2].startswith(("_inductor", "_dynamo")) and name.startswith("torch."):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refusing())
from neuron_runtime.backend.torch import load_backend
from neuron_runtime.config import parse_config
from neuron_runtime.core import Request, Sampling
from neuron_runtime.engine.loop import Engine

model_dir, artifact, prompts = json.loads(sys.argv[1])
backend = load_backend(Path(model_dir), parse_config(sys.stdin.buffer.read()), lambda *_: None, Path(artifact))
assert type(backend._decoder).__name__ == "CompiledDecoder"
backend.warm_up(lambda *_: None)
engine = Engine(backend)
tokens = {}
for name, (prompt, length) in prompts.items():
    engine.add(Request(name, tuple(prompt), Sampling(max_tokens=length, temperature=0.0)))
while engine.has_work:
    for event in engine.step():
        tokens.setdefault(event.request_id, []).extend(event.token_ids)
print(json.dumps(tokens))
"""


@pytest.mark.slow
def test_tokens_of_a_process_without_a_compiler_are_those_of_the_model(compiled: Compiled) -> None:
    rng = np.random.default_rng(5)
    asked = [
        Request(f"r{i}", tuple(rng.integers(0, 256, length).tolist()), Sampling(max_tokens=25 - 3 * i, temperature=0.0))
        for i, length in enumerate((60, 1, 33, 12, 17))
    ]
    prompts = {one.request_id: (one.prompt_token_ids, one.sampling.max_tokens) for one in asked}
    done = subprocess.run(
        [
            *(sys.executable, "-c", SERVE_WITHOUT_INDUCTOR),
            json.dumps([str(compiled.model_dir), str(compiled.artifact), prompts]),
        ],
        input=msgspec.json.encode(runtime_config(layout="slots", max_sequences=3, max_model_length=96)),
        env={"PATH": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    check_greedy(compiled.model_dir, asked, json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"dtype": "bfloat16"}, 'settings.dtype: "float32" instead of "bfloat16"'),
        ({"layout": "blocks"}, 'settings.layout: "slots" instead of "blocks"'),
    ],
)
def test_an_artifact_for_other_settings_is_refused_with_the_difference(
    change: dict[str, str], difference: str, compiled: Compiled
) -> None:
    config = msgspec.structs.replace(runtime_config(), compile=True, **change)
    with pytest.raises(FatalError, match=difference) as caught:
        provide(config, compiled.model_dir, places(compiled.store, on_miss="fail"), silent)
    assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING


def test_a_file_that_is_no_library_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "decode-one.so"
    path.write_bytes(b"\x7fELF")
    with pytest.raises(FatalError, match=r"decode-one\.so: cannot load the compiled step") as caught:
        load_library(path)
    assert caught.value.exit_code == ExitCode.ARTIFACT_MISSING


def test_what_is_compiled_depends_on_no_number_of_sequences_or_tokens(tmp_path: Path) -> None:
    model_dir = random_model(tmp_path)
    config = runtime_config()
    larger = msgspec.structs.replace(config, limits=EngineLimits(max_sequences=64, max_model_length=128))
    blocks, small_blocks = (runtime_config(layout="blocks", block_size=size) for size in (16, 8))
    needs = [compiler(one, model_dir).needs for one in (config, larger, blocks, small_blocks)]
    assert needs[0] == needs[1]
    assert len({json.dumps(one.settings) for one in needs}) == 3


def test_what_is_compiled_is_known_without_torch(tmp_path: Path) -> None:
    random_model(tmp_path)
    program = (
        "import sys; from pathlib import Path; from neuron_runtime.backend.torch import compiler; "
        "from neuron_runtime.config import parse_config; config = parse_config(sys.stdin.buffer.read()); "
        "print(compiler(config, Path.cwd()).needs.libraries['torch'], 'torch' in sys.modules)"
    )
    config = msgspec.json.encode(runtime_config())
    seen = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, input=config, stdout=subprocess.PIPE, check=True
    )
    assert seen.stdout.split() == [torch.__version__.partition("+")[0].encode(), b"False"]


def test_float16_is_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"dtype.*must be float32 or bfloat16 if `compile` is true, got float16"):
        compiler(runtime_config(dtype="float16"), random_model(tmp_path))


def test_a_missing_compiler_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiler(runtime_config(), random_model(tmp_path))
    assert "c++" in found.tools()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FatalError, match=r"g\+\+ is not installed: use the image `runtime-cpu-compile`") as caught:
        found.tools()
    assert caught.value.exit_code == ExitCode.COMPILE_FAILED


def test_a_processor_without_the_products_of_a_dtype_runs_eager_steps_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, *_ = load_decoder_and_cache(random_model(tmp_path), "slots")
    assert eager_because(decoder) is None
    monkeypatch.setattr("neuron_runtime.backend.torch.linear.packs", lambda dtype: False)
    plain, *_ = load_decoder_and_cache(tmp_path, "slots")
    assert "oneDNN has no torch.float32 products" in str(eager_because(plain))
