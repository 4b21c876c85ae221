"""The fake torch-xla."""

__version__ = "2.9.0"
