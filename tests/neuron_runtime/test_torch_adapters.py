"""Adapters on the torch backend: every sequence gets the tokens of its own adapter, as PEFT on transformers computes
them, whatever else shares its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.adapters import tensor_name, write_adapter
from helpers.engine_driver import AtOnce
from helpers.quantized import FORMATS, quantize
from helpers.torch_models import (
    MODELS,
    load_backend,
    random_model,
    reference,
    reference_logits,
    use_adapter,
    with_adapters,
)
from helpers.torch_parity import (
    TOLERANCE,
    check_greedy,
    feed,
    load_adapters,
    load_decoder_and_cache,
    on_ranks,
    random_sequences,
    serve,
    traced_step,
)
from neuron_runtime.adapters.peft import TARGETS, WEIGHTS_FILE
from neuron_runtime.backend.torch import lora
from neuron_runtime.backend.torch.adapters import Adapters
from neuron_runtime.backend.torch.architecture import decoder_config
from neuron_runtime.backend.torch.backend import TorchBackend
from neuron_runtime.backend.torch.compiled import CompiledDecoder
from neuron_runtime.backend.torch.linear import linear
from neuron_runtime.backend.torch.lora import AdaptedLinear, Pair, Route
from neuron_runtime.backend.torch.ranks import ALONE, Ranks
from neuron_runtime.backend_protocol import IllegalBatch
from neuron_runtime.checkpoint import read_config
from neuron_runtime.config import AdapterOptions
from neuron_runtime.core import KNOWN, NO_TOKEN, Added, BackendLimits, Batch, Request, Rows, Sampling
from neuron_runtime.engine.loop import Engine
from neuron_runtime.errors import ExitCode, FatalError

FAMILIES = (
    "Llama 3.2",
    "Mistral",
    "Qwen2, window in the upper layers",
    "Qwen3 with biases and a window in some layers",
)


KERNELS = [pytest.param(one, id="kernel" if one else "torch") for one in dict.fromkeys((lora.kernel(), None))]


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What computes a few tokens of an adapter, a parameter of the test; None: torch. Before any model is loaded."""
    monkeypatch.setattr(lora, "kernel", lambda: request.param)
    return request.param


def with_kernels(test: Any) -> Any:
    return pytest.mark.parametrize("kernel", KERNELS, indirect=True)(test)


def without_kernel(test: Any) -> Any:
    return pytest.mark.parametrize("kernel", KERNELS[-1:], indirect=True)(test)


def adapters_of(model: Path, folder: Path) -> dict[str, Path]:
    """Adapters of all kinds that are served, by name."""
    config = read_config(model)
    kinds: dict[str, dict[str, Any]] = {
        "all": {"rank": 4},
        "attention": {"rank": 3, "targets": ("q_proj", "v_proj"), "config": {"use_rslora": True}},
        "ranks": {
            "rank": 2,
            "targets": ("k_proj", "o_proj", "down_proj"),
            "ranks": {(layer, "o_proj"): 5 for layer in range(config["num_hidden_layers"])},
            "config": {"rank_pattern": {"o_proj": 5}},
        },
        "one layer": {"rank": 6, "layers": [1], "config": {"layers_to_transform": [1]}},
        "inner": {"rank": 1, "targets": ("up_proj", "gate_proj")},
    }
    return {
        name: write_adapter(folder / name, config, seed=seed, **kind) for seed, (name, kind) in enumerate(kinds.items())
    }


def request(number: int, adapter: str, prompt: list[int], max_tokens: int) -> Request:
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
    return Request(f"{number} {adapter}", tuple(prompt), sampling, adapter=adapter)


class Routed:
    """A decoder for `feed` whose sequence i has the place i."""

    def __init__(self, decoder: Any, adapters: Adapters, lines: Any) -> None:
        self._decoder, self._adapters = decoder, adapters
        self._sequence = {int(of_row[0]): number for number, of_row in enumerate(lines)}
        self.logits = decoder.logits

    def forward(self, tokens: torch.Tensor, plan: Any) -> torch.Tensor:
        slots = np.array([self._sequence[int(line)] for line in plan.rows.lines[:, 0]])
        decoder = self._adapters.decoder_for(slots, plan.rows.num_tokens) or self._decoder
        return decoder.forward(tokens, plan)


LIMITS = BackendLimits(
    max_rows=6,
    max_model_length=88,
    max_step_tokens=200,
    num_blocks=6,
    max_adapters=5,
    max_loaded_adapters=5,
    max_adapter_rank=6,
    adapter_targets=TARGETS,
)


