"""The sentence encoder: BERT (Sentence-BERT, arXiv:1908.10084), padded to a fixed length; the graph pools."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exporter.models.config import EncoderConfig
from exporter.models.loading import load_weights


class EncoderLayer(nn.Module):
    """Post-norm transformer layer on ``x [S, hidden]``."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.n_heads, self.head_dim = config.n_heads, config.hidden // config.n_heads
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key = nn.Linear(config.hidden, config.hidden)
        self.value = nn.Linear(config.hidden, config.hidden)
        self.output = nn.Linear(config.hidden, config.hidden)
        self.output_norm = nn.LayerNorm(config.hidden, config.norm_eps)
        self.up = nn.Linear(config.hidden, config.ffn)
        self.down = nn.Linear(config.ffn, config.hidden)
        self.down_norm = nn.LayerNorm(config.hidden, config.norm_eps)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``mask [S]`` is additive over the keys."""
        rows = x.shape[0]
        q, k, v = (
            part(x).view(rows, self.n_heads, self.head_dim).permute(1, 0, 2) for part in (self.query, self.key, self.value)
        )
        weights = torch.softmax(torch.bmm(q * self.head_dim**-0.5, k.transpose(1, 2)) + mask, dim=-1)
        attended = torch.bmm(weights, v).permute(1, 0, 2).reshape(rows, -1)
        x = self.output_norm(x + self.output(attended))
        return self.down_norm(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """Token, position and type embeddings, then layers."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.positions = nn.Embedding(config.positions, config.hidden)
        self.types = nn.Embedding(config.token_types, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, config.norm_eps)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.n_layers))
        self.requires_grad_(False)


_LAYER_NAMES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "output": "attention.output.dense",
    "output_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "down_norm": "output.LayerNorm",
}


def checkpoint_names(config: EncoderConfig) -> dict[str, str]:
    """Our parameter names -> the tensor names of a Hugging Face BERT checkpoint."""
    names = {
        "tokens.weight": "embeddings.word_embeddings.weight",
        "positions.weight": "embeddings.position_embeddings.weight",
        "types.weight": "embeddings.token_type_embeddings.weight",
    }
    for kind in ("weight", "bias"):
        names[f"norm.{kind}"] = f"embeddings.LayerNorm.{kind}"
        for layer in range(config.n_layers):
            for ours, theirs in _LAYER_NAMES.items():
                names[f"layers.{layer}.{ours}.{kind}"] = f"encoder.layer.{layer}.{theirs}.{kind}"
    return names


def load_encoder(config: EncoderConfig, tensor: Callable[[str], Tensor]) -> Encoder:
    """Build an encoder whose weights are read one by one with ``tensor(checkpoint name)``, each float32.

    Raises ``WorkError`` when a tensor does not fit ``config``.
    """
    with torch.device("meta"):
        encoder = Encoder(config)
    load_weights(encoder, checkpoint_names(config), tensor)
    return encoder.requires_grad_(False).eval()
