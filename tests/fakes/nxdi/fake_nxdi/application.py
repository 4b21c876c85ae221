"""The application classes: construct, compile, load, forward.

`NeuronBaseForCausalLM` is what a serving engine holds. Its life cycle leaves traces where the real one does: files of
an artifact, a compiler's working folder, cores that stay taken.
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
from transformers.modeling_outputs import CausalLMOutputWithPast

import fake_nxdi
from fake_nxdi import buckets, device, lora, platform, quantized
from fake_nxdi.ahead import run_ahead
from fake_nxdi.config import InferenceConfig, NeuronConfig
from fake_nxdi.decoder import Decoder, Head, preprocess, read_checkpoint
from fake_nxdi.parameters import check_parameters, inferred, prepare_sampling_params
from fake_nxdi.plan import CONTEXT, FUSED, SPECULATION, TOKEN, as_json, from_json, plan_of, trace
from fake_nxdi.program import Notes, Program
from fake_nxdi.submodel import Call, Submodel

COMPILED_MODEL_FILE_NAME = "model.pt"
LONG_CONTEXT = 32 * 1024


def normalize_path(path: Any) -> str:
    return os.path.join(os.path.normpath(path), "")


def is_compiled(model_path: str) -> bool:
    return os.path.isfile(model_path + COMPILED_MODEL_FILE_NAME)


class NeuronApplicationBase(torch.nn.Module):
    def __init__(self, model_path: str, config: Any = None, neuron_config: NeuronConfig | None = None) -> None:
        super().__init__()
        model_path = normalize_path(model_path)
        if config is None:
            config = self.get_config_cls().load(model_path)
        if neuron_config is not None:
            config.neuron_config = neuron_config
        if not hasattr(config, "neuron_config"):
            raise ValueError("Config must include a NeuronConfig")
        self.config = config
        self.neuron_config = config.neuron_config
        self.fused_spec_config = config.fused_spec_config
        self.on_device_sampling = self.neuron_config.on_device_sampling_config is not None
        self.model_path = model_path
        self.models: list[Submodel] = []
        self.traced_model: Program | None = None
        self.is_compiled = is_compiled(model_path)
        self.is_loaded_to_neuron = False
        self.used_bytes = 0
        """The part of each core's memory that is used, once loaded."""

    @classmethod
    def get_config_cls(cls) -> Any:
        raise NotImplementedError("get_config_cls is not implemented")

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        found: type[NeuronConfig] = cls.get_config_cls().get_neuron_config_cls()
        return found

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    # Compile

    def _compile(self, folder: str, *, dry_run: bool, hook: Any) -> None:
        folder = normalize_path(folder)
        self.config.save(folder)
        work = self._work_folder()
        if not fake_nxdi.SETTINGS.compiler:
            raise FileNotFoundError(2, "No such file or directory", "neuronx-cc")
        plan = plan_of(self.config, platform.target())
        graphs = []
        for submodel in self.models:
            for index, graph in enumerate(
                trace(plan, submodel.tag, submodel.neuron_config.buckets, submodel.neuron_config.batch_size)
            ):
                graphs.append(graph)
                bucket = work / submodel.tag / f"_tp0_bk{index}"
                submodel.config.save(bucket)
                time.sleep(fake_nxdi.SETTINGS.compile_seconds)
                (bucket / "graph.neff").write_text(graph.name, encoding="utf-8")
                fake_nxdi.COUNTS.compiled += 1
        if dry_run:
            return
        Path(folder, COMPILED_MODEL_FILE_NAME).write_text(json.dumps(as_json(plan, graphs)), encoding="utf-8")
        self.shard_weights(folder, pre_shard_weights_hook=hook)
        self.is_compiled = True

    def _work_folder(self) -> Path:
        named = os.environ.get("BASE_COMPILE_WORK_DIR")
        if named is None and fake_nxdi.strict():
            fake_nxdi.refuse(
                "0.1-23", "BASE_COMPILE_WORK_DIR is not set: compilations of one machine share /tmp/nxd_model"
            )
        work = Path(named or "/tmp/nxd_model/")
        work.mkdir(parents=True, exist_ok=True)
        self.config.save(work)
        return work

    def shard_weights(self, compiled_model_path: str, debug: bool = False, pre_shard_weights_hook: Any = None) -> None:
        if pre_shard_weights_hook:
            pre_shard_weights_hook(self)
        neuron = self.neuron_config
        if neuron.skip_sharding or not neuron.save_sharded_checkpoint:
            return
        from safetensors.torch import save_file

        folder = Path(compiled_model_path, "weights")
        folder.mkdir(parents=True, exist_ok=True)
        tensors = self._checkpoint()
        for rank in range(neuron.start_rank_id, neuron.start_rank_id + neuron.local_ranks_size):
            part = {name: _shard(tensor, rank, neuron.tp_degree) for name, tensor in tensors.items()}
            save_file(part, folder / f"tp{rank}_sharded_checkpoint.safetensors")

    def _checkpoint(self) -> dict[str, torch.Tensor]:
        named = getattr(self.config, "_name_or_path", None)
        folder = named if named and os.path.exists(named) else self.model_path
        if self.neuron_config.quantized:
            folder = self.neuron_config.quantized_checkpoints_path
            if not os.path.exists(folder):
                raise FileNotFoundError(f"Quantized checkpoint file not found: {folder}")
        if not os.path.isdir(folder):
            raise OSError(f"{folder} is not a local folder and is not a valid model identifier")
        found = self.convert_hf_to_neuron_state_dict(read_checkpoint(Path(folder)), self.config)
        if not self.neuron_config.enable_fused_speculation:
            return preprocess(self.config, found)
        fused = self.fused_spec_config
        others = read_checkpoint(Path(fused.draft_model_path))
        others = (fused.draft_model_cls or type(self)).convert_hf_to_neuron_state_dict(others, fused.draft_config)
        return preprocess(fused.draft_config, others, "draft_model.") | preprocess(self.config, found, "target_model.")

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
        return state_dict

    # Load

    def load(
        self,
        compiled_model_path: str,
        start_rank_id: int | None = None,
        local_ranks_size: int | None = None,
        skip_warmup: bool = False,
    ) -> None:
        folder = normalize_path(compiled_model_path)
        if self.neuron_config.max_context_length >= LONG_CONTEXT:
            os.environ.setdefault("NEURON_RT_EXEC_TIMEOUT", "600")
            os.environ.setdefault("NEURON_RT_DBG_SCRATCHPAD_ON_SINGLE_CORE", "1")
            os.environ.setdefault("NEURON_SCRATCHPAD_PAGE_SIZE", "1024")
        file = Path(folder, COMPILED_MODEL_FILE_NAME)
        if not file.is_file():
            raise ValueError(f"The provided filename {file} does not exist")
        try:
            plan, graphs = from_json(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(
                "PytorchStreamReader failed reading zip archive: failed finding central directory"
            ) from error
        if plan.platform != platform.device():
            raise device.nrt_error(f"nrt_load of a NEFF for {plan.platform} on {platform.device()}", 10)
        if fake_nxdi.strict() and plan != plan_of(self.config, plan.platform):
            fake_nxdi.refuse("17", f"{file} was compiled with another configuration than the one that loads it")
        weights, dtype = self._weights(folder, start_rank_id, local_ranks_size), getattr(torch, plan.dtype)
        draft = None
        if plan.draft is not None:
            own = _of_model(weights, "draft_model.")
            draft = Head(plan.draft, own, dtype, version=plan.eagle) if plan.eagle else Decoder(plan.draft, own, dtype)
            weights = _of_model(weights, "target_model.")
        decoder = Decoder(plan.decoder, weights, dtype)
        if plan.eagle == 3:
            layers = plan.decoder.layers
            decoder.taps = (1, layers // 2 - 1, layers - 4)
        num_bytes = decoder.num_bytes + (0 if draft is None else draft.num_bytes)
        self.used_bytes = (num_bytes + plan.num_cache_bytes) // plan.world_size
        first, cores = self._share(start_rank_id, local_ranks_size)
        device.DEVICE.take(cores, self.used_bytes)
        device.DEVICE.meet(first, cores, plan.world_size)
        self.traced_model = Program(plan, graphs, decoder, draft)
        for submodel in self.models:
            submodel.model = self.traced_model
        self.is_loaded_to_neuron = True
        if not (self.neuron_config.skip_warmup or skip_warmup):
            self.warmup()

    def _share(self, start: int | None, count: int | None) -> tuple[int, int]:
        """First rank of this process, and how many it has."""
        neuron = self.neuron_config
        return (
            neuron.start_rank_id if start is None else start,
            neuron.local_ranks_size if count is None else count,
        )

    def _weights(self, folder: str, start: int | None, count: int | None) -> dict[str, torch.Tensor]:
        neuron = self.neuron_config
        if not neuron.save_sharded_checkpoint:
            return self._checkpoint()
        from safetensors.torch import load_file

        first, cores = self._share(start, count)
        # Each process computes what all do, so it needs what the others have too, if they are there.
        ranks = range(first, first + cores) if cores == neuron.local_ranks_size else range(neuron.world_size)
        parts = [load_file(Path(folder, "weights", f"tp{rank}_sharded_checkpoint.safetensors")) for rank in ranks]
        return {
            name: torch.cat([part[name] for part in parts]) if _splits(name, tensor, parts) else tensor
            for name, tensor in parts[0].items()
        }

    def warmup(self) -> None:
        """Runs every graph once; an unknown one ends the load, since only RuntimeError is caught there."""
        assert self.traced_model is not None
        for submodel in self.models:
            for graph in trace(
                plan_of(self.config, platform.target()),
                submodel.tag,
                submodel.neuron_config.buckets,
                submodel.neuron_config.batch_size,
            ):
                inputs = [torch.zeros(shape, dtype=torch.int32) for shape in graph.shapes]
                inputs[1] = torch.ones(graph.shapes[1], dtype=torch.int32)
                inputs[2] = torch.ones(graph.shapes[2], dtype=torch.int32)
                inputs[3] = torch.arange(graph.rows, dtype=torch.int32)
                inputs[4] = torch.ones(graph.shapes[4], dtype=torch.float32)
                try:
                    self.traced_model.run(inputs, Notes(real=[True] * graph.rows, warm_up=True)).wait()
                except RuntimeError as error:
                    warnings.warn(
                        f"Received a {error} during warmup of {submodel.tag}. This is safe to ignore.", stacklevel=2
                    )

    def reset(self) -> None:
        pass


class NeuronBaseForCausalLM(NeuronApplicationBase):
    _model_cls: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        neuron = self.neuron_config
        self.text_config = self.config.get_text_config()
        self.vocab_size = self.text_config.vocab_size
        self.padding_side = neuron.padding_side
        self.kv_cache_populated = False
        self.async_mode = neuron.async_mode
        self.next_cpu_inputs: dict[str, torch.Tensor] | None = None
        self.prior_outputs: Any = None
        self.prior_seq_ids: torch.Tensor | None = None
        self.async_should_stop = False
        if self.async_mode:
            os.environ["NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"] = "2"
            os.environ["NEURON_RT_IO_RING_CACHE_SIZE"] = "2"
        self.default_sampling_params = prepare_sampling_params(neuron.batch_size)
        if fake_nxdi.has(8) and neuron.is_chunked_prefill:
            raise NotImplementedError("Chunked Prefill is not available in NxDI for now")
        for wanted, name in (
            (neuron.is_medusa or neuron.enable_token_tree, "heads of Medusa, and trees of drafts"),
            (neuron.padding_side != "right", "padding on the left"),
            (neuron.is_chunked_prefill, "chunked prefill"),
            (neuron.attention_dp_degree > 1 or neuron.flash_decoding_enabled, "a cache split over cores"),
        ):
            if wanted:
                raise NotImplementedError(f"the fake has no {name}")
        quantized.check(neuron)
        quantized.check_experts(self.config)
        if neuron.lora_config:
            lora.check(neuron)
            self.lora_model_manager = lora.LoraModelManager(neuron.lora_config)
        self.context_encoding_model = self._submodel(CONTEXT)
        if neuron.enable_fused_speculation:
            self._check_drafts()
            self.fused_spec_model = self._submodel(FUSED)
        elif neuron.speculation_length:
            # It has no model for single tokens then, so such a call is an AttributeError.
            self.speculation_model = self._submodel(SPECULATION)
        else:
            self.token_generation_model = self._submodel(TOKEN)
        self.models = [self.context_encoding_model, self.get_generation_model()]

    def _check_drafts(self) -> None:
        neuron, fused = self.neuron_config, self.fused_spec_config
        if fused is None:
            raise AttributeError("'NoneType' object has no attribute 'draft_config'")
        if neuron.on_device_sampling_config is None:
            raise AttributeError("'NoneType' object has no attribute 'do_sample'")
        drafting = fused.draft_config.neuron_config
        if neuron.is_eagle3 and neuron.is_prefix_caching:
            raise AssertionError("We do not yet support integration of EAGLE3 and prefix caching")
        wanted = (neuron.speculation_length, True) if neuron.enable_eagle_speculation else (0, False)
        has = drafting.speculation_length, drafting.is_eagle_draft
        if fake_nxdi.strict() and (drafting.enable_fused_speculation or has != wanted):
            fake_nxdi.refuse("3.1", "the draft's NeuronConfig is the model's, but for what the way of drafting changes")
        if fake_nxdi.strict() and neuron.is_eagle3 and not drafting.enable_eagle_draft_input_norm:
            fake_nxdi.refuse("3.6", "an EAGLE 3 head without its input norm skips both of its norms")
        if fused.draft_config.model_type == "llama" and not isinstance(drafting.attn_cls, str):
            raise KeyError(drafting.attn_cls)  # the NeuronConfig of another class

    def _submodel(self, tag: str) -> Submodel:
        config = copy.deepcopy(self.config)
        neuron = config.neuron_config
        context = tag == CONTEXT
        neuron.batch_size = neuron.ctx_batch_size if context else neuron.tkg_batch_size
        fed = 1 if tag == FUSED else neuron.speculation_length or 1
        neuron.n_active_tokens = neuron.max_context_length if context else fed
        neuron.bucket_n_active_tokens = neuron.is_prefill_stage = context
        neuron.buckets = buckets.context_buckets(neuron) if context else buckets.decode_buckets(neuron)
        return Submodel(config, tag)

    # A call

    def _forward(self, **given: Any) -> CausalLMOutputWithPast:
        device.DEVICE.start_call()
        error: BaseException | None = None
        try:
            return self._answer(given)
        except BaseException as raised:
            error = raised
            raise
        finally:
            device.DEVICE.end_call(error)

    def _answer(self, given: dict[str, Any]) -> CausalLMOutputWithPast:
        neuron = self.neuron_config
        ids, positions = given["input_ids"], given["position_ids"]
        full, computed = given["full_context_lens"], given["computed_context_lens"]
        table, slots = given["block_table"], given["slot_mapping"]
        if self.async_mode:
            self.next_cpu_inputs = self._next_inputs(given)
        mask = given["attention_mask"]
        if mask is None:
            mask = inferred_mask(positions)
        seq_ids = given["seq_ids"]
        if seq_ids is None:
            seq_ids = torch.arange(ids.shape[0])
        parameters = given["sampling_params"]
        if parameters is None:
            parameters = self.default_sampling_params
        if fake_nxdi.strict():
            self._check_call(given, seq_ids)
        if self.on_device_sampling:
            check_parameters(parameters, neuron.on_device_sampling_config.global_topk)
        parameters = inferred(parameters)
        if self.prior_seq_ids is None:
            self.prior_seq_ids = seq_ids
        prefill = bool(positions.min().item() == 0)
        context = prefill and ids.shape[-1] > 1 if neuron.is_prefix_caching else prefill
        adapters = given["adapter_ids"]
        if neuron.lora_config and prefill and ids.shape[-1] > 1:
            assert self.traced_model is not None
            adapters = self.lora_model_manager.swap(self.traced_model.seats, adapters)
        call = Call(
            ids=ids,
            mask=mask,
            positions=positions,
            seq_ids=seq_ids,
            sampling=parameters,
            adapters=torch.zeros(seq_ids.shape[0], dtype=torch.int32) if adapters is None else adapters,
            features=given.get("vision_embeddings"),
            places=given.get("vision_mask"),
            turned=given.get("rotary_position_ids"),
            deeper=given.get("deepstack_vision_embeds"),
        )
        if neuron.is_prefix_caching:
            queries = full - computed
            _, _ = queries.shape
            call = Call(**{**vars(call), "slots": slots, "table": table, "queries": queries, "computed": computed})
        outputs = run_ahead(self, call, prefill=prefill) if self.async_mode else self._model_for(call, context)(call)
        if prefill:
            self.kv_cache_populated = True
        return self._constructed(outputs)

    def _model_for(self, call: Call, context: bool) -> Submodel:
        if context:
            return self.context_encoding_model
        if self.neuron_config.enable_fused_speculation:
            return self.fused_spec_model
        verifies = self.neuron_config.speculation_length == call.ids.shape[-1]
        return self.speculation_model if verifies else self.token_generation_model

    def _next_inputs(self, given: dict[str, Any]) -> dict[str, Any]:
        """What the step after this one gets, but for its tokens."""
        ids, positions = given["input_ids"], given["position_ids"]
        full, computed, table = given["full_context_lens"], given["computed_context_lens"], given["block_table"]
        last = positions.amax(1, keepdim=True) if positions.shape[1] == ids.shape[1] else positions
        found = {"positions": last + 1, "mask": inferred_mask(last + 1)}
        if self.neuron_config.is_prefix_caching:
            following = full.clone() if given["slot_mapping"].shape[-1] != 1 else computed + 1
            found |= {"queries": full + 1 - following, "computed": following}
            if table is not None:
                found["table"] = table.clone()
        return found

    def _check_call(self, given: dict[str, Any], seq_ids: torch.Tensor) -> None:
        """What the real one takes without a word and answers wrongly."""
        neuron = self.neuron_config
        ids, positions, parameters = given["input_ids"], given["position_ids"], given["sampling_params"]
        rows = ids.shape[0]
        if positions.dim() != 2:
            return
        if parameters is not None:
            if parameters.dtype != torch.float32:
                fake_nxdi.refuse("0.1-19", f"sampling_params of {parameters.dtype} reach the graph as other numbers")
            if parameters.shape[0] < rows:
                fake_nxdi.refuse("20-10", f"{parameters.shape[0]} rows of sampling_params for {rows} rows")
            if self.on_device_sampling:
                self._check_sampling(parameters)
        at = positions.min().item()
        blocks = neuron.is_prefix_caching
        if not blocks and at == 0 and ids.shape[1] == 1 and positions.max().item() > 0:
            fake_nxdi.refuse("20-3", "a decode row at position 0: the whole batch runs as a prefill")
        if not blocks and at > 0:
            self._check_lines(seq_ids, rows)
        computed, full = given["computed_context_lens"], given["full_context_lens"]
        if blocks and ids.shape[1] == 1 and full is not None and computed is not None and full.dim() == 2:
            self._check_lengths(positions.long(), full.long(), computed.long())

    def _check_lengths(self, positions: torch.Tensor, full: torch.Tensor, computed: torch.Tensor) -> None:
        if not (torch.equal(computed, positions) and torch.equal(full, positions + 1)):
            fake_nxdi.refuse("20-15", "context lengths of a decode step are position and position + 1")

    def _check_lines(self, seq_ids: torch.Tensor, rows: int) -> None:
        if rows == self.neuron_config.tkg_batch_size and seq_ids.tolist() != list(range(rows)):
            fake_nxdi.refuse("20-1", f"a full batch with seq_ids {seq_ids.tolist()}: row i works on line i")

    def _check_sampling(self, parameters: torch.Tensor) -> None:
        config = self.neuron_config.on_device_sampling_config
        top_k, temperature = parameters[:, 0], parameters[:, 2]
        if self.neuron_config.enable_fused_speculation and not config.do_sample:
            if bool(((top_k != 1) & (temperature != 0)).any()):
                fake_nxdi.refuse("3.4", "a verification takes the likeliest tokens and ignores sampling_params")
            return
        if config.do_sample or config.dynamic:
            if bool(((top_k <= 0) & (temperature > 0)).any()):
                fake_nxdi.refuse("20-11", "top_k 0 or -1 draws uniformly from the candidates")
        elif bool(((top_k != 1) & (temperature != 0)).any()):
            fake_nxdi.refuse("6", "the graph takes the likeliest token and ignores sampling_params")

    def _constructed(self, outputs: Any) -> CausalLMOutputWithPast:
        if self.neuron_config.enable_fused_speculation:
            found = CausalLMOutputWithPast(logits=None, hidden_states=outputs, attentions=None)
            found.fused_outputs = outputs
            found.async_should_stop = self.async_should_stop
            if fake_nxdi.has(9):
                found.captured_tensors = None
            return found
        if self.on_device_sampling and self.neuron_config.output_logits:
            tokens, logits = outputs[:2][0], outputs[:2][1]
            found = CausalLMOutputWithPast(logits=logits, hidden_states=[], attentions=None)
        else:
            tokens = outputs[0] if self.async_mode and isinstance(outputs, list) else outputs
            found = CausalLMOutputWithPast(
                logits=None if self.on_device_sampling else tokens, hidden_states=tokens, attentions=None
            )
        found.tokens = tokens
        if fake_nxdi.has(9):
            found.captured_tensors = None
        return found

    def get_generation_model(self) -> Submodel:
        if self.neuron_config.enable_fused_speculation:
            return self.fused_spec_model
        return self.speculation_model if self.neuron_config.speculation_length else self.token_generation_model

    def get_required_kwargs(self) -> list[str]:
        return []

    def reset(self) -> None:
        self.kv_cache_populated = False

    @classmethod
    def get_config_cls(cls) -> type[InferenceConfig]:
        return InferenceConfig


def inferred_mask(positions: torch.Tensor) -> torch.Tensor:
    """Tokens of a prompt, or for a decode step the positions before its own."""
    assert positions is not None, "need to call forward with position_ids if attention_mask is not provided"
    rows, width = positions.shape
    if width != 1:
        return (positions >= torch.arange(width)).to(positions.dtype)
    longest = int(positions.max())
    return (positions.expand(rows, longest) - 1 >= torch.arange(longest)).to(positions.dtype)


def _of_model(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _splits(name: str, tensor: torch.Tensor, parts: list[Any]) -> bool:
    return len(parts) > 1 and tensor.dim() == 2


def _shard(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Matrices are split by rows, all else is on every rank."""
    return tensor.chunk(ranks)[rank].contiguous() if tensor.dim() == 2 else tensor.contiguous()
