"""Loading weights: mismatched tensors are named, dtypes are converted, shards are read, progress is complete."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.distant_files import mounted
from bench.loading import cached_share, drop_from_cache
from helpers.random_model import model_config, write_random_model
from helpers.tiny_model import write_tiny_model
from helpers.torch_models import load_backend, random_model, runtime_config
from neuron_runtime.backend import torch as torch_backend
from neuron_runtime.backend.torch.linear import linear
from neuron_runtime.backend.torch.loader import load
from neuron_runtime.backend.torch.read_ahead import STEP_BYTES, ReadAhead
from neuron_runtime.checkpoint import InvalidModel, read_checkpoint
from neuron_runtime.host import FreeMemory

Tensors = dict[str, torch.Tensor]
KEY = "model.layers.1.self_attn.k_proj.weight"


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


WRONG: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda t: t.pop(KEY), f"tensors missing: {KEY}$"),
    "unexpected": (lambda t: t.update(extra=torch.zeros(1)), "tensors unexpected: extra$"),
    "both": (lambda t: t.update(extra=t.pop(KEY)), f"tensors missing: {KEY}; unexpected: extra"),
    "many": (
        lambda t: [t.pop(name) for name in list(t) if "layers.0" in name],
        r"missing: (model\.layers\.0\.\S+, ){4}model\.layers\.0\.\S+ and 4 more",
    ),
    "shape": (
        lambda t: t.update({KEY: torch.zeros(16, 64)}),
        rf"model\.safetensors: tensor {KEY} has shape \[16, 64\], config\.json requires \[32, 64\]",
    ),
    "dtype": (
        lambda t: t.update({KEY: torch.zeros(32, 64, dtype=torch.int8)}),
        f"tensor {KEY} has dtype I8; supported dtypes are F32, BF16, F16",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_do_not_match_the_config_are_named(case: str, tmp_path: Path) -> None:
    change, message = WRONG[case]
    rewrite(random_model(tmp_path), change)
    with pytest.raises(InvalidModel, match=message):
        load_backend(tmp_path)


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("num_equal", [None, 0, 1])
def test_a_tied_model_may_store_its_head_only_as_a_copy(num_equal: int | None, tmp_path: Path) -> None:
    """num_equal: rows of the head that are as in the embedding; None: all."""

    def add_head(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        if num_equal is not None:
            tensors[HEAD][num_equal:] += 1

    rewrite(random_model(tmp_path, tie_word_embeddings=True), add_head)
    if num_equal is None:
        load_backend(tmp_path).close()
        return
    with pytest.raises(InvalidModel, match=f"{HEAD} differs from {EMBEDDING}.*tie_word_embeddings to false"):
        load_backend(tmp_path)


def test_a_file_refused_by_the_safetensors_library_is_an_invalid_model(tmp_path: Path) -> None:
    file = random_model(tmp_path) / "model.safetensors"
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.dumps({**json.loads(raw[8:end]), "__metadata__": {"format": 1}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])
    with pytest.raises(InvalidModel, match=r"model\.safetensors: cannot read the weights"):
        load_backend(tmp_path)


def test_old_rotary_frequencies_in_checkpoints_are_accepted(tmp_path: Path) -> None:
    random_model(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load_backend(tmp_path).close()


def test_progress_grows_to_the_total_over_all_shards(tmp_path: Path) -> None:
    random_model(tmp_path, max_shard_bytes=50_000)
    assert len(read_checkpoint(tmp_path).files) > 3
    shares: list[float] = []
    load(tmp_path, runtime_config(), lambda what, share: shares.append(share), lambda: FreeMemory(2**30)).close()
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) > 10


def test_the_backend_loads_with_the_memory_of_this_machine(tmp_path: Path) -> None:
    backend = torch_backend.load_backend(
        random_model(tmp_path), runtime_config(max_sequences=2), lambda what, share: None
    )
    assert (backend.limits.max_rows, backend.limits.max_model_length) == (2, 512)
    backend.close()
    backend.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_packed_layer_equals_the_plain_one(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, bias, x = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((24, 16), (24,), (rows, 16)))
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    for maybe_bias in (None, bias):
        wanted = torch.nn.functional.linear(x.float(), weight.float(), None if maybe_bias is None else bias.float())
        found = linear(weight, maybe_bias)(x)
        assert found.dtype is dtype
        torch.testing.assert_close(found.float(), wanted, atol=tolerance, rtol=0)


def test_the_model_generator_is_deterministic(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_random_model(tmp_path / name, model_config(hidden_size=32, num_layers=1, dtype="bfloat16"), seed=5)
    one, two = (read_checkpoint(tmp_path / name) for name in ("one", "two"))
    assert one.digest == two.digest
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]
    assert one.tensors["lm_head.weight"].dtype == "BF16"
    assert json.loads((tmp_path / "one" / "config.json").read_text())["hidden_size"] == 32


class Advice:
    """What the kernel was advised to read, as file and range."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self._advise = os.posix_fadvise
        monkeypatch.setattr(os, "posix_fadvise", self._note)

    def _note(self, fd: int, begin: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        self.asked.append((os.path.basename(os.readlink(f"/proc/self/fd/{fd}")), begin, begin + length))
        self._advise(fd, begin, length, advice)

    @property
    def num_bytes(self) -> int:
        return sum(end - begin for _, begin, end in self.asked)

    def settled(self) -> int:
        """The number of bytes once the thread waits."""
        before = -1
        while before != self.num_bytes:
            before = self.num_bytes
            time.sleep(0.1)
        return before


def test_tensors_are_read_ahead_in_the_order_of_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path, num_shards=3, num_hidden_layers=12, hidden_size=256, intermediate_size=2048)
    checkpoint = read_checkpoint(tmp_path)
    leaves_cache = drop_from_cache([tmp_path / file for file in checkpoint.files])  # not on an in-memory file system
    advice = Advice(monkeypatch)
    ahead = ReadAhead(tmp_path)
    ahead.start()
    ahead.join()
    assert {(begin % STEP_BYTES, end - begin) for _, begin, end in advice.asked} == {(0, STEP_BYTES)}
    assert len(set(advice.asked)) == len(advice.asked)
    place = {(file, begin // STEP_BYTES): number for number, (file, begin, _) in enumerate(advice.asked)}
    last = {
        name: max(place[tensor.file, part // STEP_BYTES] for part in (tensor.begin, tensor.end - 1))
        for name, tensor in checkpoint.tensors.items()
    }
    large = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(12)]
    order = ["model.embed_tokens.weight", *large]
    assert sorted(order, key=last.__getitem__) == order
    # The kernel takes its time, leaves some out where memory is short, and may forget a file while it reads the next.
    unread = set(checkpoint.files) if leaves_cache else set()
    while unread := {file for file in unread if cached_share(tmp_path / file) < 0.5}:
        time.sleep(0.01)


def test_reading_ahead_waits_for_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path, vocab_size=40_000)
    num_bytes = read_checkpoint(tmp_path).num_bytes
    advice, ahead = Advice(monkeypatch), ReadAhead(tmp_path, num_bytes // 4)
    ahead.start()
    for share, limit in ((0.0, 0.25), (0.5, 0.75), (1.0, 1.0)):
        ahead.loaded(share)
        assert limit * num_bytes - STEP_BYTES < advice.settled() < limit * num_bytes + 2 * STEP_BYTES
    ahead.join()
    stopped = ReadAhead(tmp_path, 0)
    stopped.start()
    stopped.stop()
    stopped.join()


def test_all_of_a_mounted_store_is_read_ahead(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, num_shards=2, vocab_size=40_000)
    try:
        with mounted(tmp_path, 0.001) as store:
            files = sorted(store.glob("*.safetensors"))
            assert len(files) == 2
            assert drop_from_cache(files)
            ahead = ReadAhead(store)
            ahead.start()
            ahead.join()
            while not all(cached_share(path) == 1.0 for path in files):  # nobody else reads them
                time.sleep(0.01)
    except OSError as reason:
        pytest.skip(f"needs root and FUSE: {reason}")


@pytest.mark.parametrize("broken", ["a folder", "garbage", "nothing"])
def test_reading_ahead_leaves_errors_to_the_loader(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "model.safetensors"
    if broken == "a folder":
        path.mkdir()
    elif broken == "garbage":
        path.write_bytes(b"x" * 1000)
    ahead = ReadAhead(tmp_path)
    ahead.start()
    ahead.join()


def test_loading_runs_on_the_device_thread_and_its_failure_ends_it(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    others = set(threading.enumerate())  # threads of unclosed backends of other tests
    threads, seen = set(), []

    def interrupted(stage: str, share: float) -> None:
        threads.add(threading.current_thread().name)
        seen.append(share)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(folder, runtime_config(), interrupted, lambda: FreeMemory(2**30))
    assert len(seen) == 3
    assert threads == {"device_0"}
    assert "device_0" not in {thread.name for thread in set(threading.enumerate()) - others}
