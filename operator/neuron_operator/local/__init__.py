"""`neuron-operator local`: serves a manifest on this machine, without a cluster. See `command`."""

from neuron_operator.local.command import add_arguments, main, run

__all__ = ["add_arguments", "main", "run"]
