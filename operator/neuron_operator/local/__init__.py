"""`neuron-operator local`: a manifest served on this machine, as a small kubelet would. See `command`."""

from neuron_operator.local.command import add_arguments, main, run

__all__ = ["add_arguments", "main", "run"]
