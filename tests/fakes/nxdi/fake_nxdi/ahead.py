"""Asynchronous execution: call N launches step N + 1 with the tokens that the device has, then waits for step N."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import fake_nxdi
from fake_nxdi.program import Later, repeats
from fake_nxdi.submodel import Call, Launched


def run_ahead(application: Any, call: Call, *, prefill: bool) -> Any:
    if prefill:
        outputs = application.context_encoding_model(call).on_host(torch.argsort(call.seq_ids))
        _forget(application)
        return outputs
    model = application.token_generation_model
    rows = torch.arange(call.rows) if application.neuron_config.is_prefix_caching else call.seq_ids
    near_border = _reaches_border(int(call.mask.shape[1]), model.neuron_config.buckets)
    if near_border or not torch.equal(application.prior_seq_ids, call.seq_ids):
        _forget(application)
        return model(call, "second_fit" if near_border else "first_fit").on_host(rows)
    if application.prior_outputs is None:
        application.prior_outputs = model(call)
    elif fake_nxdi.strict():
        _check_tokens(application.prior_outputs, call, rows)
    current: Launched = application.prior_outputs
    application.prior_seq_ids = call.seq_ids
    if application.neuron_config.seq_len - int(call.positions.max()) > 2:
        ids = current.outputs
        if isinstance(ids, Later) and call.rows == model.neuron_config.batch_size:
            ids = replace(ids, copies=repeats(call.ids, call.positions, [True] * call.rows))
        application.prior_outputs = model(replace(call, ids=ids, **application.next_cpu_inputs))
        # Since the first of the two was launched now or by the call before, its answer is this call's.
        return current.on_host(rows)
    outputs = current.on_host(rows)
    application.prior_outputs = application.prior_seq_ids = None
    application.async_should_stop = True
    return outputs


def _forget(application: Any) -> None:
    """The step that was launched ahead runs, writes its keys and values, and nobody reads its answer."""
    if application.prior_outputs is not None:
        fake_nxdi.COUNTS.wasted += 1
    application.prior_outputs = application.prior_seq_ids = None


def _reaches_border(known: int, buckets: list[Any]) -> bool:
    ends = [bucket[-1] if isinstance(bucket, list) else bucket for bucket in buckets]
    return any(known < end <= known + 2 for end in ends)


def _check_tokens(prior: Launched, call: Call, rows: torch.Tensor) -> None:
    """The step of this call has run before it: with the device's tokens, and with the rows that it had then."""
    if not isinstance(prior.outputs, Later):
        return
    own = ~torch.tensor(repeats(call.ids, call.positions, [True] * call.rows))
    fed, positions = (tensor[rows.long(), 0].long() for tensor in (prior.outputs.fed, prior.outputs.positions))
    if not torch.equal(fed[own], call.ids[:, 0].long()[own]):
        fake_nxdi.refuse("20-24", "input_ids differ from the tokens with which the device has already run this step")
    if not torch.equal(positions[own], call.positions[:, 0].long()[own]):
        fake_nxdi.refuse("20-24", "position_ids differ from those with which the device has already run this step")
