"""The programs and commands of vLLM's guides for Neuron, as printed: on the CPU, and on the fakes of the libraries.

Only the names of models are replaced by a local one, and `vllm` is a module with the names of ours.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from helpers import nxdi, optimum, transformers_neuronx
from helpers.adapters import write_adapter
from helpers.random_model import model_config, write_random_model
from helpers.serve_command import ServeCommand
from neuron_runtime.checkpoint import read_config

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"

VLLM = """
import importlib, sys, types, neuron_runtime
sys.modules["vllm"] = types.SimpleNamespace(LLM=neuron_runtime.LLM, SamplingParams=neuron_runtime.SamplingParams)
sys.modules["vllm.lora"] = importlib.import_module("neuron_runtime.lora")
sys.modules["vllm.lora.request"] = importlib.import_module("neuron_runtime.lora.request")
"""
DEVICE_NODE = """
import pathlib, neuron_runtime.arguments
neuron_runtime.arguments.device_nodes = lambda dev: [pathlib.Path("/dev/neuron0")]
"""
"""What stands for the driver of a machine with a device."""
COMMAND = """
import sys
from neuron_runtime.commands.command_line import main
sys.exit(main(sys.argv[1:]))
"""

PROMPTS = """
from vllm import LLM, SamplingParams

# Sample prompts.
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
# Create a sampling params object.
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
"""
PRINTS = """
# Generate texts from the prompts. The output is a list of RequestOutput objects
# that contain the prompt, generated text, and other information.
outputs = llm.generate(prompts, sampling_params)
# Print the outputs.
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""
CONTINUOUS_BATCHING = """
# Create an LLM.
llm = LLM(
    model="TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    max_num_seqs=8,
    # The max_model_len and block_size arguments are required to be same as max sequence length,
    # when targeting neuron device. Currently, this is a known limitation in continuous batching
    # support in transformers-neuronx.
    max_model_len=128,
    block_size=128,
    # The device can be automatically detected when AWS Neuron SDK is installed.
    # The device argument can be either unspecified for automated detection, or explicitly assigned.
    device="neuron",
    tensor_parallel_size=2)
"""
OVERRIDE = """
llm = LLM(
    model="meta-llama/Meta-Llama-3.1-8B-Instruct",
    max_num_seqs=8,
    max_model_len=128,
    block_size=128,
    device="neuron",
    tensor_parallel_size=32,
    #Override or update the NeuronConfig
    override_neuron_config={"shard_over_sequence":True})
"""
NXD_INFERENCE = """
from vllm import LLM, SamplingParams
# Initialize the model
llm = LLM(
model="TinyLlama/TinyLlama-1.1B-Chat-v1.0",
max_num_seqs=4,
max_model_len=128,
tensor_parallel_size=2,
block_size=32
)
# Generate text
prompts = [
"Hello, my name is",
"The president of the United States is",
"The capital of France is",
]
sampling_params = SamplingParams(temperature=0.0)
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    print(f"Prompt: {output.prompt}")
    print(f"Generated: {output.outputs[0].text}")
"""
OPTIMUM = """
llm = LLM(model="unsloth/Llama-3.2-1B-Instruct",
          max_num_seqs=4,
          max_model_len=4096,
          tensor_parallel_size=2,
          device="neuron")
"""
SPECULATIVE = """
# Create an LLM.
llm = LLM(
    model="meta-llama/Meta-Llama-3.1-70B-Instruct",
    speculative_model="meta-llama/Llama-3.2-1B-Instruct",
    max_model_len=128,
    block_size=128,
    speculative_max_model_len=128,
    dtype="bfloat16",
    max_num_seqs=4,
    num_speculative_tokens=4,
    device="neuron",
    tensor_parallel_size=32,
    use_v2_block_manager=True,
)
"""
ADAPTERS = """
from vllm.lora.request import LoRARequest

llm = LLM(
    model="meta-llama/Meta-Llama-3.1-8B-Instruct",
    max_num_seqs=2,
    max_model_len=64,
    tensor_parallel_size=32,
    device="neuron",
    override_neuron_config={
        "sequence_parallel_enabled": False,
        "lora_modules": {"lora_id_1": "ADAPTERS/1", "lora_id_2": "ADAPTERS/2"},
    },
    enable_lora=True,
    max_loras=2,
)
first, second = LoRARequest("lora_id_1", 1, "ADAPTERS/1"), LoRARequest("lora_id_2", 2, " ")
sampling_params = SamplingParams(top_k=1)
for lora_request in ([first, second, first, second], None):
    for output in llm.generate(prompts, sampling_params, lora_request=lora_request):
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
"""
"""In the form of the guide for several adapters, which are named when the model is loaded."""
SCRIPTS = {
    "continuous batching": PROMPTS + CONTINUOUS_BATCHING + PRINTS,
    "override": PROMPTS + OVERRIDE + PRINTS,
    "NxD Inference": NXD_INFERENCE,
    "optimum": PROMPTS + OPTIMUM + PRINTS,
}
SHARDED = (
    "vllm serve meta-llama/Meta-Llama-3.1-8B-Instruct --tensor-parallel-size 32 --max-num-seqs 16 --max-model-len 2048 "
    '--block-size 8 --override-neuron-config "shard_over_sequence:True"'
)
COMMANDS = {
    "vllm serve": SHARDED,
    "api_server": SHARDED.replace("vllm serve", "python3 -m vllm.entrypoints.openai.api_server"),
    "NxD Inference": (
        'python3 -m vllm.entrypoints.openai.api_server --model "TinyLlama/TinyLlama-1.1B-Chat-v1.0" '
        "--tensor-parallel-size 2 --max-model-len 128 --max-num-seqs 4 --block-size 32 --port 8000"
    ),
    "optimum": (
        'python -m vllm.entrypoints.openai.api_server --model="unsloth/Llama-3.2-1B-Instruct" --max-num-seqs=4 '
        '--max-model-len=4096 --tensor-parallel-size=2 --port=8080 --device "neuron"'
    ),
}
MODELS = (
    *("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "meta-llama/Meta-Llama-3.1-8B-Instruct", "unsloth/Llama-3.2-1B-Instruct"),
    *("meta-llama/Meta-Llama-3.1-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
)

CPU = {"VLLM_TARGET_DEVICE": "cpu"}
ON_FAKES = {
    "neuronx-distributed-inference": nxdi.process_environment(),
    "transformers-neuronx": transformers_neuronx.process_environment(),
    "optimum-neuron": optimum.process_environment(),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As small as can be with the heads of Llama 3, which 32 cores share, and the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    vocabulary = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    sizes = {"hidden_size": 128, "num_heads": 32, "num_kv_heads": 8, "intermediate_size": 64}
    config = model_config(vocabulary_size=vocabulary, max_position_embeddings=8192, **sizes)
    write_random_model(folder, {**config, "bos_token_id": 0, "eos_token_id": 1})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, folder)
    return folder


def localized(text: str, model: Path) -> str:
    for name in MODELS:
        text = text.replace(name, str(model))
    return text


def environment_of(framework: str, tmp_path: Path) -> dict[str, str]:
    device = {
        "VLLM_NEURON_FRAMEWORK": framework,
        "FAKE_NXDI_PLATFORM": "inf2",
        "NEURON_PLATFORM_TARGET_OVERRIDE": "inf2",
        "NEURON_RT_NUM_CORES": "32",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    return {**ON_FAKES[framework], **device}


def python(
    source: str, environment: dict[str, str], *arguments: str, seconds: int = 300
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )


def check_printed(ended: subprocess.CompletedProcess[str], script: str) -> None:
    assert ended.returncode == 0, ended.stderr[-3000:]
    printed = [line for line in ended.stdout.splitlines() if line.startswith("Prompt: ")]
    assert len(printed) == (3 if script == "NxD Inference" else 4)
    assert "Hello, my name is" in printed[0]
    assert "Generated" in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(one, marks=() if one == "override" else pytest.mark.long)
        for one in SCRIPTS
        if one != "continuous batching"  # below: on its library
    ],
)
def test_a_script_of_the_guides_runs_unchanged_on_the_cpu(script: str, model: Path) -> None:
    ended = python(VLLM + localized(SCRIPTS[script], model), CPU)
    check_printed(ended, script)
    assert "VLLM_TARGET_DEVICE is cpu" in ended.stderr
    assert ("shard_over_sequence: no effect" in ended.stderr) == (script == "override")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "framework"),
    [
        # Here, "a command is accepted by its library" and test_neuronx_backend.py have what these would find.
        pytest.param("continuous batching", "transformers-neuronx", marks=pytest.mark.long),
        pytest.param("override", "transformers-neuronx", marks=pytest.mark.long),
        pytest.param("NxD Inference", "neuronx-distributed-inference", marks=pytest.mark.long),
        # Four minutes: it computes a row of 4096 tokens for each prompt.
        pytest.param("optimum", "optimum-neuron", marks=[pytest.mark.long, pytest.mark.timeout(1500)]),
    ],
)
def test_a_script_of_the_guides_runs_unchanged_on_its_library(
    script: str, framework: str, model: Path, tmp_path: Path
) -> None:
    source = VLLM + DEVICE_NODE + localized(SCRIPTS[script], model)
    check_printed(python(source, environment_of(framework, tmp_path), seconds=1200), script)


