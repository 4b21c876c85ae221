"""The operator's process: kopf's handlers, the pass over one model, settings, metrics."""
