"""The kubectl plugin `kubectl neuron`: why a model is not ready, its logs, a chat.

`command` parses and dispatches, `cluster` runs kubectl, `why` computes. It is a client like any other: it
acts with the rights of the person who runs it, and needs neither the operator's process nor its settings.
"""
