"""The Neuron devices of this machine, as its device nodes show them.

Used to choose the default backend. Opens no device, and imports nothing of the Neuron SDK.
"""

from __future__ import annotations

import re
from pathlib import Path

DEV = Path("/dev")


def device_nodes(dev: Path = DEV) -> list[Path]:
    """The nodes `/dev/neuron0`, `/dev/neuron1`, ... in order of their numbers."""
    nodes = [node for node in dev.glob("neuron*") if re.fullmatch(r"neuron\d+", node.name)]
    return sorted(nodes, key=lambda node: int(node.name.removeprefix("neuron")))