def placed(adapters: Adapters, given: Mapping[str, Path]) -> None:
    """Sequence i uses place i, the base model for 0."""
    for name, folder in given.items():
        adapters.add(name, adapters.read(folder))
    places = tuple(enumerate(given, 1))
    added = tuple(Added(i, (0,), 1, Sampling(), (i,), adapter=i) for i in range(len(given) + 1))
    adapters.apply(Batch(0, Rows(), adapters=places, added=added))


def routed(model: Path, adapters: Mapping[str, Path], layout: str, ranks: Ranks = ALONE) -> tuple[Any, Any, Any]:
    """What `feed` needs."""
    decoder, cache, lines = load_decoder_and_cache(model, layout, rows=6, ranks=ranks)
    held = Adapters(decoder, decoder_config(read_config(model)), LIMITS, ranks.rank, ranks.size)
    placed(held, adapters)
    return Routed(decoder, held, lines), cache, lines


PROMPTS = (3, 40, 2, 30, 9, 1)
STEPS = [
    [(i, 0, PROMPTS[i]) for i in range(4)],
    [(i, 0, PROMPTS[i]) for i in (4, 5)],
    *[[(i, length + n, length + n + 1) for i, length in enumerate(PROMPTS)] for n in range(3)],
    [(5, 4, 30), (0, 6, 7), (2, 5, 25)],
    [(3, 33, 60), (2, 25, 26), (0, 7, 8)],
]
"""Whole prompts, chunks, and rows of one token, of all sequences."""


@with_kernels
@pytest.mark.parametrize("name", FAMILIES)
def test_the_logits_of_each_sequence_are_those_of_peft_with_its_adapter(kernel: Any, name: str, tmp_path: Path) -> None:
    model = random_model(tmp_path / "model", **MODELS[name])
    adapters = adapters_of(model, tmp_path)
    ends = {i: max(end for step in STEPS for j, _, end in step if j == i) for i in range(6)}
    sequences = random_sequences(*ends.values())
    found = feed(*routed(model, adapters, "blocks" if "Qwen" in name else "slots"), STEPS, sequences)
    tuned = with_adapters(reference(model), adapters)
    for tokens, logits, adapter in zip(sequences, found, ("", *adapters), strict=True):
        use_adapter(tuned, adapter)
        torch.testing.assert_close(logits, reference_logits(tuned, tokens), atol=TOLERANCE, rtol=0)


def test_adapters_change_the_layers_of_a_quantized_model_as_those_of_its_weights(tmp_path: Path) -> None:
    model = random_model(tmp_path / "source")
    plain = quantize(model, tmp_path / "model", FORMATS["int8 per channel"])
    adapters = adapters_of(model, tmp_path)
    sequences = random_sequences(*{i: end for step in STEPS for i, _, end in step}.values())
    found = feed(*routed(tmp_path / "model", adapters, "blocks"), STEPS, sequences)
    tuned = with_adapters(reference(plain), adapters)
    for tokens, logits, adapter in zip(sequences, found, ("", *adapters), strict=True):
        use_adapter(tuned, adapter)
        torch.testing.assert_close(logits, reference_logits(tuned, tokens), atol=TOLERANCE, rtol=0)


