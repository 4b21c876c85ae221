"""Sampling on the CPU from logits, for every backend that has them: its entry point is `sampler.HostSampler`.

Knows slots, parameters and tokens; nothing of batches, caches or the device that computed the logits.
"""
