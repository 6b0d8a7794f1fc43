"""Models of the sizes of released ones, with random weights: as fast, and at hand anywhere."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles.core import device

ShapeName = Literal["tiny", "small", "qwen3-0.6b", "qwen3-4b"]


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def num_parameters(self) -> int:
        """Matrices, the tied embedding once; norms are too few to count."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    def flops_per_token(self, sequence_length: int) -> float:
        """Forward and backward: 6 a parameter, and causal attention, of which half the scores are
        computed (Chowdhery et al., arXiv:2204.02311, appendix B)."""
        attention = 6 * sequence_length * self.num_heads * self.head_dim * self.num_layers
        return 6 * self.num_parameters + attention


SHAPES: dict[ShapeName, Shape] = {
    "tiny": Shape(64, 128, 2, 4, 2, 16, 256),
    "small": Shape(512, 1536, 12, 8, 4, 64, 32_768),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128, 151_936),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8, 128, 151_936),
}


def make_config(shape: Shape) -> Any:
    """transformers' ``Qwen3Config``."""
    from transformers import Qwen3Config

    settings = dict[str, Any](
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
    )
    return Qwen3Config(**settings)


def make_model(folder: Path, shape: Shape) -> Path:
    """Write a randomly initialised bf16 model with a tokenizer, unless it is there."""
    import torch
    from transformers import Qwen3ForCausalLM

    from scripts.made_models import make_tokenizer

    if (folder / "config.json").exists():
        return folder
    with torch.device(device.current_device()):
        model: Any = Qwen3ForCausalLM(make_config(shape))
    model.to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
