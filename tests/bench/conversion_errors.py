"""What converting does to weights: the table of docs/models.md, of the demo model and of layers that are as large as
those of published models.

`make conversion-errors` prints it, in some minutes. No published weights are here. Those of the layers are random:
Student's t with 5 degrees of freedom, whose tails are longer than a normal distribution's as those of trained weights
are, and rows of different size.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from neuron_runtime.backend.torch.architecture import decoder_config, tensor_shapes
from neuron_runtime.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from neuron_runtime.config import ModelSource
from neuron_runtime.conversion.converting import convert
from neuron_runtime.quantization import Kind
from neuron_runtime.record import ConversionFigures
from neuron_runtime.weights.store import Store

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
BLOCK, LARGEST = 128, 448.0
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
"""As Qwen3-FP8 and DeepSeek store weights."""
FREEDOM, SPREAD = 5.0, 0.2
"""Degrees of Student's t; and of the logarithms of the sizes of rows, the standard deviation."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a layer, by the fields of config.json."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


SHAPES = (
    Shape("Qwen3-0.6B", 1024, 3072, 16, 8, 128),
    Shape("Llama-3.2-1B", 2048, 8192, 32, 8, 64),
    Shape("Llama-3.1-8B", 4096, 14336, 32, 8, 128),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One conversion. stored: what is converted, in words."""

    model: str
    stored: str
    kind: Kind
    figures: ConversionFigures

    @property
    def cells(self) -> tuple[str, ...]:
        one, change = self.figures, "-"
        if one.perplexity is not None and one.converted_perplexity is not None:
            change = f"{one.converted_perplexity / one.perplexity - 1:+.1%}"
        return self.model, self.stored, self.kind, f"{one.layer_error:.2%}", change


HEAD = ("Weights of", "Stored", "Converted to", "Largest error of a layer", "Change of the perplexity")


def lines(shapes: Sequence[Shape] = SHAPES) -> Iterator[Line]:
    """The lines of the table; those of the demo model come first."""
    yield from _of(DEMO, "the demo model")
    for shape in shapes:
        with tempfile.TemporaryDirectory(prefix="conversion-errors-") as scratch:
            folder = write_layer(Path(scratch, "plain"), shape)
            yield from _of(folder, f"a layer as of {shape.name}")
            write_in_blocks(folder)
            yield from _of(folder, f"a layer as of {shape.name}", f"FP8 in blocks of {BLOCK}", ("fp8",))


def _of(folder: Path, name: str, stored: str = "bfloat16", kinds: Sequence[Kind] = ("int8", "fp8")) -> Iterator[Line]:
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="conversion-errors-") as store:
            source = ModelSource(uri=folder.resolve().as_uri())
            made, _ = convert(
                source, Store(Path(store)), lambda title: lambda amount: None, backend="nxdi", wanted=kind
            )
            yield Line(name, stored, kind, made.figures)


def write_layer(folder: Path, shape: Shape) -> Path:
    """A Llama of one layer with a handful of tokens: embedding and head are not converted."""
    sizes: Mapping[str, Any] = {field: getattr(shape, field) for field in shape.__slots__ if field != "name"}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "vocab_size": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **sizes,
    }
    torch.manual_seed(0)
    random = torch.distributions.StudentT(FREEDOM)
    tensors = {}
    for name, size in tensor_shapes(decoder_config(config)).items():
        if len(size) == 1:
            tensors[name] = torch.ones(size, dtype=torch.bfloat16)
            continue
        rows = torch.randn(size[0], 1).mul(SPREAD).exp() * size[1] ** -0.5
        tensors[name] = random.sample(size).mul(rows).bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    Tokenizer(WordLevel({"w0": 0}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def write_in_blocks(folder: Path) -> None:
    """Quantize the projections of such a model in its place."""
    tensors = {}
    for name, tensor in load_file(folder / WEIGHTS_FILE).items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            rows, columns = tensor.shape
            blocks = tensor.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
            scale = blocks.abs().amax(dim=(1, 3)) / LARGEST
            tensors[name] = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(rows, columns)
            tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps({**config, "quantization_config": BLOCKS}))


def main() -> None:
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for line in lines():
        print(f"| {' | '.join(line.cells)} |", flush=True)


if __name__ == "__main__":
    main()
