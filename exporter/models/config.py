"""Configurations of the two models, independent of the file format they came from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exporter.models.architectures import ARCHITECTURES, Architecture
from runtime_py.errors import WorkError

if TYPE_CHECKING:  # a configuration is read and printed without PyTorch
    from torch import Tensor


@dataclass(frozen=True)
class Llama3Scaling:
    """RoPE stretched as Llama 3.1 does: low frequencies divided by ``factor``, with a ramp between two wavelengths.

    ``original_context / low`` and ``original_context / high`` are those wavelengths in tokens.
    """

    factor: float
    low: float
    high: float
    original_context: int

    def scaled(self, frequencies: Tensor) -> Tensor:
        """``frequencies float32 [D/2]``, radians a token, in the order of transformers' own float operations."""
        import torch

        wavelengths = 2 * math.pi / frequencies
        slow = torch.where(wavelengths > self.original_context / self.low, frequencies / self.factor, frequencies)
        ramp = (self.original_context / wavelengths - self.low) / (self.high - self.low)
        between = (1 - ramp) * slow / self.factor + ramp * slow
        medium = ~(wavelengths < self.original_context / self.high) * ~(wavelengths > self.original_context / self.low)
        return torch.where(medium, between, slow)


@dataclass(frozen=True)
class DivisorScaling:
    """RoPE frequencies divided by these ``D/2`` numbers: how a GGUF file holds a stretched RoPE (``rope_freqs``)."""

    divisors: tuple[float, ...]

    def scaled(self, frequencies: Tensor) -> Tensor:
        """``frequencies float32 [D/2]``, radians a token."""
        import torch

        return frequencies / torch.tensor(self.divisors, dtype=torch.float32)


@dataclass(frozen=True)
class DecoderConfig:
    """A Llama-like decoder. ``context`` is the trained length in tokens; ``tied`` shares embedding and head.

    ``architecture`` is a name of ``ARCHITECTURES``. Raises ``WorkError`` for heads that cannot be shared.
    """

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
    rope_scaling: Llama3Scaling | DivisorScaling | None = None

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise WorkError(
                f"{self.n_heads} attention heads cannot be shared by {self.n_kv_heads} KV heads; "
                "the checkpoint's configuration is damaged or of another architecture."
            )

        if self.head_dim % 2:
            raise WorkError(f"A head of {self.head_dim} dimensions cannot be rotated by RoPE; an even number is needed.")

    @property
    def spec(self) -> Architecture:
        """What sets the architecture apart."""
        return ARCHITECTURES[self.architecture]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.n_heads // self.n_kv_heads

    def inv_freq(self) -> list[float]:
        """RoPE frequencies in radians per token, ``head_dim/2`` float32 values (RoFormer, section 3.2.2)."""
        import torch

        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        frequencies = 1.0 / (self.rope_theta**exponents)
        if self.rope_scaling is not None:
            frequencies = self.rope_scaling.scaled(frequencies)
        return [float(f) for f in frequencies]


@dataclass(frozen=True)
class EncoderConfig:
    """A BERT-like sentence encoder. ``positions`` is the longest input in tokens; ``pooling`` is "mean" or "cls"."""

    n_layers: int
    n_heads: int
    hidden: int
    ffn: int
    vocab_size: int
    positions: int
    token_types: int
    norm_eps: float
    pooling: str = "mean"
