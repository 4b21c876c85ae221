"""Applications with an encoder of pictures: two programs, and what a call does with pixels.

The encoder is that of transformers, behind the sizes that were compiled. What the library pads, drops or puts in a
wrong place lies here as it does there; the strict fake refuses a call that would have it so.
"""

from __future__ import annotations

import copy
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

import fake_nxdi
from fake_nxdi import buckets, device
from fake_nxdi.application import NeuronBaseForCausalLM, _of_model, normalize_path
from fake_nxdi.config import InferenceConfig
from fake_nxdi.decoder import DROPPED, read_checkpoint

TEXT, VISION, ENCODER = "text_model", "vision_model", "vision_encoder_model"
PARTS = ("vision_tower.", "vision_model.", "vision_adapter.", "multi_modal_projector.")
LEAST_AUTOMATIC = 1024


class ImageToTextConfig(InferenceConfig):
    def __init__(self, text_neuron_config, vision_neuron_config, fused_spec_config=None, load_config=None, **kwargs):
        super().__init__(copy.deepcopy(text_neuron_config), fused_spec_config, load_config, **kwargs)
        neuron = text_neuron_config
        for name in ("is_block_kv_layout", "is_prefix_caching", "is_chunked_prefill", "is_medusa"):
            if getattr(neuron, name):
                raise ValueError(f"{type(self).__name__} does not yet support {name}.")
        if neuron.enable_fused_speculation:
            raise ValueError(f"{type(self).__name__} does not yet support fused speculation.")
        path = self._name_or_path
        self.text_config = InferenceConfig(neuron, **vars(self.text_config))
        self.text_config._name_or_path = path
        self.text_config.sees = True
        self.vision_config = InferenceConfig(vision_neuron_config, **vars(self.vision_config))


