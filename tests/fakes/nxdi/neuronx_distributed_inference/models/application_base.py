import fake_nxdi
import torch_neuronx  # noqa: F401 - as the real one, which registers classes with torch
from fake_nxdi.application import COMPILED_MODEL_FILE_NAME, is_compiled, normalize_path
from fake_nxdi.application import NeuronApplicationBase as _Base

__all__ = ["COMPILED_MODEL_FILE_NAME", "NeuronApplicationBase", "is_compiled", "normalize_path"]


class _Since9(_Base):
    def compile(  # type: ignore[override]
        self, compiled_model_path, debug=False, pre_shard_weights_hook=None, dry_run=False, disable_fail_fast=False
    ):
        self._compile(compiled_model_path, dry_run=dry_run, hook=pre_shard_weights_hook)


class _Until8(_Base):
    def compile(self, compiled_model_path, debug=False, pre_shard_weights_hook=None, dry_run=False):  # type: ignore[override]
        self._compile(compiled_model_path, dry_run=dry_run, hook=pre_shard_weights_hook)


NeuronApplicationBase = _Since9 if fake_nxdi.has(9) else _Until8
NeuronApplicationBase.__name__ = "NeuronApplicationBase"
