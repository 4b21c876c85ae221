"""Tiny random models that compute vectors, of each family, with the files that sentence-transformers writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
DECODER = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 96, "tie_word_embeddings": True}

FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {**SMALL, "max_position_embeddings": 64},
    # The positions of a text begin behind that of the padding token.
    "xlm-roberta": {**SMALL, "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 0},
    "qwen3": DECODER,
    "mistral": {**DECODER, "sliding_window": 5},
}


def tokenizer(folder: Path, *, ends_alone: bool, types: bool) -> int:
    """Write a tokenizer of letters; returns the size of its vocabulary. ends_alone: a text gets an end token only, as
    of decoders. types: a text of a pair is known by the type of its tokens, as of BERT."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = {token: number for number, token in enumerate([*special, *LETTERS, *(f"##{one}" for one in LETTERS)])}
    fast = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    fast.normalizer, fast.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    ends = [("[SEP]", 3)]
    fast.post_processor = (
        processors.TemplateProcessing(single="$A [SEP]", pair="$A $B [SEP]", special_tokens=ends)
        if ends_alone
        else processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    )
    names: dict[str, Any] = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    names["model_input_names"] = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    whole: Any = PreTrainedTokenizerFast
    whole(tokenizer_object=fast, model_max_length=64, **names).save_pretrained(folder)
    return len(words)


def vector_model(
    folder: Path,
    family: str = "bert",
    *,
    pooling: str | list[str] = "mean",
    dense: int = 0,
    normalises: bool = True,
    labels: int = 0,
    **more: Any,
) -> Path:
    """Write a model. labels: of one that scores pairs. dense: numbers of a layer behind the pooling; 0: it has none.
    more: fields of its config.json."""
    is_decoder = "num_key_value_heads" in FAMILIES[family]
    size = tokenizer(folder, ends_alone=is_decoder, types=family == "bert")
    torch.manual_seed(7)
    config = AutoConfig.for_model(family, vocab_size=size, **{"pad_token_id": 0, **FAMILIES[family], **more})
    if labels:
        config.num_labels = labels
        scoring: Any = AutoModelForSequenceClassification
        scoring.from_config(config).save_pretrained(folder)
        return folder
    bare: Any = AutoModel
    bare.from_config(config).save_pretrained(folder)
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normalises else [])]
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    write(folder / "modules.json", modules)
    modes, hidden = [pooling] if isinstance(pooling, str) else pooling, config.hidden_size
    write(
        folder / "1_Pooling/config.json", {"word_embedding_dimension": hidden, **{OLDER[mode]: True for mode in modes}}
    )
    if dense:
        inputs = hidden * len(modes)
        shape = {"in_features": inputs, "out_features": dense, "bias": True}
        write(folder / "2_Dense/config.json", {**shape, "activation_function": "torch.nn.modules.activation.Tanh"})
        weights = {"linear.weight": torch.randn(dense, inputs), "linear.bias": torch.randn(dense)}
        save_file(weights, folder / "2_Dense/model.safetensors")
    return folder


OLDER = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))
