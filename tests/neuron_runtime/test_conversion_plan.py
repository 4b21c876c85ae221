"""What is converted is decided by config.json and the headers of the weights; its digest is known before it is done."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from helpers.quantized import FORMATS, PACKED, quantize
from helpers.tiny_model import write_tiny_model
from neuron_runtime.checkpoint import Checkpoint, read_checkpoint
from neuron_runtime.conversion.plan import Conversion, conversion_of
from neuron_runtime.errors import ExitCode, FatalError, InvalidConfig
from neuron_runtime.inspection import model_facts
from neuron_runtime.quantization import Quantizing, wanted_format

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """A small model in every format, and unquantized with the empty name."""
    folder = tmp_path_factory.mktemp("models")
    found = {"": read_checkpoint(write_tiny_model(folder / "plain"))}
    for number, (name, method) in enumerate(FORMATS.items()):
        quantize(folder / "plain", folder / str(number), method)
        found[name] = read_checkpoint(folder / str(number))
    return found


def converted(checkpoint: Checkpoint, backend: str, wanted: Any = "auto", **config: Any) -> Conversion | None:
    return conversion_of({**checkpoint.config, **config}, checkpoint.tensors, backend, wanted)


def test_unquantized_weights_are_quantized_if_wanted(checkpoints: dict[str, Checkpoint]) -> None:
    plain = checkpoints[""]
    for backend in ("torch", "nxdi"):
        assert converted(plain, backend) is None
        assert converted(plain, backend, "none") is None
        for wanted in ("int8", "fp8"):
            conversion = converted(plain, backend, wanted)
            assert conversion is not None
            assert conversion.format == wanted
            layers = plain.config["num_hidden_layers"]
            names = {f"model.layers.{n}.{name}.weight" for n in range(layers) for name in (*PROJECTIONS, *MLP)}
            assert conversion.quantized == names
            assert conversion.excluded == (() if plain.config.get("tie_word_embeddings") else ("lm_head",))


def test_torch_computes_every_format_as_it_is_stored(checkpoints: dict[str, Checkpoint]) -> None:
    for name, checkpoint in checkpoints.items():
        for wanted in ("auto", "none", *([name.partition(" ")[0]] if name else [])):
            assert converted(checkpoint, "torch", wanted) is None, (name, wanted)


def test_nxdi_computes_int8_per_channel_as_it_is_stored_and_other_formats_converted(
    checkpoints: dict[str, Checkpoint],
) -> None:
    for name in FORMATS:
        conversion = converted(checkpoints[name], "nxdi")
        assert (conversion and conversion.format) == (None if name == "int8 per channel" else name[:4].strip())
        multiplied_out = converted(checkpoints[name], "nxdi", "none")
        assert multiplied_out is not None
        assert (multiplied_out.format, multiplied_out.quantized) == ("none", frozenset())


def test_projections_with_biases_stay_plain_on_nxdi(checkpoints: dict[str, Checkpoint]) -> None:
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "attention_bias": None, "mlp_bias": None}
    on_nxdi, on_torch = (converted(checkpoints[""], backend, "int8", **qwen2) for backend in ("nxdi", "torch"))
    assert on_nxdi is not None
    assert on_torch is not None
    kept = {name.removesuffix(".weight") for name in on_torch.quantized - on_nxdi.quantized}
    assert {name.rpartition(".")[2] for name in kept} == {"q_proj", "k_proj", "v_proj"}
    assert kept <= {*on_nxdi.excluded}
    assert on_nxdi.digest("a") != on_torch.digest("a")


def test_a_checkpoint_is_not_quantized_to_another_format(checkpoints: dict[str, Checkpoint]) -> None:
    for backend in ("torch", "nxdi"):
        with pytest.raises(InvalidConfig, match=r"is fp8, but .* quantized already \(compressed-tensors: int8 per cha"):
            converted(checkpoints["int8 per channel"], backend, "fp8")
        with pytest.raises(InvalidConfig, match="is modelopt, but the checkpoint is not quantized"):
            converted(checkpoints[""], backend, "modelopt")
        with pytest.raises(InvalidConfig, match=r"is modelopt, .* quantized already \(fbgemm_fp8: fp8 per channel"):
            converted(checkpoints["fp8 of FBGEMM"], backend, "modelopt")


def test_a_method_is_accepted_where_the_checkpoint_has_it(checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint = checkpoints["fp8 of ModelOpt"]
    assert converted(checkpoint, "nxdi", "modelopt") == converted(checkpoint, "nxdi", "fp8") is not None


GIVEN = {
    "compressed-tensors": FORMATS["int8 per channel"],
    "fp8": FORMATS["fp8 in blocks"],
    "fbgemm_fp8": FORMATS["fp8 of FBGEMM"],
    "modelopt": FORMATS["fp8 of ModelOpt"],
    "awq": PACKED["AWQ"],
    "gptq": PACKED["GPTQ"],
    "mxfp4": {"quant_method": "mxfp4"},
}


@pytest.mark.parametrize("wanted", [word for word in get_args(Quantizing) if word not in ("auto", "none", "int8")])
def test_words_of_vllm_must_be_what_the_checkpoint_says(wanted: Any) -> None:
    for method, given in GIVEN.items():
        is_fp8 = wanted == "fp8" and method in ("fp8", "fbgemm_fp8", "modelopt")
        if wanted.removesuffix("_marlin") == method or is_fp8:
            assert wanted_format({"quantization_config": given}, wanted) == ""
        else:
            with pytest.raises(InvalidConfig, match=rf"is {wanted}, but the checkpoint is quantized .* \({method}: "):
                wanted_format({"quantization_config": given}, wanted)


def test_quantized_experts_are_refused_by_name_on_nxdi(checkpoints: dict[str, Checkpoint]) -> None:
    mixtral = {"architectures": ["MixtralForCausalLM"]}
    assert converted(checkpoints[""], "torch", "fp8", **mixtral) is not None
    with pytest.raises(FatalError, match=r"MixtralForCausalLM has experts, .* \(fp8\)") as caught:
        converted(checkpoints[""], "nxdi", "fp8", **mixtral)
    assert caught.value.exit_code == ExitCode.UNSUPPORTED_ARCHITECTURE


@pytest.mark.parametrize("name", PACKED)
def test_int4_and_asymmetric_weights_are_not_converted(checkpoints: dict[str, Checkpoint], name: str) -> None:
    config = {"quantization_config": PACKED[name]}
    assert converted(checkpoints[""], "torch", "none", **config) is None
    with pytest.raises(FatalError, match=r"the weights are .*: int[48] .*, packed, .* not converted") as caught:
        converted(checkpoints[""], "nxdi", "none", **config)
    assert caught.value.exit_code == ExitCode.UNSUPPORTED_ARCHITECTURE


def test_other_backends_compute_no_quantized_weights(checkpoints: dict[str, Checkpoint]) -> None:
    assert converted(checkpoints["fp8 of ModelOpt"], "optimum") is None
    with pytest.raises(InvalidConfig, match="the optimum backend does not compute weights in int8"):
        converted(checkpoints[""], "optimum", "int8")


def test_inspect_tells_what_is_stored_and_what_it_is_converted_to(checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint = checkpoints["fp8 in blocks"]
    facts = model_facts(checkpoint, "ab" * 20, "nxdi")
    assert facts.quantization == "fp8: fp8 in blocks of 48 x 24"
    assert facts.conversion is not None
    conversion = converted(checkpoint, "nxdi")
    assert conversion is not None
    assert (facts.conversion.digest, facts.conversion.bytes) == (conversion.digest("ab" * 20), conversion.num_bytes)
    assert model_facts(checkpoint, "ab" * 20, "torch").conversion is None
    assert model_facts(checkpoints["int8 per channel"], "ab" * 20, "nxdi").conversion is None
    with pytest.raises(InvalidConfig, match="--quantization: needs --backend"):
        model_facts(checkpoints[""], "ab" * 20, "", "", "int8")
    unknown = replace(checkpoint, config={**checkpoint.config, "quantization_config": {"quant_method": "x" * 4000}})
    assert model_facts(unknown, "ab" * 20, "vllm").quantization == "x" * 200, "a record is small"


def test_the_digest_depends_on_source_format_and_exclusions_alone(checkpoints: dict[str, Checkpoint]) -> None:
    plain = checkpoints[""]
    digests = {
        conversion.digest(source)
        for source in ("a", "b")
        for wanted in ("int8", "fp8")
        for backend in ("torch", "nxdi")
        if (conversion := converted(plain, backend, wanted))
    }
    assert len(digests) == 4
    assert all(len(digest) == 64 for digest in digests)


def test_a_copy_of_a_tied_head_is_not_converted(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    conversion = converted(read_checkpoint(folder), "nxdi", "int8")
    assert conversion is not None
    assert not [output.name for output in conversion.outputs if "lm_head" in output.name]
