"""Models that see pictures: which engines take `serving.media`, what they are started with, and what pods request."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from helpers.operator_worlds import FACTS, SETTINGS, body
from neuron_operator.api.engines.vllm_flags import served
from neuron_operator.api.errors import InvalidSpec
from neuron_operator.api.manifest import parse
from neuron_operator.api.reasons import Reason
from neuron_operator.decide.pin import pin
from neuron_operator.read.records import Facts
from neuron_operator.render.config_document import config_document
from neuron_operator.render.resources import BYTES_PER_PIXEL, PICTURES_AT_ONCE, in_host_memory, picture_bytes

MEDIA: dict[str, Any] = {
    "maxImages": 4,
    "maxImageBytes": 1 << 20,
    "maxPixels": 1 << 22,
    "allowedHosts": ["pictures.example.com", "cdn.example.com:8443"],
}
KNOWN = msgspec.convert({**FACTS, "seesPictures": True}, Facts)


def model_with(media: dict[str, Any], backend: str = "torch") -> Any:
    accelerator = {"type": "CPU"} if backend in ("torch", "simulated") else {"devices": 1}
    spec = {"model": {"uri": "hf://acme/tiny"}, "accelerator": accelerator, "engine": {"backend": backend}}
    return parse(body({**spec, "serving": {"media": media}}))


def test_the_limits_are_in_the_document_of_the_replicas() -> None:
    assert config_document(model_with(MEDIA), KNOWN)["media"] == MEDIA


def test_without_limits_the_document_has_none() -> None:
    assert "media" not in config_document(model_with({}), KNOWN)


@pytest.mark.parametrize("backend", ["optimum", "transformers-neuronx", "simulated"])
@pytest.mark.parametrize("name", MEDIA)
def test_a_backend_that_sees_no_pictures_refuses_their_limits_by_name(name: str, backend: str) -> None:
    with pytest.raises(InvalidSpec, match="remove it: ") as refused:
        model_with({name: MEDIA[name]}, backend)
    assert (refused.value.field, refused.value.reason) == (f"spec.serving.media.{name}", Reason.FIELD_NOT_SUPPORTED)


def test_vllm_is_started_with_its_own_flags() -> None:
    document = {"servedNames": ["chat"], "dtype": "auto", "media": {"maxImages": 0, "allowedHosts": ["a.example"]}}
    command = served(document, version="cpu", model_dir="/models/m", port=8000).command
    assert '--limit-mm-per-prompt={"image":0}' in command
    assert "--allowed-media-domains" in " ".join(command)
    assert "a.example" in " ".join(command)


def test_a_pod_requests_memory_for_pictures_only_where_they_are_seen() -> None:
    seeing, blind = in_host_memory(model_with({}), KNOWN), msgspec.structs.replace(KNOWN, sees_pictures=False)
    assert seeing.pictures == picture_bytes(None)
    assert in_host_memory(model_with({}), blind).pictures == 0
    assert in_host_memory(model_with({"maxImages": 0}), KNOWN).pictures == 0
    pods = [pin(model_with({}), facts, SETTINGS, 1).pinned.plan.host_bytes or 0 for facts in (KNOWN, blind)]
    assert pods[0] - pods[1] == pytest.approx(picture_bytes(None), abs=64 << 20), "requests are rounded"


def test_the_memory_for_pictures_follows_the_largest_that_is_read() -> None:
    usual, large = (in_host_memory(model_with({"maxPixels": most}), KNOWN).pictures for most in (1 << 25, 1 << 27))
    assert usual == picture_bytes(None)
    assert large - usual == PICTURES_AT_ONCE * BYTES_PER_PIXEL * ((1 << 27) - (1 << 25))