@with_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_of_places_adds_to_each_token_what_its_place_adds_alone(
    kernel: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the ranks, the sizes and the number of threads."""
    rng = np.random.default_rng(0)
    generator = torch.Generator().manual_seed(0)
    num_places, num_inputs, sizes = 12, 40, (1100, 550, 550)
    num_outputs, rank = sum(sizes), 9

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    base, route = random(num_outputs, num_inputs), Route(dtype)
    layer = AdaptedLinear(linear(base), num_inputs, sizes, dtype, num_places=num_places, rank=rank, route=route)
    added = torch.zeros(num_places + 1, num_outputs, num_inputs)
    for place in (*range(1, num_places + 1), 3, 5):  # two get other weights, of a smaller rank
        own = int(rng.integers(1, rank + 1))
        pairs = [
            None if (place + part) % 4 == 0 else Pair(random(num_inputs, own), random(own, size))
            for part, size in enumerate(sizes)
        ]
        layer.put(place, pairs)
        added[place] = torch.cat(
            [
                torch.zeros(size, num_inputs) if pair is None else (pair.a.float() @ pair.b.float()).T
                for pair, size in zip(pairs, sizes, strict=True)
            ]
        )
    of_kernel = 0
    for number in range(60):
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1 + number % 3)  # noqa: B023 - called in this turn
        rows = int(rng.integers(1, 12))
        places = rng.choice([rng.integers(0, num_places + 1, rows), rng.integers(0, 3, rows)])
        num_tokens = rng.choice([np.ones(rows, int), rng.integers(1, 40, rows)])
        route.set(places, num_tokens)
        of_kernel += route.places is not None
        x = random(int(num_tokens.sum()), num_inputs)
        expected, of_token = x.float() @ base.float().T, torch.from_numpy(np.repeat(places, num_tokens))
        for place in set(places.tolist()):
            mine = of_token == place
            expected[mine] += x[mine].float() @ added[place].T
        tolerance = {"atol": 1e-3, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 1.0, "rtol": 0.02}
        torch.testing.assert_close(layer(x).float(), expected, **tolerance)
    assert (of_kernel > 30) == (kernel is not None)


@with_kernels
def test_a_long_run_of_tokens_is_left_to_torch(kernel: Any) -> None:
    route = Route(torch.float32)
    route.set(np.array([1, 2, 2]), np.array([3, lora.MAX_FEW, 1]))
    assert [(one.begin, one.end) for one in route.segments][-1] == (3, 4 + lora.MAX_FEW)
    if kernel:
        assert route.places is not None
        assert route.places.tolist() == [1] * 3 + [0] * (lora.MAX_FEW + 1)
    assert Route(torch.float16).kernel is None


def test_without_a_compiler_torch_computes_adapters_which_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    lora.kernel.cache_clear()
    try:
        assert [Route(torch.float32).kernel for _ in range(2)] == [None, None]
    finally:
        lora.kernel.cache_clear()
    (said,) = capsys.readouterr().err.splitlines()
    assert "adapters are computed without the kernel for them" in said
    assert "no-such-compiler" in said


@with_kernels
def test_infinite_numbers_of_one_sequence_reach_no_other(kernel: Any) -> None:
    route = Route(torch.float32)
    layer = AdaptedLinear(linear(torch.eye(4)), 4, (4,), torch.float32, num_places=2, rank=1, route=route)
    for place in (1, 2):
        layer.put(place, [Pair(torch.ones(4, 1), torch.ones(1, 4))])
    # The first token also fills the lane that is too short.
    route.set(np.array([1, 2, 0, 1]), np.ones(4, dtype=int))
    x = torch.ones(4, 4)
    x[0] = float("nan")
    assert layer(x)[1:].tolist() == [[5.0] * 4, [1.0] * 4, [5.0] * 4]


@pytest.mark.parametrize("size", [2, 4])
def test_the_logits_of_ranks_are_those_of_one_rank_with_the_same_adapters(size: int, tmp_path: Path) -> None:
    model = random_model(tmp_path / "model", **MODELS["Qwen3"])
    adapters, sequences = adapters_of(model, tmp_path), random_sequences(8, 44, 27, 61, 13, 31)

    def logits(ranks: Ranks) -> Any:
        return feed(*routed(model, adapters, "slots", ranks), STEPS, sequences)

    expected = logits(ALONE)
    for found in on_ranks(size, tmp_path, logits):
        for one, other in zip(found, expected, strict=True):
            seen = ~other.isnan()
            torch.testing.assert_close(one[seen], other[seen], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("layout", ["slots", "blocks"])
def test_steps_without_an_adapter_stay_compiled(layout: str, tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    adapters = adapters_of(model, tmp_path)
    decoder, cache, lines = load_decoder_and_cache(model, layout, rows=6)
    graph = traced_step(decoder, layout)
    held = Adapters(decoder, decoder_config(read_config(model)), LIMITS, 0, 1)
    placed(held, adapters)
    compiled = CompiledDecoder(decoder, graph, graph, blocks=layout == "blocks")
    steps = [[(0, 0, 3), (1, 0, 5)], [(0, 3, 4)], [(0, 4, 5), (1, 5, 6)], [(1, 6, 7)], [(0, 5, 6)]]
    sequences = random_sequences(6, 7)
    found = feed(Routed(compiled, held, lines), cache, lines, steps, sequences)
    assert graph.num_rows == [1, 1]
    tuned = with_adapters(reference(model), adapters)
    for tokens, logits, adapter in zip(sequences, found, ("", "all"), strict=True):
        use_adapter(tuned, adapter)
        torch.testing.assert_close(logits, reference_logits(tuned, tokens), atol=TOLERANCE, rtol=0)


SERVED = {"max_sequences": 4, "max_model_length": 64, "max_step_tokens": 24}


@pytest.mark.parametrize("layout", ["slots", "blocks"])
def test_requests_of_more_adapters_than_places_get_their_own_tokens(layout: str, tmp_path: Path) -> None:
    model = random_model(tmp_path / "model")
    adapters = adapters_of(model, tmp_path)
    prompts = random_sequences(*[5, 21, 40, 1, 9, 33] * 3)
    names = ["", *adapters] * 3
    asked = [request(i, names[i], prompt, 9) for i, prompt in enumerate(prompts)]
    options = AdapterOptions(max_active=2, max_rank=6, max_loaded=3)
    arriving = [(i * 2, one) for i, one in enumerate(asked)]
    tokens, _, _ = serve(model, arriving, loaded=adapters, layout=layout, adapters=options, **SERVED)
    check_greedy(model, asked, tokens, adapters)


@pytest.mark.parametrize(
    ("num_requests", "seed"), [(30, 0), *(pytest.param(500, seed, marks=pytest.mark.long) for seed in (1, 2))]
)
def test_random_requests_get_the_tokens_of_their_adapter(num_requests: int, seed: int, tmp_path: Path) -> None:
    """Six adapters with three places, and memory for four; blocks are scarce, prompts share prefixes, some requests are
    aborted, and adapters are dropped and loaded again."""
    model = random_model(tmp_path / "model", num_layers=1)
    loaded = {
        f"adapter {number}": write_adapter(tmp_path / str(number), read_config(model), seed=number, rank=1 + number % 4)
        for number in range(6)
    }
    rng = np.random.default_rng(seed)
    prefixes = random_sequences(8, 16, 24)
    options = AdapterOptions(max_active=3, max_rank=4, max_loaded=4)
    backend = load_backend(
        model,
        adapters=options,
        layout="blocks",
        block_size=8,
        num_blocks=12,
        max_sequences=5,
        max_model_length=64,
        max_step_tokens=20,
    )
    engine = Engine(backend)
    assert engine._adapters is not None
    engine._adapters._thread = AtOnce()  # when a read ends decides what is preempted
    try:
        load_adapters(engine, loaded)
        asked: dict[str, Request] = {}
        tokens: dict[str, list[int]] = {}
        aborted: set[str] = set()
        dropped = ""
        while len(asked) < num_requests or engine.has_work:
            if len(asked) < num_requests and engine.stats.num_waiting < 6:
                prompt = prefixes[rng.integers(3)] + rng.integers(0, 256, rng.integers(1, 12)).tolist()
                adapter = str(rng.choice(["", *loaded]))
                if dropped and rng.random() < 0.3:
                    engine.load_adapter(dropped, loaded[dropped])
                    dropped = ""
                elif not dropped and rng.random() < 0.05:
                    engine.drop_adapter(dropped := str(rng.choice([*loaded])))
                if adapter != dropped or not adapter:
                    one = request(len(asked), adapter, prompt, int(rng.integers(1, 25)))
                    asked[one.request_id], tokens[one.request_id] = one, []
                    engine.add(one)
            assert all(not why for _, why in engine.take_adapter_news())
            for event in engine.step():
                tokens[event.request_id] += event.token_ids
            # Those that wait for an adapter that was dropped.
            aborted |= {name for name, _ in engine.take_refused()}
            if rng.random() < 0.03 and len(asked) > len(aborted):
                name = str(rng.choice([*asked][-8:]))
                if len(tokens[name]) < asked[name].sampling.max_tokens:
                    engine.abort(name)
                    aborted.add(name)
        assert engine.stats.num_preemptions_total > 0
        assert engine.stats.num_prefix_hits_total > 0
        assert aborted
    finally:
        engine.close()
        backend.close()
    ended = [one for name, one in asked.items() if name not in aborted]
    check_greedy(model, ended, tokens, loaded)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def backend(model: Path) -> Iterator[TorchBackend]:
    backend = load_backend(
        model, adapters=AdapterOptions(max_active=2, max_rank=4, targets=("q_proj", "v_proj")), **SERVED
    )
    yield backend
    backend.close()


def step(start: int, num_tokens: int, **changes: Any) -> Batch:
    """Of one sequence, in slot 0."""
    rows = Rows((0,), (start,), (num_tokens,), (NO_TOKEN,), (KNOWN,), (True,))
    return Batch(0, rows, **changes)


def run(backend: TorchBackend, *steps: Batch) -> None:
    for one in steps:
        backend.launch(one)
        backend.sample(0, None)
        backend.collect(0)


class Operations(TorchDispatchMode):
    """The operations of a thread with the shapes of their tensors, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, [tuple(one.shape) for one in args if isinstance(one, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


def operations(backend: TorchBackend, place: int, **changes: Any) -> list[Any]:
    """Of a prompt and a decode step of a sequence with this place."""
    seen = Operations()
    added = Added(0, (1, 2, 3), 3, Sampling(temperature=0.0), (0,), adapter=place)
    backend.run_on_device(seen.__enter__)
    run(backend, step(0, 3, added=(added,), **changes), step(3, 1), Batch(0, Rows(), released=(0,)))
    backend.run_on_device(lambda: seen.__exit__(None, None, None))
    return seen.seen


@without_kernel
def test_steps_without_an_adapter_compute_what_those_of_a_backend_without_adapters_do(
    kernel: Any, backend: TorchBackend, model: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path, read_config(model), targets=("q_proj",))
    backend.add_adapter("known", folder, backend.read_adapter(folder))
    with_one = operations(backend, 1, adapters=((1, "known"),))
    without = load_backend(model, **SERVED)
    try:
        expected = operations(without, 0)
    finally:
        without.close()
    assert operations(backend, 0) == expected
    assert len(with_one) > len(expected) > 50


@with_kernels
def test_the_warm_up_computes_all_products_of_adapters_and_leaves_none(
    kernel: Any, backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[int] = []
    name = "_add_few" if kernel else "_added"
    original = getattr(AdaptedLinear, name)

    def counted(self: AdaptedLinear, x: torch.Tensor, *others: Any) -> Any:
        products.append(len(x))
        return original(self, x, *others)

    monkeypatch.setattr(AdaptedLinear, name, counted)
    backend.warm_up(lambda what, share: None)
    # In two layers, two runs of each step.
    assert products == [8] * 4 + [1] * 4
    backend.launch(step(0, 1, added=(Added(0, (1,), 1, Sampling(), (0,), adapter=1),)))
    backend.sample(0, None)
    with pytest.raises(IllegalBatch, match="no adapter"):
        backend.collect(0)


def changed(folder: Path, model: Path, tensor: str, value: Any, **kind: Any) -> Path:
    """An adapter with another tensor."""
    write_adapter(folder, read_config(model), targets=("q_proj", "v_proj"), **kind)
    tensors = load_file(folder / WEIGHTS_FILE)
    tensors[tensor] = value(tensors[tensor].clone())
    save_file(tensors, folder / WEIGHTS_FILE)
    return folder


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda one: one.fill_(float("nan")), r"layers\.1\.self_attn\.v_proj\.lora_B"),
        (lambda one: one.fill_(3e38), r"v_proj of layer 1: norms .* at most 10000"),
        (lambda one: one[:-1].clone(), r"v_proj of layer 1 .*of 64 to 32 numbers, rank 4"),
    ],
)
def test_an_adapter_with_wrong_numbers_is_refused_by_the_name_of_its_tensor(
    value: Any, message: str, backend: TorchBackend, model: Path, tmp_path: Path
) -> None:
    folder = changed(tmp_path, model, tensor_name(1, "v_proj", "B"), value)
    with pytest.raises(FatalError, match=message) as caught:
        backend.read_adapter(folder)
    assert caught.value.exit_code in {ExitCode.INVALID_ADAPTER, ExitCode.ADAPTER_MISMATCH}


def test_an_adapter_beyond_the_limits_of_the_backend_is_refused(
    backend: TorchBackend, model: Path, tmp_path: Path
) -> None:
    config = read_config(model)
    with pytest.raises(FatalError, match=r"q_proj of layer 0 .* rank 4"):
        backend.read_adapter(write_adapter(tmp_path / "rank", config, rank=5, targets=("q_proj",)))
    with pytest.raises(FatalError, match="o_proj of layer 0: this model has no such projection to change"):
        backend.read_adapter(write_adapter(tmp_path / "target", config, targets=("o_proj",)))
    with pytest.raises(FatalError, match="q_proj of layer 2: this model has no such projection to change"):
        backend.read_adapter(write_adapter(tmp_path / "layer", config | {"num_hidden_layers": 3}, targets=("q_proj",)))


@pytest.mark.parametrize(
    "batch",
    [
        Batch(0, Rows(), adapters=((1, "unknown"),)),
        Batch(0, Rows(), adapters=((3, "known"),)),
        Batch(0, Rows(), added=(Added(0, (1,), 1, Sampling(), (0,), adapter=1),)),
    ],
)
def test_a_batch_with_an_adapter_that_is_not_there_is_illegal(
    batch: Batch, backend: TorchBackend, model: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path, read_config(model), targets=("q_proj",))
    backend.add_adapter("known", folder, backend.read_adapter(folder))
    backend.launch(batch)
    backend.sample(0, None)
    with pytest.raises(IllegalBatch, match=r"not there|no adapter"):
        backend.collect(0)
