"""forward() with the arguments of the emulated release, in its order."""

import fake_nxdi
import torch_xla.core.xla_model  # noqa: F401 - the real one uses it
from fake_nxdi.application import NeuronBaseForCausalLM as _Causal

from neuronx_distributed_inference.models.application_base import NeuronApplicationBase

__all__ = ["NeuronBaseForCausalLM"]


class _Since9(_Causal, NeuronApplicationBase):
    def forward(  # noqa: PLR0917
        self,
        input_ids=None,
        seq_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        sampling_params=None,
        prev_hidden=None,
        labels=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        adapter_ids=None,
        medusa_args=None,
        return_dict=None,
        llava_args=[],  # noqa: B006
        input_capture_hook=None,
        tensor_capture_hook=None,
        slot_mapping=None,
        block_table=None,
        full_context_lens=None,
        computed_context_lens=None,
        tf_args=None,
    ):
        return self._forward(
            input_ids=input_ids,
            seq_ids=seq_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            sampling_params=sampling_params,
            adapter_ids=adapter_ids,
            slot_mapping=slot_mapping,
            block_table=block_table,
            full_context_lens=full_context_lens,
            computed_context_lens=computed_context_lens,
        )


class _Until8(_Causal, NeuronApplicationBase):
    def forward(  # noqa: PLR0917
        self,
        input_ids=None,
        seq_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        sampling_params=None,
        prev_hidden=None,
        labels=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        adapter_ids=None,
        medusa_args=None,
        return_dict=None,
        llava_args=[],  # noqa: B006
        input_capture_hook=None,
        slot_mapping=None,
        block_table=None,
        full_context_lens=None,
        computed_context_lens=None,
        tf_args=None,
    ):
        return self._forward(
            input_ids=input_ids,
            seq_ids=seq_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            sampling_params=sampling_params,
            adapter_ids=adapter_ids,
            slot_mapping=slot_mapping,
            block_table=block_table,
            full_context_lens=full_context_lens,
            computed_context_lens=computed_context_lens,
        )


NeuronBaseForCausalLM = _Since9 if fake_nxdi.has(9) else _Until8
NeuronBaseForCausalLM.__name__ = "NeuronBaseForCausalLM"
