"""Reserves ports of this machine for programs that need a port number."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

MOST = 65_535


@contextlib.contextmanager
def free_ports(count: int = 1) -> Iterator[int]:
    """The first of `count` consecutive ports of 127.0.0.1.

    Each is bound without listening: the kernel does not assign it as an ephemeral port, while a program that binds it
    by number, with SO_REUSEADDR as servers do, gets it.
    """
    while True:
        with contextlib.ExitStack() as kept:
            first = _bound(kept, 0)
            if first is not None and all(
                first + more <= MOST and _bound(kept, first + more) is not None for more in range(1, count)
            ):
                yield first
                return


def _bound(kept: contextlib.ExitStack, port: int) -> int | None:
    """The bound port; None if it is in use."""
    held = kept.enter_context(socket.socket())
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(("127.0.0.1", port))
    except OSError:
        return None
    return int(held.getsockname()[1])
