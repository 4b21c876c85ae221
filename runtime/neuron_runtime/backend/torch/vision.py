"""Pictures: the features that a vision tower makes of them, and the places among the tokens of a step that take these.

The towers are modules of transformers, which is imported for models with a tower only; the backend calls `Vision` on
its device thread. Features are computed when the first row feeds a token of their picture, and kept until no live
sequence has such tokens to feed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load

from neuron_runtime.backend.slots import FedRows, IntArray
from neuron_runtime.backend.torch.cache import StepPlan, Together
from neuron_runtime.backend.torch.decoder import Placed
from neuron_runtime.backend.torch.three_parts import Grid, ThreeParts
from neuron_runtime.backend.torch.towers import TowerFamily, image_token_of, merge_of, tower_tensors
from neuron_runtime.backend.torch.weights import WeightReader
from neuron_runtime.backend_protocol import IllegalBatch, ProgressCallback
from neuron_runtime.checkpoint import Checkpoint, InvalidModel, check_tensors
from neuron_runtime.core import Added, Batch, Picture
from neuron_runtime.quantization import Quantization

Pixels = Mapping[str, torch.Tensor]
"""What a processor of transformers makes of one picture, by its names."""


class Tower(Protocol):
    """Computes features of pictures. A module whose parts have the names of the checkpoint's tensors."""

    def features(self, pixels: Pixels) -> torch.Tensor:
        """Those of one picture: `[tokens, hidden size]`, one for each image token."""
        ...


class Pixtral(torch.nn.Module):
    """Pixtral, whose projector sees each patch, and Mistral 3, whose projector merges neighbours."""

    def __init__(self, config: Any, make_projector: Callable[[Any], torch.nn.Module], *, merges: bool) -> None:
        from transformers import AutoModel  # noqa: PLC0415 - takes seconds

        super().__init__()
        self.vision_tower = AutoModel.from_config(config.vision_config)  # type: ignore[no-untyped-call]
        self.multi_modal_projector = make_projector(config)
        layers = config.vision_feature_layer
        self._layers = [layers] if isinstance(layers, int) else layers
        self._merges = merges

    def features(self, pixels: Pixels) -> torch.Tensor:
        sizes = pixels["image_sizes"]
        states = self.vision_tower(
            pixels["pixel_values"], image_sizes=sizes, output_hidden_states=True, return_dict=True
        ).hidden_states
        chosen = torch.cat([states[layer] for layer in self._layers], dim=-1).squeeze(0)
        found: torch.Tensor = (
            self.multi_modal_projector(chosen, sizes) if self._merges else self.multi_modal_projector(chosen)
        )
        return found


class QwenVL(torch.nn.Module):
    """Qwen2.5-VL, and Qwen3-VL, whose first blocks of the decoder take features of some layers of the tower."""

    def __init__(self, visual: torch.nn.Module) -> None:
        super().__init__()
        self.visual = visual

    def features(self, pixels: Pixels) -> torch.Tensor:
        made = self.visual(pixels["pixel_values"], grid_thw=pixels["image_grid_thw"])
        # transformers 4 returns the features alone, or with a list of the deeper ones.
        if isinstance(made, torch.Tensor):
            return made
        last, deeper = (
            made if isinstance(made, tuple) else (made.pooler_output, getattr(made, "deepstack_features", None) or ())
        )
        return torch.cat((last, *deeper), dim=-1)


class Llama4(torch.nn.Module):
    """Llama 4, whose pictures are tiles."""

    def __init__(self, config: Any) -> None:
        from transformers.models.llama4 import modeling_llama4 as llama  # noqa: PLC0415

        super().__init__()
        self.vision_model = llama.Llama4VisionModel._from_config(config.vision_config)  # type: ignore[no-untyped-call]
        self.multi_modal_projector = llama.Llama4MultiModalProjector(config)  # type: ignore[no-untyped-call]

    def features(self, pixels: Pixels) -> torch.Tensor:
        # One by one: all tiles of a picture at once would take gigabytes, and no less time.
        tiles = [self.vision_model(tile.unsqueeze(0)).last_hidden_state[0] for tile in pixels["pixel_values"]]
        found: torch.Tensor = self.multi_modal_projector(torch.cat(tiles))
        return found


