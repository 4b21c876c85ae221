"""Programs of AWS's guides for vLLM on Neuron, with the import changed alone, on the fake NxD Inference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.nxdi import process_environment

MODEL = Path(__file__).parents[2] / "examples" / "demo-model"

DEVICE_NODE = """
import pathlib, neuron_runtime.arguments
neuron_runtime.arguments.device_nodes = lambda dev: [pathlib.Path("/dev/neuron0")]
"""
"""What stands for the driver of a machine with a device."""

GUIDE = """
import os
os.environ["VLLM_NEURON_FRAMEWORK"] = "neuronx-distributed-inference"
os.environ["NEURON_COMPILED_ARTIFACTS"] = {artifact!r}

from neuron_runtime import LLM, SamplingParams

prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(top_k=1, max_tokens=8)
llm = LLM(
    model={model!r},
    max_num_seqs=4,
    max_model_len=128,
    block_size=128,
    device="neuron",
    tensor_parallel_size=2,
    {override})
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {{prompt!r}}, Generated text: {{generated_text!r}}")
"""


def guide(tmp_path: Path, override: str) -> subprocess.CompletedProcess[str]:
    source = DEVICE_NODE + GUIDE.format(artifact=str(tmp_path / "artifact"), model=str(MODEL), override=override)
    device = {"FAKE_NXDI_PLATFORM": "inf2", "NEURON_PLATFORM_TARGET_OVERRIDE": "inf2", "NEURON_RT_NUM_CORES": "2"}
    return subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **process_environment(), **device, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )


@pytest.mark.slow
@pytest.mark.long
def test_a_guide_script_for_neuron_runs_at_module_level_and_compiles_once(tmp_path: Path) -> None:
    spellings = (
        'override_neuron_config={"enable_bucketing": False}',
        'additional_config={"override-neuron-config": {"enable_bucketing": False}}',
    )
    printed = []
    for override in spellings:
        ended = guide(tmp_path, override)
        assert ended.returncode == 0, ended.stderr
        printed.append(ended.stdout.splitlines())
        assert ("compiled 2 graphs" in ended.stderr) == (override == spellings[0])
    assert printed[0] == printed[1]
    assert [line.partition(", Generated text: ")[0] for line in printed[0]] == [
        "Prompt: 'Hello, my name is'",
        "Prompt: 'The president of the United States is'",
        "Prompt: 'The capital of France is'",
        "Prompt: 'The future of AI is'",
    ]
    assert (tmp_path / "artifact" / "artifact.json").exists()