def of_text(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors under the names of a decoder, which the encoder's keep."""
    renamed = {}
    for name, tensor in state_dict.items():
        plain = name.removeprefix("language_model.").removeprefix("model.").replace(".feed_forward.", ".mlp.")
        renamed[name if _is_seen(name) else plain] = tensor
    return renamed


def image_to_text(base: Any) -> Any:
    """The base class over one with the `forward` of a release."""

    class ImageToText(base):  # type: ignore[misc]
        """The text is an application of its own, in a folder of its own."""

        def __init__(self, model_path: str, config: Any) -> None:
            self.full_config = config
            super().__init__(model_path, config.text_config)
            self.vision_config = config.vision_config
            self.vision_neuron_config = self.vision_config.neuron_config
            self.vision_buckets = self._vision_buckets(self.vision_neuron_config)
            if self.vision_neuron_config.batch_size != 1:
                raise RuntimeError("the encoder takes one prompt")
            self.encoder: Any = None

        def _vision_buckets(self, neuron: Any) -> list[int]:
            raise NotImplementedError

        # Compile and load

        def _work_folder(self) -> Path:
            work = super()._work_folder()
            (work / TEXT).mkdir(exist_ok=True)
            return work / TEXT

        def _compile(self, folder: str, *, dry_run: bool, hook: Any) -> None:
            self.full_config.save(folder)
            super()._compile(str(Path(folder, TEXT)), dry_run=dry_run, hook=hook)
            self.full_config.save(folder)
            for index, size in enumerate(self.vision_buckets):
                work = Path(os.environ["BASE_COMPILE_WORK_DIR"], VISION, ENCODER, f"_tp0_bk{index}")
                work.mkdir(parents=True, exist_ok=True)
                time.sleep(fake_nxdi.SETTINGS.compile_seconds)
                (work / "graph.neff").write_text(f"{ENCODER} {size}", encoding="utf-8")
                fake_nxdi.COUNTS.compiled += 1
            target = Path(folder, VISION)
            target.mkdir(exist_ok=True)
            (target / "model.pt").write_text(json.dumps(self._facts()), encoding="utf-8")
            if self.vision_neuron_config.save_sharded_checkpoint:
                from safetensors.torch import save_file

                (target / "weights").mkdir()
                for rank in range(self.neuron_config.world_size):
                    path = target / "weights" / f"tp{rank}_sharded_checkpoint.safetensors"
                    save_file(self._encoder_weights(), path)

        def _facts(self) -> dict[str, Any]:
            neuron = self.vision_neuron_config
            names = ("tp_degree", "world_size", "logical_nc_config")
            facts = {name: int(getattr(neuron, name)) for name in names}
            return {**facts, "buckets": self.vision_buckets, "dtype": str(neuron.torch_dtype)}

        def _encoder_weights(self) -> dict[str, torch.Tensor]:
            found = read_checkpoint(Path(self.config._name_or_path))
            # Its program drops what the text reads, as that of the text drops this.
            text = [name for name in self.convert_hf_to_neuron_state_dict(found, self.config) if not _is_seen(name)]
            warnings.warn(f"{DROPPED}{text}", stacklevel=1)
            return {name: tensor for name, tensor in found.items() if _is_seen(name)}

        @staticmethod
        def convert_hf_to_neuron_state_dict(state_dict: dict[str, torch.Tensor], config: Any) -> Any:
            return of_text(state_dict)

        def load(self, compiled_model_path: str, *args: Any, **kwargs: Any) -> None:
            folder = normalize_path(compiled_model_path)
            vision = Path(folder, VISION)
            if not (vision / "model.pt").is_file():
                raise ValueError(f"The provided filename {vision / 'model.pt'} does not exist")
            if json.loads((vision / "model.pt").read_text()) != self._facts() and fake_nxdi.strict():
                fake_nxdi.refuse("17", f"{vision} was compiled with another configuration than the one that loads it")
            super().load(str(Path(folder, TEXT)), *args, **kwargs)
            weights = self._encoder_weights() if not self.neuron_config.save_sharded_checkpoint else None
            if weights is None:
                from safetensors.torch import load_file

                weights = load_file(vision / "weights" / "tp0_sharded_checkpoint.safetensors")
            num_bytes = sum(tensor.nbytes for tensor in weights.values()) // self.neuron_config.world_size
            self.used_bytes += num_bytes
            device.DEVICE.take(self.neuron_config.world_size, num_bytes)
            self.encoder = self._encoder(AutoConfig.from_pretrained(self.model_path), weights)

        def _encoder(self, config: Any, weights: dict[str, torch.Tensor]) -> Any:
            raise NotImplementedError

        # A call

        def _run_encoder(self, count: int, pixels: torch.Tensor) -> None:
            size = next(size for size in self.vision_buckets if size >= count)
            device.DEVICE.run(f"{ENCODER} {size}", [pixels])

        def _checked(self, given: dict[str, Any], pixels: Any, names: tuple[str, ...]) -> bool:
            """Whether a call's pixels are looked at."""
            ids = given["input_ids"]
            if pixels is None:
                return False
            tensors = pixels if isinstance(pixels, list) else [pixels]
            if fake_nxdi.strict():
                if ids.shape[-1] == 1:
                    fake_nxdi.refuse("M5", "pixels in a call for decoding are dropped")
                if ids.shape[0] != 1:
                    fake_nxdi.refuse("M6", f"the encoder takes one prompt in a call, not {ids.shape[0]}")
                if all(bool(one.sum() == 0) for one in tensors):
                    fake_nxdi.refuse("M3", "pictures whose numbers sum to 0 are dropped")
                if missing := [name for name in names if given.get(name) is None]:
                    fake_nxdi.refuse("M3", f"without {missing[0]} pictures are dropped")
                if any(one.dtype != torch.float32 for one in tensors):
                    fake_nxdi.refuse("M7", f"pixels of {tensors[0].dtype}: they are cast once, from what is exact")
            return ids.shape[-1] > 1 and any(bool(one.sum() != 0) for one in tensors)

        def _placed(self, given: dict[str, Any], features: torch.Tensor, pad_limit: int) -> dict[str, torch.Tensor]:
            """Features and their places, as the graph takes them."""
            mask = given["vision_mask"]
            assert mask.dtype == torch.bool, f"Parameter `vision_mask` must be of type bool, recieved {mask.dtype}"
            places = torch.nonzero(mask.squeeze()).squeeze()
            end = int(given["position_ids"].max()) + 1
            if fake_nxdi.strict():
                if mask.shape != (1, given["input_ids"].shape[1], 1):
                    fake_nxdi.refuse("M7", f"a vision_mask of {tuple(mask.shape)}")
                if int(mask[0, :end].sum()) != len(features):
                    fake_nxdi.refuse("M8", f"{int(mask[0, :end].sum())} places for {len(features)} features")
            padding = pad_limit - len(places)
            if padding < 0:
                raise RuntimeError("Text model sequence length is not enough to handle all vision embeddings")
            if padding == 0:
                raise UnboundLocalError("cannot access local variable 'positions_padded'")
            places = torch.cat((places, torch.full((padding,), pad_limit - 1)))
            features = torch.cat((features, torch.zeros(max(pad_limit - len(features), 0), features.shape[1])))
            return {"vision_embeddings": features[None, :pad_limit], "vision_mask": places[None, :, None]}

        def _blank(self, ids: torch.Tensor, pad_limit: int) -> dict[str, torch.Tensor]:
            if ids.shape[-1] == 1:
                return {"vision_embeddings": torch.zeros(0), "vision_mask": torch.zeros(0, dtype=torch.bool)}
            rows, hidden = ids.shape[0], self.config.hidden_size
            return {
                "vision_embeddings": torch.zeros(rows, pad_limit, hidden),
                "vision_mask": torch.full((rows, pad_limit, 1), pad_limit - 1, dtype=torch.int32),
            }

        def _called(self, given: dict[str, Any], seen: dict[str, torch.Tensor]) -> Any:
            names = ("slot_mapping", "block_table", "full_context_lens", "computed_context_lens", "adapter_ids")
            answer = self._forward(**{**dict.fromkeys(names), **given, **seen})
            if not fake_nxdi.has(9):
                raise NameError("name 'tensor_capture_hook' is not defined")
            return answer

    return ImageToText


def _is_seen(name: str) -> bool:
    return name.startswith(PARTS)


def pixtral(base: Any) -> Any:
    class NeuronPixtralForCausalLM(image_to_text(base)):  # type: ignore[misc]
        def _vision_buckets(self, neuron: Any) -> list[int]:
            if neuron.enable_bucketing and neuron.buckets == [neuron.seq_len] and neuron.seq_len > LEAST_AUTOMATIC:
                return buckets.doubling(LEAST_AUTOMATIC, neuron.seq_len)
            return list(neuron.buckets)

        def _encoder(self, config: Any, weights: dict[str, torch.Tensor]) -> Any:
            from transformers.models.llava.modeling_llava import LlavaMultiModalProjector
            from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel

            tower, projector = PixtralVisionModel(config.vision_config), LlavaMultiModalProjector(config)
            tower.load_state_dict(_of_model(weights, "vision_tower."))
            projector.load_state_dict(_of_model(weights, "multi_modal_projector."))
            return tower.eval(), projector.eval()

        def get_padding_length(self, input_ids: torch.Tensor) -> int:
            for size in self.context_encoding_model.neuron_config.buckets:
                if size >= input_ids.shape[1]:
                    return int(size)
            raise Exception("No bucket found for provided input_ids!")

        def forward(  # noqa: PLR0917
            self,
            input_ids=None,
            attention_mask=None,
            position_ids=None,
            seq_ids=None,
            sampling_params=None,
            pixel_values=None,
            vision_mask=None,
            image_sizes=None,
            adapter_ids=None,
        ):
            given = {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                "seq_ids": seq_ids,
                "sampling_params": sampling_params,
                "vision_mask": vision_mask,
                "image_sizes": image_sizes,
            }
            pad_limit = self.get_padding_length(input_ids)
            if not self._checked(given, pixel_values, ("image_sizes", "vision_mask")):
                return self._called(given, self._blank(input_ids, pad_limit))
            pixels, sizes = pixel_values[0], image_sizes[0]
            pixels = pixels if pixels.dim() == 4 else pixels[None]
            sizes = sizes if sizes.dim() == 2 else sizes[None]
            assert sizes.dtype in (torch.int32, torch.int64), f"Parameter `image_sizes` must be of type int, {sizes}"
            if fake_nxdi.strict() and len(sizes) != len(pixels):
                fake_nxdi.refuse("M7", f"{len(sizes)} sizes for {len(pixels)} pictures")
            patch = self.vision_config.patch_size
            count = int((sizes // patch).prod(dim=1).sum())
            largest = self.vision_buckets[-1]
            assert count <= largest, f"Total number of image patches {count} exceeds largest bucket ({largest})"
            self._run_encoder(count, pixels)
            tower, projector = self.encoder
            with torch.inference_mode():
                found = projector(tower(pixels, image_sizes=sizes).last_hidden_state)[0]
            return self._called(given, self._placed(given, found, pad_limit))

    return NeuronPixtralForCausalLM


def llama4(base: Any) -> Any:
    class NeuronLlama4ForCausalLM(image_to_text(base)):  # type: ignore[misc]
        @staticmethod
        def convert_hf_to_neuron_state_dict(state_dict: dict[str, torch.Tensor], config: Any) -> Any:
            found = of_text(state_dict)
            return {name.replace("vision_model.vision_adapter", "vision_adapter"): one for name, one in found.items()}

        def _vision_buckets(self, neuron: Any) -> list[int]:
            if not neuron.enable_bucketing:
                return [88]
            if any(size % 2 for size in neuron.buckets):
                raise RuntimeError("the attention kernel wants an even number of chunks")
            return list(neuron.buckets)

        def _encoder(self, config: Any, weights: dict[str, torch.Tensor]) -> Any:
            from transformers.models.llama4.modeling_llama4 import Llama4MultiModalProjector, Llama4VisionModel

            tower, projector = Llama4VisionModel(config.vision_config), Llama4MultiModalProjector(config)
            tower.load_state_dict(_of_model(weights, "vision_model."))
            projector.load_state_dict(_of_model(weights, "multi_modal_projector."))
            return tower.eval(), projector.eval()

        def get_padding_length(self, buckets: list[int], position_ids: torch.Tensor) -> int:
            for size in buckets:
                if size > int(position_ids.max()):
                    return size
            raise ValueError("No bucket found for provided input_ids!")

        def forward(  # noqa: PLR0917
            self,
            input_ids=None,
            attention_mask=None,
            position_ids=None,
            seq_ids=None,
            sampling_params=None,
            pixel_values=None,
            vision_mask=None,
            adapter_ids=None,
        ):
            given = {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                "seq_ids": seq_ids,
                "sampling_params": sampling_params,
                "vision_mask": vision_mask,
            }
            prefills = bool(position_ids.min() == 0)
            neuron = self.neuron_config
            sizes = neuron.context_encoding_buckets if prefills else neuron.token_generation_buckets
            pad_limit = self.get_padding_length(sizes or neuron.buckets, position_ids)
            if not self._checked(given, pixel_values, ("vision_mask",)) or vision_mask is None:
                return self._called(given, self._blank(input_ids, pad_limit))
            config = self.vision_config
            if fake_nxdi.strict() and pixel_values.shape[1:] != (3, config.image_size, config.image_size):
                fake_nxdi.refuse("M7", f"pixels of {tuple(pixel_values.shape)}")
            count, largest = len(pixel_values), self.vision_buckets[-1]
            if count > largest:
                raise ValueError(f"num image chunks: {count} is larger than the largest bucket: {largest}")
            self._run_encoder(count, pixel_values)
            tower, projector = self.encoder
            with torch.inference_mode():
                found = projector(tower(pixel_values).last_hidden_state).flatten(0, 1)
            return self._called(given, self._placed(given, found, pad_limit))

    return NeuronLlama4ForCausalLM


__all__ = ["ImageToTextConfig", "NeuronBaseForCausalLM", "llama4", "pixtral"]
