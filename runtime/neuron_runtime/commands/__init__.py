"""The commands of `neuron-runtime`, a module each: `add_arguments(parser)`, and what `__main__` runs.

At module level they import nothing heavy: every start of `neuron-runtime` reads the arguments of all commands.
"""
