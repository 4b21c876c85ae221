"""Random limits of a backend, and random requests within them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from helpers.engine_driver import VOCABULARY_SIZE, alone, even_only
from helpers.guides import FORM
from neuron_runtime.core import BackendLimits, Picture, PrefillBucket, Request, Sampling


def some_limits(random: Random) -> BackendLimits:
    """Random limits of a backend."""
    choice = random.choice
    max_rows, length, max_drafts = choice((2, 3, 4, 6, 1)), choice((20, 13, 31, 40, 8)), choice((0, 0, 0, 1, 2, 5))
    all_live, mixes, chunks = choice(
        ((True, False, False), *[(False, bool(mixes), bool(chunks)) for mixes in (0, 1) for chunks in (0, 1, 1)])
    )
    min_chunk = choice((1, 2, 3, 4)) if chunks else 1
    step_tokens = max_rows - 1 + min_chunk + choice((0, 1, 3, 8) if chunks else (length // 2, length, length))
    buckets = some_buckets(random, max(step_tokens // 2, min_chunk)) if choice((True, False)) else ()
    if buckets:
        step_tokens = max(step_tokens, buckets[-1].computes + (max_rows - 1 if mixes else 0))
    slots = choice((False, False, False, True))
    block_size = length if slots else choice((1, 2, 3, 4, 6))
    blocks_of_one = -(-length // block_size)
    few = (blocks_of_one // 2 + 1, blocks_of_one, blocks_of_one + 2, 3 * blocks_of_one // 2, 2 * blocks_of_one)
    shares = not slots and choice((True, True, True, False))
    largest = buckets[-1].fits if buckets else 0
    start = choice((0, 0, 2 * block_size, 5, largest, 2 * largest)) if buckets or (shares and not chunks) else 0
    device = choice((True, False))
    in_flight = choice((1, 2)) if device else 1
    num_adapters = choice((0, 0, 1, 2, 3))
    sampling: Any = choice(("Device", "DeviceWithLogits", "Host"))
    samples_some = (
        {} if sampling == "Host" else {"max_top_k": choice((0, 3, 8)), "top_p_keeps_crossing": choice((True, False))}
    )
    # A picture that a row feeds whole is at most as long as a chunk beside the rows of all others.
    most = step_tokens - (max_rows - 1 if mixes else 0) - min_chunk + 1
    num_pictures = choice((0, 3, 3))
    whole = num_pictures > 0 and choice((True, False)) and not (chunks and buckets)
    return BackendLimits(
        max_rows=max_rows,
        max_model_length=length,
        max_step_tokens=step_tokens,
        max_prefill_rows=choice((1, 2, 3)),
        prefill_buckets=buckets,
        max_prefill_start=start,
        min_prefill_tokens=min(choice((1, 1, 2)), buckets[-1].fits if buckets else step_tokens),
        max_drafts=max_drafts,
        num_lookahead_tokens=choice((0, 0, 0, 2)),
        layout="slots" if slots else "blocks",
        block_size=block_size,
        num_blocks=max_rows if slots else choice(few),
        mixes_phases=mixes,
        chunks_prefill=chunks,
        min_chunk_tokens=min_chunk,
        decodes_all_live_rows=all_live,
        sorts_rows=choice((True, False)),
        lowest_slot_first=choice((True, False)),
        shares_prefixes=shares,
        max_adapters=num_adapters,
        max_loaded_adapters=num_adapters + (choice((0, 0, 1, 9)) if num_adapters else 0),
        max_adapter_rank=num_adapters and 8,
        max_pictures=num_pictures,
        max_picture_tokens=num_pictures and min(most, length // 2),
        feeds_pictures_whole=whole,
        max_logprobs=2,
        reports_prompt_logprobs=sampling == "Host" and choice((True, False)),
        sampling=sampling,
        **samples_some,  # type: ignore[arg-type]
        steps_in_flight=in_flight,  # type: ignore[arg-type]
        token_feedback=choice(("device", "same rows")[:in_flight]) if device else "host",  # type: ignore[arg-type]
    )


def some_buckets(random: Random, largest: int) -> tuple[PrefillBucket, ...]:
    """Up to three sizes, which may compute more than fits."""
    sizes = sorted({largest, random.randint(1, largest), random.randint(1, largest)})
    return tuple(
        PrefillBucket(size, size + padding)
        for size, padding in zip(sizes, sorted(random.choices((0, 0, 1, 3), k=len(sizes))), strict=True)
    )


def some_requests(random: Random, limits: BackendLimits) -> Iterator[Request]:
    """Prompts that share texts, for example an earlier request and its answer."""
    choice = random.choice
    longest, least = min(limits.longest_prompt, limits.max_new_tokens(0) - 1), limits.min_prefill_tokens
    num_late = 0 if limits.sampling == "Device" else choice((0, 0, 2))
    earlier: list[Request] = []
    for number in range(choice((4, 6, 8, 12, 1)) if longest >= least else 0):
        text: list[int] = []
        if earlier and random.random() < 0.75:
            previous = choice(earlier[-3:])
            text = [*previous.prompt_token_ids, *alone(previous, even_only, limits)[0]]
        num_prompt = choice((random.randint(least, max(longest // 2, least)), len(text), 2 * longest // 3))
        num_prompt = min(max(num_prompt, least), longest)
        room, seed = limits.max_new_tokens(num_prompt), random.randint(0, 99)
        max_tokens = choice((room, room, max(room // 2, 1), 1, min(room, 2), random.randint(1, room)))
        common = min(choice((num_prompt, num_prompt, num_prompt - 1, num_prompt // 2)), len(text))
        prompt = (*text[:common], *(seed * (at + 1) % VOCABULARY_SIZE for at in range(common, num_prompt)))
        shown = previous.pictures if text and choice((True, True, False)) else ()
        earlier.append(
            Request(
                f"{'even' if number < num_late else 'r'}{number}",
                prompt,
                Sampling(
                    max_tokens=max_tokens,
                    form=FORM if number < num_late else None,
                    seed=seed % 7,
                    choice=seed % 2,
                    stop_token_ids=frozenset(choice(((), (), (), (1, 2), (3, 5, 8, 9)))),
                    **some_parameters(random, limits, max_tokens),
                ),
                priority=choice((0, 0, 1, 2)),
                cache_salt=choice(("",) * 7 + ("salt",)),
                adapter=choice(("", "", *map(str, range(2 * limits.max_adapters)))),
                pictures=some_pictures(random, limits, num_prompt, shown),
            )
        )
        yield earlier[-1]


def some_pictures(
    random: Random, limits: BackendLimits, num_prompt: int, shown: Sequence[Picture]
) -> tuple[Picture, ...]:
    """Pictures of a prompt; there are three different ones, each of its own size. shown: those that it begins with."""
    found = [one for one in shown if one.end <= num_prompt]
    end = found[-1].end if found else 0
    while len(found) < limits.max_pictures and end < num_prompt and random.random() < 0.7:
        start, number = random.randint(end, num_prompt - 1), random.randint(1, 3)
        pixels, count = bytes([number]), -(-limits.max_picture_tokens // number)
        if (end := start + count) <= num_prompt:
            found.append(Picture(hashlib.sha256(pixels).hexdigest(), start, count, memoryview(pixels)))
    return tuple(found)


def some_parameters(random: Random, limits: BackendLimits, max_tokens: int) -> dict[str, Any]:
    """Parameters of a request, within the sampling mode."""
    choice = random.choice
    given: dict[str, Any] = {
        "temperature": choice((0.0, 0.5, 1.0)),
        "top_k": choice((0, 0, 1, 3)),
        "top_p": choice((1.0, 0.9, 0.4)),
    }
    if limits.sampling != "Device" and choice((True, False)):
        given |= {
            "top_k": choice((0, 9)),
            "seeded": choice((True, False)),
            "min_tokens": random.randint(0, max_tokens),
            "logprobs": choice((None, 1)),
        }
    if limits.reports_prompt_logprobs:
        given["prompt_logprobs"] = choice((None,) * 4 + (1,))
    return given
