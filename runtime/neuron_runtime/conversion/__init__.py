"""Converts the weights of a checkpoint to the one form in which all backends compute quantized weights, or multiplies
them out: `plan` decides, `writing` does it.
"""
