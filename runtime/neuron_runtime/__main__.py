"""Where `neuron-runtime` and `python -m neuron_runtime` start: SIGTERM is taken before anything that takes time is
imported.

The kernel drops a signal for which the first process of a container has no handler yet. A pod that is deleted while it
starts would then run on, with its devices, until the end of its grace period.
"""

from __future__ import annotations

import signal
import sys

INTERRUPTED = 130


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        # Here, because the handler must be set first.
        from neuron_runtime.commands.command_line import main as run  # noqa: PLC0415

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
