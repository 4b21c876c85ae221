"""Frequencies and scale of scaled rotary positions are those of transformers, for all that a config.json may say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.random_model import model_config
from neuron_runtime.backend.torch.architecture import decoder_config
from neuron_runtime.backend.torch.rotary import inverse_frequencies

FACTORS = st.sampled_from([0.5, 1.0, 2.0, 4.0, 40.0])
YARN = st.fixed_dictionaries(
    {"rope_type": st.just("yarn"), "factor": FACTORS},
    optional={
        "original_max_position_embeddings": st.sampled_from([32, 64, 4096]),
        "attention_factor": st.sampled_from([0.5, 1.3]),
        "beta_fast": st.sampled_from([16, 32.0]),
        "beta_slow": st.sampled_from([1, 2.0]),
        "mscale": st.sampled_from([0, 0.707, 1.0]),
        "mscale_all_dim": st.sampled_from([0, 0.5, 1.0]),
        "truncate": st.booleans(),
    },
)
OTHERS = st.fixed_dictionaries({"rope_type": st.sampled_from(["linear", "dynamic"]), "factor": FACTORS})


@given(
    scaling=YARN | OTHERS,
    head_dim=st.sampled_from([16, 64, 128]),
    theta=st.sampled_from([100.0, 1e4, 1e6]),
    length=st.sampled_from([512, 4096]),
)
def test_scaled_positions_are_those_of_transformers(
    scaling: dict[str, Any], head_dim: int, theta: float, length: int
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = model_config(head_dim=head_dim, rope_theta=theta, max_position_embeddings=length, rope_scaling=scaling)
    model = decoder_config(config)
    frequencies, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](LlamaConfig(**config))
    assert torch.allclose(inverse_frequencies(model.rope, head_dim), frequencies, rtol=1e-6, atol=0)
    assert model.rope.scale == pytest.approx(scale, rel=1e-9)