@pytest.mark.slow
def test_a_script_with_adapters_runs_unchanged_on_the_cpu(model: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        write_adapter(tmp_path / str(number), read_config(model), seed=number, scale=1.0)
    ended = python(VLLM + PROMPTS + localized(ADAPTERS, model).replace("ADAPTERS", str(tmp_path)), CPU)
    assert ended.returncode == 0, ended.stderr[-3000:]
    printed = [line for line in ended.stdout.splitlines() if line.startswith("Prompt: ")]
    assert len(printed) == 8
    assert all(adapted != base for adapted, base in zip(printed[:4], printed[4:], strict=True))


def test_a_script_with_a_draft_model_runs_unchanged_on_the_cpu(model: Path) -> None:
    ended = python(VLLM + PROMPTS + localized(SPECULATIVE, model) + PRINTS, CPU)
    check_printed(ended, "drafts")


def test_a_script_with_a_draft_model_is_refused_by_name_where_none_can_draft(model: Path, tmp_path: Path) -> None:
    source = VLLM + DEVICE_NODE + PROMPTS + localized(SPECULATIVE, model)
    ended = python(source, environment_of("transformers-neuronx", tmp_path))
    assert ended.returncode == 1
    assert "the transformers-neuronx backend has no Draft: leave it out" in ended.stderr.splitlines()[-1]


def flags_of(command: str, model: Path) -> list[str]:
    """Those of `neuron-runtime serve`."""
    words = shlex.split(localized(command, model))
    return words[3:] if words[0].startswith("python") else words[2:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "framework"),
    [
        ("vllm serve", "transformers-neuronx"),
        pytest.param("api_server", "transformers-neuronx", marks=pytest.mark.long),  # the same flags
        ("optimum", "optimum-neuron"),
    ],
)
def test_a_command_of_the_guides_is_accepted_by_its_library(
    command: str, framework: str, model: Path, tmp_path: Path
) -> None:
    words = ("serve", *flags_of(COMMANDS[command], model), "--check")
    ended = python(DEVICE_NODE + COMMAND, environment_of(framework, tmp_path), *words)
    assert ended.returncode == 0, ended.stderr
    assert "can be served with this configuration" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        # The others differ in words that the test above and test_cli_runtime.py read.
        pytest.param(command, marks=() if command == "NxD Inference" else pytest.mark.long)
        for command in COMMANDS
    ],
)
def test_a_command_of_the_guides_serves_unchanged_on_the_cpu(command: str, model: Path) -> None:
    from openai import OpenAI

    # The folder's path is short, because it has sockets.
    folder = Path(tempfile.mkdtemp())
    serving = ServeCommand([*flags_of(COMMANDS[command], model), "--port", "0"], folder, environment=CPU)
    try:
        # As printed, with the server's address.
        client = OpenAI(api_key="EMPTY", base_url=f"{serving.until_ready()}/v1")
        models = client.models.list()
        model_name = models.data[0].id
        response = client.chat.completions.create(
            model=model_name,
            messages=[{"role": "user", "content": "Hello, my name is Llama "}],
            max_tokens=8,
            temperature=1.0,
            top_p=1.0,
            stream=False,
            extra_body={"top_k": 50},
        )
        assert response.choices[0].message.content is not None
    finally:
        serving.end()
        shutil.rmtree(folder)