class Gemma3(torch.nn.Module):
    """Gemma 3, all of whose pictures have one size."""

    def __init__(self, config: Any) -> None:
        from transformers import AutoModel  # noqa: PLC0415
        from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector  # noqa: PLC0415

        super().__init__()
        self.vision_tower = AutoModel.from_config(config.vision_config)  # type: ignore[no-untyped-call]
        self.multi_modal_projector = Gemma3MultiModalProjector(config)

    def features(self, pixels: Pixels) -> torch.Tensor:
        found: torch.Tensor = self.multi_modal_projector(self.vision_tower(pixels["pixel_values"]).last_hidden_state)
        return found[0]


def _qwen2_5_vl(config: Any) -> QwenVL:
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen  # noqa: PLC0415

    tower = qwen.Qwen2_5_VisionTransformerPretrainedModel._from_config
    return QwenVL(tower(config.vision_config))  # type: ignore[no-untyped-call]


def _qwen3_vl(config: Any) -> QwenVL:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel  # noqa: PLC0415

    return QwenVL(Qwen3VLVisionModel._from_config(config.vision_config))  # type: ignore[no-untyped-call]


def _pixtral(config: Any) -> Pixtral:
    from transformers.models.llava.modeling_llava import LlavaMultiModalProjector  # noqa: PLC0415

    return Pixtral(config, LlavaMultiModalProjector, merges=False)


def _mistral3(config: Any) -> Pixtral:
    from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector  # noqa: PLC0415

    return Pixtral(config, Mistral3MultiModalProjector, merges=True)


MODULES: Mapping[str, Callable[[Any], Any]] = {
    "LlavaForConditionalGeneration": _pixtral,
    "Mistral3ForConditionalGeneration": _mistral3,
    "Llama4ForConditionalGeneration": Llama4,
    "Gemma3ForConditionalGeneration": Gemma3,
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": _qwen3_vl,
}
"""A tower from the configuration of transformers, by the class named in `architectures`."""


def load_tower(
    checkpoint: Checkpoint,
    tower: TowerFamily,
    dtype: torch.dtype,
    progress: ProgressCallback,
    quantization: Quantization | None,
) -> Tower:
    """Read the weights of a tower from a checkpoint with the names of the file.

    Raises InvalidModel if transformers cannot read its configuration, or tensors do not match it.
    """
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds

    try:
        config = AutoConfig.from_pretrained(str(checkpoint.folder), local_files_only=True)
        with _without_weights():
            module = MODULES[checkpoint.config["architectures"][0]](config)
    except Exception as error:
        # transformers raises whatever its configurations do.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidModel(f"{checkpoint.folder}: transformers cannot make its vision tower: {reason}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    own = tower_tensors(checkpoint, tower)
    check_tensors(own, shapes, quantization)
    reader = WeightReader(own, shapes, dtype, progress, {}, quantization=quantization)
    with torch.inference_mode():
        module.load_state_dict({name: reader.take(name) for name in shapes}, assign=True)
    module.eval().requires_grad_(False)
    served: Tower = module
    return served


_one_at_a_time = threading.Lock()


