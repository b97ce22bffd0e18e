"""Configurations of the two models, independent of the file format they came from."""

from __future__ import annotations

from dataclasses import dataclass

from runtime_py.errors import WorkError


@dataclass(frozen=True)
class DecoderConfig:
    """A Llama-like decoder. ``context`` is the trained length in tokens; ``tied`` shares embedding and head."""

    architecture: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden: int
    ffn: int
    vocab_size: int
    context: int
    rope_theta: float
    norm_eps: float
    tied: bool

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise WorkError(
                f"{self.n_heads} attention heads cannot be shared by {self.n_kv_heads} KV heads; "
                "the checkpoint's configuration is damaged or of another architecture."
            )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.n_heads // self.n_kv_heads

    def inv_freq(self) -> list[float]:
        """RoPE frequencies in radians per token, ``head_dim/2`` float32 values (RoFormer, section 3.2.2)."""
        import torch

        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        return [float(f) for f in 1.0 / (self.rope_theta**exponents)]


@dataclass(frozen=True)
class EncoderConfig:
    """A BERT-like sentence encoder with mean pooling. ``positions`` is the longest input in tokens."""

    n_layers: int
    n_heads: int
    hidden: int
    ffn: int
    vocab_size: int
    positions: int
    token_types: int
    norm_eps: float
