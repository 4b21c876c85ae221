"""The fake optimum-neuron, over the device, decoder and sampler of the fake NxD Inference.

The packages below `releases/` carry its import names and call in here, one folder for each release that differs.
`helpers.optimum.fake_optimum` sets it up. `strict` and `damage` are those of `fake_nxdi`.
"""
