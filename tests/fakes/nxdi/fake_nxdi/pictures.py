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
from importlib import import_module
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
PARTS = ("vision_tower.", "vision_model.", "vision_adapter.", "multi_modal_projector.", "visual.")
COMMON = (
    *("input_ids", "attention_mask", "position_ids", "seq_ids", "sampling_params"),
    *("pixel_values", "vision_mask", "adapter_ids"),
)
"""Arguments of `forward`."""
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

        takes: tuple[str, ...] = ()
        """Arguments of `forward` that others do not have."""

        def forward(self, **given: Any) -> Any:
            known = (*COMMON, *self.takes)
            if strange := [name for name in given if name not in known]:
                raise TypeError(f"forward() got an unexpected keyword argument {strange[0]!r}")
            given = dict.fromkeys(known) | given
            return self._called(given, self._seen(given))

        def _seen(self, given: dict[str, Any]) -> dict[str, torch.Tensor]:
            """What the text's graph takes of pictures."""
            raise NotImplementedError

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
            names = ("slot_mapping", "block_table", "full_context_lens", "computed_context_lens")
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

        takes = ("image_sizes",)

        def _seen(self, given: dict[str, Any]) -> dict[str, torch.Tensor]:
            input_ids, pixel_values, image_sizes = given["input_ids"], given["pixel_values"], given["image_sizes"]
            pad_limit = self.get_padding_length(input_ids)
            if not self._checked(given, pixel_values, ("image_sizes", "vision_mask")):
                return self._blank(input_ids, pad_limit)
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
            return self._placed(given, found, pad_limit)

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

        def _seen(self, given: dict[str, Any]) -> dict[str, torch.Tensor]:
            position_ids, pixel_values = given["position_ids"], given["pixel_values"]
            prefills = bool(position_ids.min() == 0)
            neuron = self.neuron_config
            sizes = neuron.context_encoding_buckets if prefills else neuron.token_generation_buckets
            pad_limit = self.get_padding_length(sizes or neuron.buckets, position_ids)
            if not self._checked(given, pixel_values, ("vision_mask",)) or given["vision_mask"] is None:
                return self._blank(given["input_ids"], pad_limit)
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
            return self._placed(given, found, pad_limit)

    return NeuronLlama4ForCausalLM


