"""Compiled models: what the key of an artifact covers, how one is compiled, checked, published and found."""
