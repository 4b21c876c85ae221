"""EAGLE heads as they are published, and as NxD Inference reads them.

It wants the names of a model of one layer, an embedding, and a head for all tokens of the model. Called by `settings`
for names and by `library`, whose application class of a head converts the tensors that NxD Inference has read: nothing
is written. Papers: https://arxiv.org/abs/2401.15077, https://arxiv.org/abs/2503.01840.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from neuron_runtime.checkpoint import InvalidModel, read_checkpoint
from neuron_runtime.dtypes import COMPUTED_STORED

TOKENS = "d2t"
"""For each token that the head knows, how far behind it the model's token is."""
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
HEAD_NORMS = ("layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight")
STATES = "eagle_aux_hidden_state_layer_ids"
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "add_para_norm")
_ELSEWHERE = (TOKENS, "t2d")


def not_computed(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """What a head of version 3 asks for in config.json, and NxD Inference computes otherwise.

    num_layers: of the model.
    """
    inner = config.get("eagle_config")
    inner = inner if isinstance(inner, Mapping) else {}
    found = [name for name in VARIANTS if config.get(name) or inner.get(name)]
    # The layers that read the states, as vLLM has them, or those that make them, as SGLang has them.
    usual = [2, num_layers // 2, num_layers - 3]
    of_inner = [one - 1 for one in usual]
    if (config.get(STATES) or usual) != usual or (inner.get(STATES) or of_inner) != of_inner:
        found.append(STATES)
    return found


def named_as_layers(names: Iterable[str]) -> set[str]:
    """The names of tensors as NxD Inference has them; EAGLE 3 heads name their layer otherwise."""
    return {_name(one) for one in names}


def _name(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)


def converted(tensors: Mapping[str, Any], vocabulary_size: int, of_model: Callable[[str], Any]) -> dict[str, Any]:
    """The tensors of a head as NxD Inference reads them.

    Args:
        of_model: reads a tensor of the model by its name; what the head lacks is the model's.

    Raises InvalidModel if the head knows tokens that the model does not have.
    """
    found = {_name(name): tensor for name, tensor in tensors.items() if name not in _ELSEWHERE}
    for name in (EMBEDDING, HEAD):
        if name not in found:
            found[name] = of_model(name)
    if TOKENS in tensors:
        found[HEAD] = _spread(found[HEAD], tensors[TOKENS], vocabulary_size)
    return found


def read_tensor(folder: Path, name: str) -> Any:
    """A tensor of a model by its name without `model.`; a head that is tied to the embedding is the embedding."""
    from safetensors import safe_open  # noqa: PLC0415  (as torch)

    tensors = read_checkpoint(folder).tensors
    names = [name, f"model.{name}", *([EMBEDDING, f"model.{EMBEDDING}"] if name == HEAD else [])]
    found = next((one for one in names if one in tensors), None)
    if found is None:
        raise InvalidModel(f"{folder} has no {name}, which its EAGLE head lacks too")
    if (dtype := tensors[found].dtype) not in COMPUTED_STORED:
        raise InvalidModel(f"{folder}: {found} is quantized ({dtype}), but its EAGLE head has none of its own")
    with safe_open(folder / tensors[found].file, "pt") as file:
        return file.get_tensor(found)


def _spread(head: Any, distances: Any, vocabulary_size: int) -> Any:
    """A head of all tokens. Those that it did not know have logit 0: they are guessed only where all others are less
    likely, and a wrong guess costs time alone."""
    import torch  # noqa: PLC0415  (takes seconds to import)

    tokens = torch.arange(len(distances)) + distances.long()
    if len(distances) != len(head) or int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary_size:
        message = f"{TOKENS} maps {len(head)} tokens of the EAGLE head to {int(tokens.min())} to {int(tokens.max())}, "
        raise InvalidModel(message + f"but the model has {vocabulary_size} tokens")
    spread = torch.zeros(vocabulary_size, head.shape[1], dtype=head.dtype)
    spread[tokens] = head
    return spread
