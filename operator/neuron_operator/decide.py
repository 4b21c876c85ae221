"""The decision of one pass: what a World calls for next. Called by the rim (reconcile, local).

Pure: the same world gives the same decision, and nothing a manifest says makes it raise.
"""

from __future__ import annotations

from neuron_operator.world import Decision, Settings, World


def decide(world: World, settings: Settings) -> Decision:
    """The objects to apply and to delete now, and the whole status."""
    raise NotImplementedError
