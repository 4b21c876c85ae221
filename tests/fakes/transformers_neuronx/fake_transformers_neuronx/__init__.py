"""A transformers-neuronx for tests, after the source of v0.13: what a caller can notice, with real logits on the host.

Device, faults and settings are those of the fake NxD Inference (`fake_nxdi`): in mode `strict` it refuses what the real
library answers wrongly without an error, in mode `damage` it answers as wrongly. It has Llama and Mistral with
continuous batching in lines, generation on the device, int8 weights and `shard_over_sequence`; no paged attention,
chunked prefill or speculation, and says so. Tensor parallelism is one computation with the cores of `tp_degree` taken.
"""
