"""A plain forward pass over a whole text: the reference for graphs, calibration and perplexity."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from exporter.models.config import DecoderConfig
from exporter.models.decoder import Decoder, DecoderLayer
from exporter.models.rope import rotate


@dataclass(frozen=True)
class DensePass:
    """Final hidden rows ``[T, hidden]`` after the norm; per layer the keys (after RoPE) and values ``[Hkv, T, D]``."""

    hidden: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def rope_tables(config: DecoderConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin ``[T, D/2]`` float32 for integer ``positions [T]``."""
    inv_freq = torch.tensor(config.inv_freq(), dtype=torch.float32)
    angles = positions.to(torch.float32)[:, None] * inv_freq[None, :]
    return torch.cos(angles), torch.sin(angles)


@torch.no_grad()
def dense_pass(decoder: Decoder, tokens: Tensor, allowed: Tensor | None = None) -> DensePass:
    """Attend over all of ``tokens int64 [T]`` at positions 0..T-1, causally, or where ``allowed bool [T, T]`` says."""
    cos, sin = rope_tables(decoder.config, torch.arange(tokens.shape[0]))
    x = decoder.embedding(tokens)
    keys, values = [], []
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer)
        q, k, v = layer.project(x)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        heads, group, rows, dim = q.shape
        attended = F.scaled_dot_product_attention(
            q.reshape(1, heads * group, rows, dim),
            k.repeat_interleave(group, 0)[None],
            v.repeat_interleave(group, 0)[None],
            attn_mask=allowed,
            is_causal=allowed is None,
        )
        x = layer.finish(x, attended.view(heads, group, rows, dim))
        keys.append(k)
        values.append(v)
    return DensePass(decoder.norm(x), keys, values)


@torch.no_grad()
def dense_logits(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Logits float32 ``[T, vocab]`` of full causal attention."""
    return decoder.head(dense_pass(decoder, tokens).hidden)
