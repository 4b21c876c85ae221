"""`neuron-operator local`: serves a manifest on this machine, without a cluster. See `command`."""