@contextmanager
def _without_weights() -> Iterator[None]:
    """Modules that this thread makes meanwhile have parameters without memory. Their buffers are computed, as
    checkpoints lack them."""
    modules: Any = torch.nn.Module
    thread = threading.get_ident()

    def without(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and threading.get_ident() == thread:
            parameter = torch.nn.Parameter(parameter.to("meta"))
        register(module, name, parameter)

    with _one_at_a_time:
        register = modules.register_parameter
        modules.register_parameter = without
        try:
            yield
        finally:
            modules.register_parameter = register


@dataclass(slots=True)
class _Pending:
    """A picture of a live sequence with tokens that are not fed yet. places: of its image tokens, in the sequence."""

    picture: Picture
    places: IntArray


def _not_as_many(one: _Pending, num_features: int) -> IllegalBatch:
    has = f"has {len(one.places)} image tokens, but {num_features} features"
    return IllegalBatch(f"a picture from token {one.picture.start} on {has}")


class Vision:
    """The pictures of live sequences. Without any, a step costs no more than a look."""

    def __init__(
        self,
        tower: Tower,
        config: Mapping[str, Any],
        dtype: torch.dtype,
        *,
        three_parts: bool = False,
        see_each_other: bool = False,
    ) -> None:
        """config: of the model, as in config.json. three_parts: its rotary positions have them. see_each_other: the
        tokens of a picture do, and one row feeds all of them."""
        self._three_parts = ThreeParts() if three_parts else None
        self._see_each_other = see_each_other
        self._merge = merge_of(config) if three_parts else 1
        self._tower, self._dtype = tower, dtype
        self._image_token = image_token_of(config)
        self._pending: dict[int, list[_Pending]] = {}
        self._features: dict[str, torch.Tensor] = {}
        """By digest; each is of a pending picture."""
        self.num_encoded = 0

    @property
    def num_kept(self) -> int:
        """Pictures whose features are kept."""
        return len(self._features)

    def apply(self, batch: Batch) -> None:
        """What the batch changes, before its rows run."""
        gone = [self._pending.pop(slot, None) for slot in batch.released] if self._pending else []
        if any(gone):
            self._drop()
        if self._three_parts is not None:
            for slot in batch.released:
                self._three_parts.remove(slot)
        for added in batch.added:
            if added.pictures:
                self._pending[added.slot] = places = self._places(added)
                if self._three_parts is not None:
                    self._three_parts.add(added.slot, [self._grid(one) for one in places])

    def planned(self, rows: FedRows, plan: StepPlan) -> StepPlan:
        """The plan with the rotary positions of these rows, and with what their pictures see."""
        if self._see_each_other and (together := self._together(rows)):
            plan = replace(plan, rows=replace(plan.rows, together=together))
        return plan if self._three_parts is None else self._three_parts.turned(rows, plan)

    def placed(self, rows: FedRows) -> Placed | None:
        """The features that these rows feed; None if they feed none. Forgets pictures that are fed to their end."""
        if not self._pending:
            return None
        places: list[IntArray] = []
        features: list[torch.Tensor] = []
        passed = False
        begins = np.cumsum(rows.ends - rows.start) - (rows.ends - rows.start)
        for row, slot in enumerate(rows.slots.tolist()):
            if slot not in self._pending:
                continue
            start, end = int(rows.start[row]), int(rows.ends[row])
            for one in self._pending[slot]:
                first, last = np.searchsorted(one.places, (start, end))
                if first < last:
                    places.append(one.places[first:last] - start + begins[row])
                    features.append(self._encoded(one)[first:last])
            rest = [one for one in self._pending[slot] if one.picture.end > end]
            passed |= len(rest) < len(self._pending[slot])
            self._pending[slot] = rest
            if not rest:
                del self._pending[slot]
        if passed:
            self._drop()
        return Placed(torch.from_numpy(np.concatenate(places)), torch.cat(features)) if places else None

    def _together(self, rows: FedRows) -> tuple[Together, ...]:
        return tuple(
            Together(row, int(one.places[0]), int(one.places[-1]) + 1)
            for row, slot in enumerate(rows.slots.tolist())
            for one in self._pending.get(slot, ())
            if rows.start[row] <= one.places[0] < rows.ends[row]
        )

    def _places(self, added: Added) -> list[_Pending]:
        tokens = np.array(added.token_ids)
        found = []
        for picture in added.pictures:
            within = np.flatnonzero(tokens[picture.start : picture.end] == self._image_token)
            found.append(_Pending(picture, within + picture.start))
        return found

    def _grid(self, one: _Pending) -> Grid:
        time, row, column = load(bytes(one.picture.pixels))["image_grid_thw"][0].tolist()
        shape = (time, row // self._merge, column // self._merge)
        if math.prod(shape) != len(one.places):
            raise _not_as_many(one, math.prod(shape))
        return Grid(int(one.places[0]), shape)

    def _encoded(self, one: _Pending) -> torch.Tensor:
        picture = one.picture
        if picture.digest not in self._features:
            pixels = load(bytes(picture.pixels))
            features = self._tower.features(
                {name: x.to(self._dtype) if x.is_floating_point() else x for name, x in pixels.items()}
            )
            self._features[picture.digest] = features
            self.num_encoded += 1
        features = self._features[picture.digest]
        if len(features) != len(one.places):
            raise _not_as_many(one, len(features))
        return features

    def _drop(self) -> None:
        """Forget features of pictures that no live sequence has to feed."""
        live = {one.picture.digest for pending in self._pending.values() for one in pending}
        self._features = {digest: features for digest, features in self._features.items() if digest in live}
