"""The memory that a conversion takes is what its Job requests."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from helpers.chat_model import write_chat_model
from neuron_operator.read.objects import number_of
from neuron_operator.read.records import Facts
from neuron_operator.read.world import Place
from neuron_operator.render.resources import convert_requests
from neuron_runtime.inspection import inspect_model


@pytest.mark.long
def test_a_conversion_takes_less_memory_than_its_job_requests(tmp_path: Path) -> None:
    size = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 20}
    model = write_chat_model(tmp_path / "model", **size)
    facts = msgspec.convert(msgspec.to_builtins(inspect_model(f"file://{model}")), Facts)
    requested = number_of(convert_requests(Place(), facts)["memory"])
    command = [sys.executable, "-m", "neuron_runtime", "convert", str(model), str(tmp_path / "store")]
    peak = 0
    with subprocess.Popen([*command, "--backend", "torch", "-q", "int8"], stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            with contextlib.suppress(OSError, TypeError):  # it has just ended
                status = Path(f"/proc/{process.pid}/status").read_text()
                # What is mapped of files is the kernel's to drop.
                peak = max(peak, 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1]))  # type: ignore[index]
            time.sleep(0.005)
        assert process.stderr is not None
        assert "perplexity on a short text" in process.stderr.read()
    assert facts.weights_bytes > 500_000_000
    assert 0 < peak < requested
