class NeuronQwen3VLTextForCausalLM:
    """Of the text alone; only what others ask of it."""

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict):
        state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()