class Qwen3VLConfig(ImageToTextConfig):
    """The text is told which layers take features, and prompts must have room for all that the encoder makes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        encoder = self.vision_config
        self.text_config.deepstack_visual_indexes = list(encoder.deepstack_visual_indexes)
        made = encoder.neuron_config.seq_len // encoder.spatial_merge_size**2
        longest = self.text_config.neuron_config.max_context_length
        assert longest >= made, f"Text model max context length {longest} must be no less than {made}"

    def get_required_attributes(self) -> list[str]:
        return ["text_config", "vision_config"]


def qwen3_vl(base: Any) -> Any:
    class NeuronQwen3VLForCausalLM(image_to_text(base)):  # type: ignore[misc]
        takes = ("image_grid_thw",)

        def __init__(self, model_path: str, config: Any) -> None:
            super().__init__(model_path, config)
            neuron = self.neuron_config
            if neuron.output_logits and neuron.on_device_sampling_config and fake_nxdi.strict():
                fake_nxdi.refuse("M12", "of tokens and logits the wrapper returns the tokens, which are taken for both")
            if not self.vision_neuron_config.fused_qkv:
                raise KeyError("blocks.0.attn.qkv_proj.q_proj.weight")
            if neuron.save_sharded_checkpoint and fake_nxdi.strict():
                fake_nxdi.refuse(
                    "M13", "positions of the encoder are read from the checkpoint, also with sharded weights"
                )
            encoder = import_module("neuronx_distributed_inference.models.qwen3_vl.modeling_qwen3_vl_vision")
            self.positions = encoder.load_state_dict(self.full_config._name_or_path)["model.visual.pos_embed.weight"]
            self.rope_deltas: torch.Tensor | None = None
            self._shifts: dict[int, int] = {}
            """By line, what the next tokens of its sequence must be turned by, for the strict checks."""

        @staticmethod
        def convert_hf_to_neuron_state_dict(state_dict: dict[str, torch.Tensor], config: Any) -> Any:
            found = {name.removeprefix("visual."): one for name, one in of_text(state_dict).items()}
            moved = ((".attn.qkv.", ".attn.qkv_proj.Wqkv."), (".attn.proj.", ".attn.o_proj."))
            for old, new in moved:
                found = {
                    name.replace(old, new) if name.startswith("blocks.") else name: one for name, one in found.items()
                }
            return found

        @staticmethod
        def update_state_dict_for_tied_weights(state_dict: dict[str, torch.Tensor]) -> None:
            raise NotImplementedError("State-dict update not implemented")

        def _checkpoint(self) -> dict[str, torch.Tensor]:
            found = super()._checkpoint()
            if getattr(self.full_config, "tie_word_embeddings", False):
                self.update_state_dict_for_tied_weights(found)
            return found

        def _vision_buckets(self, neuron: Any) -> list[int]:
            return list(neuron.buckets)

        def _encoder(self, config: Any, weights: dict[str, torch.Tensor]) -> Any:
            from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

            tower = Qwen3VLVisionModel._from_config(config.vision_config)
            tower.load_state_dict(_of_model(weights, "visual."))
            # On the host it has a table of its own.
            tower.pos_embed.weight.data = self.positions.to(tower.pos_embed.weight.dtype)
            return tower.eval()

        def get_padding_length(self, input_ids: torch.Tensor) -> int:
            for size in self.context_encoding_model.neuron_config.buckets:
                if size >= input_ids.shape[1]:
                    return int(size)
            raise Exception("No bucket found for provided input_ids!")

        def _seen(self, given: dict[str, Any]) -> dict[str, torch.Tensor]:
            ids, pixels, mask = given["input_ids"], given["pixel_values"], given["attention_mask"]
            pad_limit = self.get_padding_length(ids)
            if ids.shape[-1] == 1:
                self._checked(given, pixels, ())
                return self._turned(given) | self._blank(ids, pad_limit)
            grids = given["image_grid_thw"] if self._checked(given, pixels, ("image_grid_thw",)) else None
            if grids is None:
                positions = mask.long().cumsum(-1) - 1
                positions = positions.masked_fill(mask == 0, 1).expand(3, -1, -1)
                self.rope_deltas = positions[0].amax(-1, keepdim=True) + 1 - mask.shape[-1]
                self._shifts |= dict.fromkeys(given["seq_ids"].tolist(), 0)
                return {"rotary_position_ids": positions} | self._blank(ids, pad_limit)
            seen = self._features(given, grids, pad_limit)
            return {"rotary_position_ids": self._with_grids(given, grids)} | seen

        def _turned(self, given: dict[str, Any]) -> dict[str, torch.Tensor]:
            """Positions of a decode call: those of the newest prompt, unless somebody has set others."""
            positions, shifts = given["position_ids"], self.rope_deltas
            rows = len(positions)
            shifts = torch.zeros(rows, 1) if shifts is None else shifts.repeat_interleave(rows // len(shifts), dim=0)
            if fake_nxdi.strict():
                if rows < self.neuron_config.tkg_batch_size:
                    fake_nxdi.refuse("M9", "positions that turn are not sorted with rows that are fewer than the lines")
                called = list(zip(given["input_ids"].flatten().tolist(), positions.flatten().tolist(), strict=True))
                for row, line in enumerate(given["seq_ids"].tolist()):
                    wanted, alone = self._shifts.get(line, 0), called.count(called[row]) == 1
                    if alone and (len(shifts) != rows or int(shifts[row, 0]) != wanted):
                        fake_nxdi.refuse("M1", f"line {line} turns by {shifts[row:].flatten().tolist()}, not {wanted}")
            return {"rotary_position_ids": (positions + shifts).expand(3, -1, -1)}

        def _with_grids(self, given: dict[str, Any], grids: torch.Tensor) -> torch.Tensor:
            ids, mask = given["input_ids"], given["attention_mask"]
            kept = ids[0][mask[0] == 1]
            starts = (kept == self.full_config.vision_start_token_id).nonzero().squeeze(1)
            num_seen = int((kept[starts + 1] == self.full_config.image_token_id).sum())
            if fake_nxdi.strict() and num_seen != len(grids):
                fake_nxdi.refuse("M11", f"{num_seen} tokens before a picture, and {len(grids)} pictures")
            tokens, found, end, shift = kept.tolist(), [], 0, 0
            for _, height, width in grids[:num_seen].tolist():
                rows, columns = (one // self.vision_config.spatial_merge_size for one in (height, width))
                first = tokens.index(self.full_config.image_token_id, end)
                found.append(torch.arange(end, first).expand(3, -1) + shift)
                row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
                found.append(torch.stack((torch.zeros_like(row), row, column)).flatten(1) + first + shift)
                end, shift = first + rows * columns, shift + max(rows, columns) - rows * columns
            found.append(torch.arange(end, len(tokens)).expand(3, -1) + shift)
            positions = torch.ones(3, 1, ids.shape[1], dtype=torch.int64)
            positions[:, 0, mask[0] == 1] = torch.cat(found, dim=1)
            # It counts padding, too.
            self.rope_deltas = torch.tensor([[shift + len(tokens) - ids.shape[1]]])
            self._shifts[int(given["seq_ids"][0])] = shift
            return positions

        def _features(self, given: dict[str, Any], grids: torch.Tensor, pad_limit: int) -> dict[str, torch.Tensor]:
            pixels, largest = given["pixel_values"], self.vision_buckets[-1]
            assert len(pixels) <= largest, (
                f"Total number of image patches {len(pixels)} exceeds largest bucket ({largest})"
            )
            self._run_encoder(len(pixels), pixels)
            with torch.inference_mode():
                made = self.encoder(pixels, grid_thw=grids)
            last, deeper = made if isinstance(made, tuple) else (made.pooler_output, made.deepstack_features)
            places = torch.nonzero((given["input_ids"] == self.full_config.image_token_id).squeeze()).squeeze()
            end = int(given["position_ids"].max()) + 1
            if fake_nxdi.strict():
                if not bool(self.positions.any()):
                    fake_nxdi.refuse("M13", "the encoder has no positions")
                if int((places < end).sum()) != len(last):
                    fake_nxdi.refuse("M8", f"{int((places < end).sum())} places for {len(last)} features")
            padding = pad_limit - len(places)
            if padding == 0:
                raise UnboundLocalError("cannot access local variable 'positions_padded'")
            places = torch.cat((places, torch.full((padding,), pad_limit - 1)))
            # Behind the features there are those of the padding of the encoder's graph.
            length = self.neuron_config.seq_len
            wide = [torch.cat((one, torch.randn(max(length - len(one), 0), one.shape[1]))) for one in (last, *deeper)]
            return {
                "vision_embeddings": wide[0][None, :length],
                "vision_mask": places[None, :, None],
                "deepstack_vision_embeds": torch.stack([one[None, :length] for one in wide[1:]]),
            }

        def _blank(self, ids: torch.Tensor, pad_limit: int) -> dict[str, torch.Tensor]:
            found = super()._blank(ids, pad_limit)
            if ids.shape[-1] == 1:
                return found | {"deepstack_vision_embeds": torch.zeros(0)}
            features = torch.zeros(len(ids), self.neuron_config.seq_len, self.config.hidden_size)
            deeper = torch.stack([features for _ in self.vision_config.deepstack_visual_indexes])
            return found | {"vision_embeddings": features, "deepstack_vision_embeds": deeper}

    return NeuronQwen3VLForCausalLM


__all__ = ["ImageToTextConfig", "NeuronBaseForCausalLM", "Qwen3VLConfig", "llama4", "pixtral", "qwen3_vl"]
