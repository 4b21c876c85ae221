"""The commands of `neuron-runtime`, one module each, with `add_arguments(parser)` and `run(options)`.

They must be cheap to import, because every start of `neuron-runtime` reads the arguments of all commands.
"""
