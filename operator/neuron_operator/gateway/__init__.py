"""`neuron-gateway`: one URL for all models. It routes by the `model` of a request and wakes models that sleep."""
