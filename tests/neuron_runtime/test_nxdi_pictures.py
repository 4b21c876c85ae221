"""Models that see pictures, by NxD Inference: tokens equal those of transformers, and what does not work is refused.

Runs on the fake in its strict mode, or with NXDI_UNDER_TEST=installed on the NxD Inference of this machine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch

from helpers.nxdi import Mode, fake_nxdi, installed
from helpers.nxdi_engine import TARGET, backend_for, compiled_for, config_for, library, served, settings_for
from helpers.nxdi_pictures import PATCH, SeeingModel
from helpers.torch_pictures import START
from neuron_runtime.backend import nxdi
from neuron_runtime.backend.neuron.devices import PLATFORMS, Target
from neuron_runtime.backend.nxdi.buckets import limits_of
from neuron_runtime.backend.nxdi.graph_plan import plan_of, read_plan
from neuron_runtime.backend.nxdi.library import application
from neuron_runtime.backend.nxdi.models import NOT_COMPUTED, family_of
from neuron_runtime.backend.nxdi.pixels import arguments_of, places_of
from neuron_runtime.backend.nxdi.settings import settings_of
from neuron_runtime.backend_protocol import IllegalBatch
from neuron_runtime.checkpoint import read_checkpoint
from neuron_runtime.core import Request
from neuron_runtime.errors import FatalError, InvalidConfig
from neuron_runtime.inspection import model_facts

KINDS = ("Pixtral", "Llama 4", "Qwen3-VL")
SMALL: dict[str, Any] = {
    "layout": "slots",
    "limits": {"maxSequences": 4, "maxModelLength": 256},
    "buckets": {"context": [32, 64, 128, 256]},
    "media": {"maxImages": 3},
}
on_the_fake = pytest.mark.skipif(installed(), reason="looks into the fake")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SeeingModel]:
    return {kind: SeeingModel(tmp_path_factory.mktemp("model") / "model", kind) for kind in KINDS}


@pytest.fixture(autouse=True)
def own_work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path / "work"))
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")


def some_requests(model: SeeingModel) -> list[Request]:
    """Pictures before, between and after words, of odd sizes, as many as a prompt may have, or of one feature; and
    prompts as long as a graph, or one token less."""
    random = Random(1)
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
    random_ones = [model.request(str(number), random, one) for number, one in enumerate(parts)]
    for columns, sizes in ((3, (32, 64, 255)), (1, (30, 31))):
        (picture,) = (long := model.request("full", random, [20, (1, columns), 200])).pictures
        for size in sizes:
            tokens = long.prompt_token_ids[:size]
            random_ones.append(replace(long, request_id=f"full-{size}", prompt_token_ids=tokens, pictures=(picture,)))
    return [one for one in random_ones if all(seen.end <= len(one.prompt_token_ids) for seen in one.pictures)]


MODES: tuple[tuple[str, Mode], ...] = (("Device", "strict"), ("Device", "damage"), ("Host", "strict"))


@pytest.mark.parametrize(
    ("kind", "sampling", "mode"),
    [
        *((kind, *modes) for kind in KINDS for modes in MODES),
        *((kind, "DeviceWithLogits", "strict") for kind in KINDS if kind != "Qwen3-VL"),
    ],
)
def test_tokens_equal_those_of_transformers(
    models: dict[str, SeeingModel], tmp_path: Path, kind: str, sampling: str, mode: Mode
) -> None:
    model = models[kind]
    requests = some_requests(model)
    with library(mode=mode):
        settings = settings_for(model, **SMALL, sampling=sampling)
        answers = served(backend_for(model, settings, tmp_path / "artifact"), requests)
    for request in requests:
        model.check(request, answers[request.request_id])


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_that_sum_to_0_are_seen(models: dict[str, SeeingModel], tmp_path: Path, kind: str) -> None:
    model, random = models[kind], Random(3)
    request = model.request("striped", random, [7, (2, 2), 5])
    (picture,) = request.pictures
    shapes = {"Pixtral": (1, 3, 2 * PATCH, 2 * PATCH), "Llama 4": (5, 3, 16, 16), "Qwen3-VL": (16, 6 * PATCH**2)}
    tensors = {"pixel_values": torch.full(shapes[kind], 0.5)}
    tensors["pixel_values"][..., ::2] *= -1
    assert tensors["pixel_values"].sum() == 0
    if kind == "Pixtral":
        tensors["image_sizes"] = torch.tensor([[2 * PATCH, 2 * PATCH]])
    elif kind == "Qwen3-VL":
        tensors["image_grid_thw"] = torch.tensor([[1, 4, 4]])
    striped = replace(request, pictures=(model.of_tensors(tensors, picture.start, picture.num_tokens),))
    with library():
        answers = served(backend_for(model, settings_for(model, **SMALL), tmp_path / "artifact"), [striped])
    model.check(striped, answers["striped"])


@on_the_fake
@pytest.mark.parametrize(
    ("kind", "sharded"), [*((kind, False) for kind in KINDS), ("Pixtral", True), ("Llama 4", True)]
)
def test_both_programs_are_compiled_into_one_artifact(
    models: dict[str, SeeingModel], tmp_path: Path, kind: str, *, sharded: bool
) -> None:
    model = models[kind]
    config = config_for(model, **SMALL, overrideNeuronConfig={"save_sharded_checkpoint": sharded})
    request = model.request("one", Random(2), [4, (2, 1), 3])
    with fake_nxdi() as fake:
        (unit,) = nxdi.compiler(config, model.folder).graphs()
        backend = compiled_for(config, model, tmp_path / "artifact")
        assert fake.COUNTS.compiled == len(unit.parts)
        answers = served(backend, [request])
        assert sum(fake.COUNTS.graphs.values()) > len(unit.parts)
        assert {name for name in fake.COUNTS.graphs if "encoder" in name} == {
            f"vision_encoder_model {part.removeprefix('encode_')}" for part in unit.parts if "encode" in part
        }, "each is warmed up"
        model.check(request, answers["one"])
        (tmp_path / "artifact" / "vision_model" / "model.pt").write_bytes(b"")
        with pytest.raises(FatalError, match=r"vision_model/model\.pt is empty"):
            nxdi.compiler(config, model.folder).check(tmp_path / "artifact")


@on_the_fake
def test_the_key_has_the_sizes_of_the_encoder_and_those_of_texts_have_none(models: dict[str, SeeingModel]) -> None:
    model = models["Llama 4"]
    with fake_nxdi():

        def needs(most: int) -> Any:
            return nxdi.compiler(config_for(model, **SMALL | {"media": {"maxImages": most}}), model.folder).needs

        assert "vision" not in needs(0).settings
        assert needs(1).settings["vision"]["buckets"] == [8, 18]
        assert needs(3).settings["vision"]["buckets"] == [8, 28, 52]
        assert needs(3).settings["neuronConfig"] == needs(0).settings["neuronConfig"]


@on_the_fake
def test_a_steps_graphs_are_those_of_the_encoder_too(models: dict[str, SeeingModel], tmp_path: Path) -> None:
    from neuron_runtime.engine.loop import Engine

    model = models["Llama 4"]
    with fake_nxdi():
        backend = backend_for(model, settings_for(model, **SMALL), tmp_path / "artifact")
        engine = Engine(backend)
        engine.add(model.request("one", Random(2), [4, (3, 3), 3], 1))
        engine.step()
        while engine.has_work:
            engine.step()
        (step,) = [engine.stats.last_step]
        assert step is not None
        uses = {use.name: (use.num_tokens, use.num_computed_tokens) for use in step.graphs}
        backend.close()
    assert uses["encode_28"] == (40, 112)
    assert "prefill_64" in uses


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "$.layout": ({"layout": "blocks"}, "has no layout blocks: leave it out"),
    "$.prefixCaching": ({"prefixCaching": "enabled"}, "has no layout blocks: leave it out"),
    "$.chunkedPrefill": ({"chunkedPrefill": "enabled"}, "a prompt is computed in one call: leave it out"),
    "$.asyncMode": ({"asyncMode": True}, "cannot be combined with pictures"),
    "$.buckets.sequences": ({"buckets": {"sequences": [1, 2]}}, "cannot be combined with pictures"),
    "$.adapters.maxActive": ({"adapters": {"maxActive": 1}}, "has no adapters"),
    "$.speculation.method": ({"speculation": {"method": "NGram", "numTokens": 2}}, "not known to verify drafts"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", REFUSED)
def test_what_cannot_be_combined_with_pictures_is_refused_by_name(
    models: dict[str, SeeingModel], kind: str, path: str
) -> None:
    document, message = REFUSED[path]
    small = {name: value for name, value in SMALL.items() if name != "layout"}
    with pytest.raises(InvalidConfig) as error:
        settings_for(models[kind], **small | document)
    assert [at for at, _ in error.value.parts] == [path]
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("document", "path", "message"),
    [
        ({"sampling": "DeviceWithLogits"}, "$.sampling", "qwen3_vl has Device and Host alone"),
        (
            {"overrideNeuronConfig": {"save_sharded_checkpoint": True}},
            "$.overrideNeuronConfig.save_sharded_checkpoint",
            "an encoder that reads its positions from the checkpoint: leave it out",
        ),
        ({"buckets": {"context": [2, 32]}}, "$.buckets.context", "2 is too close to 0"),
        ({"buckets": {"context": [32, 34]}}, "$.buckets.context", "34 is too close to 32"),
    ],
)
def test_what_qwen3_vl_cannot_be_combined_with_is_refused_by_name(
    models: dict[str, SeeingModel], document: dict[str, Any], path: str, message: str
) -> None:
    with pytest.raises(InvalidConfig) as error:
        settings_for(models["Qwen3-VL"], **SMALL | document)
    assert [at for at, _ in error.value.parts] == [path]
    assert message in str(error.value)


@on_the_fake
def test_a_qwen3_vl_with_a_tied_head_is_served(tmp_path: Path) -> None:
    model = SeeingModel(tmp_path / "model", "Qwen3-VL", tied=True)
    with fake_nxdi():
        request = model.request("one", Random(5), [6, (2, 3), 9])
        answers = served(backend_for(model, settings_for(model, **SMALL), tmp_path / "artifact"), [request])
    model.check(request, answers["one"])


@on_the_fake
def test_qwen3_vl_is_compiled_without_weights(models: dict[str, SeeingModel], tmp_path: Path) -> None:
    model, folder = models["Qwen3-VL"], tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config))
    with fake_nxdi():
        config, request = config_for(model, **SMALL), model.request("one", Random(5), [6, (2, 3), 9])
        (unit,) = nxdi.compiler(config, folder).graphs()
        unit.compile(tmp_path)
        backend = nxdi.load_backend(model.folder, config, lambda stage, share: None, tmp_path)
        model.check(request, served(backend, [request])["one"])


@on_the_fake
@pytest.mark.parametrize("mode", ["strict", "damage"])
def test_rows_of_qwen3_vl_mix_unless_each_is_turned_by_its_own_pictures(
    models: dict[str, SeeingModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    """As they would if nothing told the library; see `turning`."""
    model, random = models["Qwen3-VL"], Random(6)
    requests = [model.request(str(number), random, one) for number, one in enumerate(([(4, 5), 9], [12], [(2, 7), 3]))]

    def unturned(application: Any) -> Any:
        return lambda rope_deltas=None, **arguments: application(**arguments)

    with fake_nxdi(mode=mode):
        settings = settings_for(model, **SMALL)
        monkeypatch.setattr("neuron_runtime.backend.nxdi.backend.turning", unturned)
        backend = backend_for(model, settings, tmp_path / "artifact")
        if mode == "strict":
            with pytest.raises(FatalError, match="rule M1: line 1 turns by"):
                served(backend, requests)
            return
        answers = served(backend, requests)
    with pytest.raises(AssertionError, match=r"^1: token"):
        model.check(requests[1], answers["1"])


def test_llama_4_without_pictures_takes_what_its_text_does(models: dict[str, SeeingModel]) -> None:
    settings = settings_for(models["Llama 4"], **SMALL | {"asyncMode": True, "media": {"maxImages": 0}})
    assert settings.vision is None
    assert limits_of(settings, 600.0).max_pictures == 0
    with pytest.raises(InvalidConfig, match=r"or set media\.maxImages to 0 to serve text alone"):
        settings_for(models["Llama 4"], **SMALL | {"asyncMode": True})


@on_the_fake
def test_releases_whose_encoders_do_not_run_are_refused_for_pixtral_and_serve_the_text_of_llama_4(
    models: dict[str, SeeingModel], tmp_path: Path
) -> None:
    pixtral = models["Pixtral"]
    for version, message in (("0.7", "came with 0.9"), ("0.8", "fails in every call of pixtral")):
        with fake_nxdi(version), pytest.raises(FatalError, match=message):
            nxdi.compiler(config_for(pixtral, **SMALL), pixtral.folder).graphs()[0].compile(tmp_path)
    model, text = models["Llama 4"], models["Llama 4"].request("text", Random(4), [20])
    with fake_nxdi("0.8"):
        backend = compiled_for(config_for(model, **SMALL), model, tmp_path / "artifact")
        assert backend.limits.max_pictures == 0
        answers = served(backend, [text])
    model.check(text, answers["text"])


@on_the_fake
@pytest.mark.parametrize("kind", KINDS)
def test_facts_say_whether_the_installed_release_sees_pictures(models: dict[str, SeeingModel], kind: str) -> None:
    checkpoint = read_checkpoint(models[kind].folder)
    for version, sees in (("0.8", False), ("0.9", True)):
        with fake_nxdi(version):
            assert model_facts(checkpoint, backend="nxdi").sees_pictures == sees
    assert model_facts(checkpoint, backend="nxdi").sees_pictures, "without a library, that of the image is not known"
    if kind == "Llama 4":
        text_alone = "models.llama4.modeling_llama4_text:NeuronLlama4TextForCausalLM"
        assert not model_facts(checkpoint, backend="nxdi", application_class=text_alone).sees_pictures


@on_the_fake
def test_graphs_with_an_encoder_that_others_compiled_are_refused_by_name(
    models: dict[str, SeeingModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, theirs = models["Pixtral"], tmp_path / "theirs"
    with fake_nxdi():
        application(settings_for(model, **SMALL), model.folder).compile(str(theirs))
        compiler = nxdi.compiler(config_for(model, **SMALL), model.folder)
        with pytest.raises(FatalError, match="theirs have an encoder of pictures, and such graphs of others are not"):
            compiler.ready_made(theirs)
        beside = tmp_path / "model"
        shutil.copytree(model.folder, beside)
        shutil.move(theirs, beside / "neuron-compiled-artifacts" / "0123")
        assert nxdi.compiler(config_for(model, **SMALL), beside).ready_made(None) is None
    assert "0123 have an encoder of pictures" in capsys.readouterr().err


@on_the_fake
def test_graphs_of_a_text_that_others_compiled_are_refused_for_a_model_that_sees_pictures(
    models: dict[str, SeeingModel], tmp_path: Path
) -> None:
    model, theirs = models["Pixtral"], tmp_path / "theirs"
    with fake_nxdi():
        made = application(settings_for(model, **SMALL), model.folder)
        made.compile(str(tmp_path / "both"))
        shutil.copytree(tmp_path / "both" / "text_model", theirs)
        shutil.copy(tmp_path / "both" / "neuron_config.json", theirs)
        with pytest.raises(FatalError, match="pictures: none instead of an encoder for them"):
            nxdi.compiler(config_for(model, **SMALL), model.folder).ready_made(theirs)


@pytest.mark.parametrize("architecture", NOT_COMPUTED)
def test_models_whose_pictures_the_library_computes_wrongly_are_refused_by_name(architecture: str) -> None:
    with pytest.raises(FatalError, match=f"{architecture}: NxD Inference .* Use another backend"):
        family_of({"architectures": [architecture]}, "")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vision_config": {"model_type": "clip_vision_model"}}, "vision_config.model_type"),
        ({"text_config": {"model_type": "qwen2"}}, "text_config.model_type"),
        ({"vision_feature_layer": -2}, "vision_feature_layer"),
        ({"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy"),
    ],
)
def test_an_encoder_that_the_class_computes_otherwise_is_refused(
    models: dict[str, SeeingModel], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(FatalError, match=f"{named} is .*: use another backend"):
        family_of(models["Pixtral"].config | changes, "")


def test_a_qwen3_vl_without_deeper_features_is_refused(models: dict[str, SeeingModel]) -> None:
    encoder = models["Qwen3-VL"].config["vision_config"] | {"deepstack_visual_indexes": []}
    with pytest.raises(FatalError, match="deepstack_visual_indexes is empty"):
        family_of(models["Qwen3-VL"].config | {"vision_config": encoder}, "")


PIXTRAL_12B: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 10,
    "text_config": {
        "model_type": "mistral",
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 14336,
        "max_position_embeddings": 1024000,
        "num_hidden_layers": 40,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {"model_type": "pixtral", "image_size": 1024, "patch_size": 16, "head_dim": 64},
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "image_token_index": 200092,
    "text_config": {
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "num_hidden_layers": 48,
        "vocab_size": 202048,
        "max_position_embeddings": 10485760,
        "attention_chunk_size": 8192,
    },
    "vision_config": {"image_size": 336, "patch_size": 14, "pixel_shuffle_ratio": 0.5, "hidden_size": 1408},
}
QWEN3_VL_8B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 36,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
    "vision_config": {"depth": 27, "hidden_size": 1152, "num_heads": 16, "patch_size": 16, "spatial_merge_size": 2},
}


@pytest.mark.parametrize(
    ("model", "length", "most", "buckets", "pictures", "tokens"),
    [
        # A picture of 1,024 x 1,024 pixels has 64 lines of 64 patches and a mark each.
        (PIXTRAL_12B, 16384, 4, (1024, 2048, 4096, 8192, 16383), 4, 4160),
        (PIXTRAL_12B, 32768, 2, (1024, 2048, 4096, 8192), 2, 4160),
        (PIXTRAL_12B, 4096, 8, (1024, 2048, 4095), 8, 4158),
        (PIXTRAL_12B, 4096, 0, (1024,), 0, 4158),
        # 16 tiles and the whole, of 144 tokens each and a mark.
        (SCOUT, 16384, 8, (8, 28, 86), 5, 2467),
        (SCOUT, 4096, 8, (8, 28), 5, 2467),
        (SCOUT, 1024, 1, (8,), 1, 1017),
        # A token is a square of two by two patches, and a call has 16,384 patches at most.
        (QWEN3_VL_8B, 16384, 4, (1024, 2048, 4096, 8192, 16384), 4, 4096),
        (QWEN3_VL_8B, 2048, 8, (1024, 2048, 4096, 8188), 8, 2047),
    ],
)
def test_sizes_of_an_encoder_hold_all_pictures_that_a_prompt_may_have(
    model: dict[str, Any], length: int, most: int, buckets: tuple[int, ...], *, pictures: int, tokens: int
) -> None:
    document = {"limits": {"maxSequences": 2, "maxModelLength": length}, "media": {"maxImages": most}}
    config = config_for(type("Model", (), {"folder": Path("/m")})(), **document)
    settings = settings_of(config, model, TARGET)
    assert settings.vision is not None
    assert settings.vision.buckets == buckets
    limits = limits_of(settings, 600.0)
    assert (limits.max_pictures, limits.max_picture_tokens) == (pictures, tokens)
    assert all(bucket.fits < bucket.computes for bucket in limits.prefill_buckets)


def test_cores_that_an_encoder_cannot_share_its_heads_out_to_compute_other_chunks() -> None:
    config = config_for(type("Model", (), {"folder": Path("/m")})(), media={"maxImages": 1})
    model = SCOUT | {"text_config": SCOUT["text_config"] | {"num_attention_heads": 64, "intermediate_size": 8192}}
    vision = settings_of(config, model, Target(PLATFORMS["trn2"], 2, 64)).vision
    assert vision is not None
    assert (vision.neuron_config["tp_degree"], vision.neuron_config["world_size"]) == (16, 64)
    assert vision.buckets == (8, 24), "a multiple of two chunks for each of four parts"


def test_a_plan_counts_the_encoder(tmp_path: Path) -> None:
    config = config_for(type("Model", (), {"folder": Path("/m")})(), dtype="bfloat16", media={"maxImages": 1})
    plan, text = (
        plan_of(config if most else msgspec.structs.replace(config, media=no_pictures(config)), SCOUT, TARGET)
        for most in (1, 0)
    )
    more = [graph for graph in plan.graphs if graph.name.startswith("encode_")]
    assert [graph.name for graph in more] == ["encode_8", "encode_18"]
    assert more[-1].takes == "pictures of a prompt, 9 to 18 chunks"
    # Scores of 576 patches by 576 in float32, six rows of a layer, and 144 features of each chunk.
    assert more[-1].activation_bytes == 18 * (576 * 576 * 4 + 576 * 6 * 1408 * 2 + 144 * 5120 * 2)
    assert plan.compile_seconds == pytest.approx(text.compile_seconds + 2 * 34 * 2.4)
    assert plan.cache_bytes == text.cache_bytes == 2 * 48 * 8 * 128 * 2 * 16 * 4096
    (tmp_path / "plan.json").write_text(json.dumps(plan.document()))
    assert read_plan(tmp_path / "plan.json") == plan.settings


def no_pictures(config: Any) -> Any:
    return msgspec.structs.replace(config.media, max_images=0)


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_that_do_not_fit_their_tokens_are_no_batch(models: dict[str, SeeingModel], kind: str) -> None:
    model = models[kind]
    vision = settings_for(model, **SMALL).vision
    assert vision is not None
    request, other = (model.request("one", Random(2), [4, size, 3]) for size in ((2, 2), (2, 1)))
    places = places_of(vision, request.pictures, request.prompt_token_ids)
    with pytest.raises(IllegalBatch, match="tokens stand for pictures of"):
        arguments_of(vision, other.pictures, places, 40, 64)
    strange = (model.of_tensors({"pixels": torch.zeros(1)}, 4, 3),)
    with pytest.raises(IllegalBatch, match="does not make"):
        arguments_of(vision, strange, places, 40, 64)


Change = Callable[[dict[str, Any]], dict[str, Any]]


def decoded(given: dict[str, Any]) -> dict[str, Any]:
    position = torch.tensor([[20]])
    return given | {"input_ids": torch.tensor([[5]]), "position_ids": position, "attention_mask": None}


def doubled(given: dict[str, Any]) -> dict[str, Any]:
    rows = ("input_ids", "position_ids", "attention_mask", "sampling_params")
    return given | {name: given[name].repeat(2, 1) for name in rows} | {"seq_ids": torch.tensor([0, 1])}


def of_pixels(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def changed(given: dict[str, Any]) -> dict[str, Any]:
        pixels = given["pixel_values"]
        return given | {"pixel_values": [change(pixels[0])] if isinstance(pixels, list) else change(pixels)}

    return changed


CARELESS: dict[str, tuple[str, Change]] = {
    "pixels in a decode step": ("M5", decoded),
    "two prompts": ("M6", doubled),
    "no mask": ("M3", lambda given: {name: one for name, one in given.items() if name != "vision_mask"}),
    "a sum of 0": ("M3", of_pixels(torch.zeros_like)),
    "half precision": ("M7", of_pixels(torch.Tensor.half)),
    "a mask of another length": ("M7", lambda given: given | {"vision_mask": given["vision_mask"][:, :-1]}),
    "a place too few": ("M8", lambda given: given | {"vision_mask": given["vision_mask"] & ~first(given)}),
}


def first(given: dict[str, Any]) -> torch.Tensor:
    """The first place of features."""
    mask = given["vision_mask"]
    return torch.zeros_like(mask).index_fill(1, mask.nonzero()[:1, 1], True)


def with_pixels(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda given: given | {"pixel_values": change(given["pixel_values"])}


def without_a_start(given: dict[str, Any]) -> dict[str, Any]:
    ids = given["input_ids"]
    return given | {"input_ids": torch.where(ids == START, 21, ids)}


def as_long_as_a_graph(given: dict[str, Any]) -> dict[str, Any]:
    widths = {"input_ids": 0, "attention_mask": 0, "position_ids": 0}
    return given | {name: torch.nn.functional.pad(given[name], (0, 32 - given[name].shape[1])) for name in widths}


CARELESS_WITH_GRIDS: dict[str, tuple[str, Change]] = {
    "pixels in a decode step": ("M5", decoded),
    "two prompts": ("M6", doubled),
    "no grid": ("M3", lambda given: {name: one for name, one in given.items() if name != "image_grid_thw"}),
    "a sum of 0": ("M3", with_pixels(torch.zeros_like)),
    "half precision": ("M7", with_pixels(torch.Tensor.half)),
    "no token before a picture": ("M11", without_a_start),
    "fewer rows than lines": ("M9", lambda given: {**decoded(given), "pixel_values": None}),
}


@on_the_fake
def test_the_strict_fake_refuses_careless_calls_with_grids(models: dict[str, SeeingModel], tmp_path: Path) -> None:
    model = models["Qwen3-VL"]
    settings = settings_for(model, **SMALL)
    vision = settings.vision
    assert vision is not None
    with fake_nxdi() as fake:
        made = application(settings, model.folder)
        made.compile(str(tmp_path / "artifact"))
        made.load(str(tmp_path / "artifact"), skip_warmup=True)
        request = model.request("one", Random(2), [4, (2, 2), 9])
        tokens, end = request.prompt_token_ids, len(request.prompt_token_ids)
        places = places_of(vision, request.pictures, tokens)
        given = {
            "input_ids": torch.tensor([tokens]),
            "position_ids": torch.arange(end)[None],
            "attention_mask": torch.ones((1, end), dtype=torch.int64),
            "seq_ids": torch.tensor([0]),
            "sampling_params": torch.ones((1, 3)),
            **arguments_of(vision, request.pictures, places, end, end),
        }
        for name, (rule, change) in CARELESS_WITH_GRIDS.items():
            with pytest.raises(fake.FakeRefusal) as refusal:
                made(**change(given))
            assert refusal.value.rule == rule, name
        made(**given)
        more = {"pixel_values": torch.ones((1024, 6 * PATCH**2)), "image_grid_thw": torch.tensor([[1, 32, 32]])}
        with pytest.raises(AssertionError, match="exceeds largest bucket"):
            made(**given | more)
        with pytest.raises(fake.FakeRefusal, match="places for a graph of 32 tokens in one of 64"):
            made(**as_long_as_a_graph(given))


@on_the_fake
@pytest.mark.parametrize("kind", ["Pixtral", "Llama 4"])
def test_the_strict_fake_refuses_careless_calls(models: dict[str, SeeingModel], tmp_path: Path, kind: str) -> None:
    model = models[kind]
    settings = settings_for(model, **SMALL)
    vision = settings.vision
    assert vision is not None
    with fake_nxdi() as fake:
        made = application(settings, model.folder)
        made.compile(str(tmp_path / "artifact"))
        made.load(str(tmp_path / "artifact"), skip_warmup=True)

        def given(parts: list[int | tuple[int, int]], width: int = 64) -> dict[str, Any]:
            request = model.request("one", Random(2), parts)
            tokens, end = request.prompt_token_ids, len(request.prompt_token_ids)
            pad = [0] * (width - end)
            places = places_of(vision, request.pictures, tokens)
            return {
                "input_ids": torch.tensor([[*tokens, *pad]]),
                "position_ids": torch.tensor([[*range(end), *pad]]),
                "attention_mask": torch.ones((1, end), dtype=torch.int64),
                "seq_ids": torch.tensor([0]),
                "sampling_params": torch.ones((1, 3)),
                **arguments_of(vision, request.pictures, places, end, width),
            }

        for name, (rule, change) in CARELESS.items():
            with pytest.raises(fake.FakeRefusal) as refusal:
                made(**change(given([4, (2, 2), 30])))
            assert refusal.value.rule == rule, name
        full = given([4, (2, 2), 30])
        made(**full)
        with pytest.raises(AssertionError, match="must be of type bool"):
            made(**full | {"vision_mask": full["vision_mask"].long()})
        more = {"Pixtral": [torch.ones((1, 3, 17 * PATCH, 16 * PATCH))], "Llama 4": torch.ones((53, 3, 16, 16))}
        sizes = {"image_sizes": [torch.tensor([[17 * PATCH, 16 * PATCH]])]} if kind == "Pixtral" else {}
        with pytest.raises((AssertionError, ValueError), match="larg"):
            made(**full | {"pixel_values": more[kind]} | sizes)
        spare = 256 - int(full["attention_mask"].sum())
        with pytest.raises(fake.FakeRefusal, match="fills its bucket"):
            made(**given([4, (2, 2), 30 + spare], 256))
