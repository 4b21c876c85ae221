"""What the backends for Neuron devices share: devices, failures, buckets, and the calls of a library that blocks."""
