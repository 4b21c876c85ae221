"""Model URIs: the runtime parses whatever the operator accepts."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from neuron_operator.api.field_types import URI_SCHEMES, Uri
from neuron_operator.api.fields import broken_rules
from neuron_runtime.uris import parse_uri

PIECES = ("a", "b9", "A", "0", "/", "/", ".", "..", "...", "-", "--", "_", "@", "#", "?", "%2e", "é", ":", "org/name")


@pytest.mark.parametrize("scheme", URI_SCHEMES)
def test_the_runtime_parses_every_uri_that_the_operator_accepts(scheme: str) -> None:
    num_accepted = 0

    @given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join))
    @example({"file": "/models/a", "hf": "org/name@v1.0"}.get(scheme, "bucket/a.b/c-d/"))
    def compare(rest: str) -> None:
        nonlocal num_accepted
        uri = f"{scheme}://{rest}"
        if not list(broken_rules(Uri, uri, "uri")):
            num_accepted += 1
            assert str(parse_uri(uri)).startswith(f"{scheme}://")

    compare()
    assert num_accepted > 0
