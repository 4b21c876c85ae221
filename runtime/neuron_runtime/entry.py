"""Where the program `neuron-runtime` starts: it takes SIGTERM before it imports anything that takes time.

The kernel drops a signal for which the first process of a container has no handler yet. A pod that is deleted while it
starts would then run on, with its devices, until the end of its grace period.
"""

from __future__ import annotations

import signal

INTERRUPTED = 130


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from neuron_runtime.__main__ import main as run  # noqa: PLC0415

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED
