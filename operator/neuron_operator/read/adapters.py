"""What a replica tells about its adapters (`GET /adapters`), as values. Called by `decide`. It is not trusted."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct


class ReplicaAdapter(Struct, frozen=True, kw_only=True, rename="camel"):
    """One adapter, as a replica sees it."""

    name: str
    state: str
    digest: str = ""
    """Empty: not known yet."""
    reason: str = ""
    message: str = ""

    @property
    def words(self) -> str:
        return ": ".join(filter(None, (self.state, self.reason, self.message)))


class _Answer(Struct, frozen=True, kw_only=True, rename="camel"):
    adapters: tuple[ReplicaAdapter, ...] = ()


def adapters_in(answer: str) -> Mapping[str, ReplicaAdapter] | None:
    """By name; None if the answer is not one of our runtime."""
    try:
        read = msgspec.json.decode(answer.encode(errors="surrogatepass"), type=_Answer)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return {one.name: one for one in read.adapters}
