from dataclasses import dataclass

from fake_optimum.config import NeuronConfig


@dataclass
class NxDNeuronConfig(NeuronConfig):
    prefill_chunk_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.speculation_length and self.prefill_chunk_size:
            raise ValueError("Chunked prefill is incompatible with speculative decoding")
