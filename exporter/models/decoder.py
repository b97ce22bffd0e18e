"""The decoder as its parts: graphs decide how attention reads caches, so a layer offers projections, not a forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exporter.models.config import DecoderConfig
from exporter.models.loading import load_weights


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv:1910.07467) over the last dimension, float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight


class DecoderLayer(nn.Module):
    """One layer; T tokens come as ``x [T, hidden]``."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.n_kv_heads, self.group, self.head_dim = config.n_kv_heads, config.group, config.head_dim
        q_width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.attn_norm = RMSNorm(config.hidden, config.norm_eps)
        bias, norm = config.spec.qkv_bias, config.spec.qk_norm
        self.q_proj = nn.Linear(config.hidden, q_width, bias=bias)
        self.k_proj = nn.Linear(config.hidden, kv_width, bias=bias)
        self.v_proj = nn.Linear(config.hidden, kv_width, bias=bias)
        self.q_norm: nn.Module = RMSNorm(config.head_dim, config.norm_eps) if norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(config.head_dim, config.norm_eps) if norm else nn.Identity()
        self.o_proj = nn.Linear(q_width, config.hidden, bias=False)
        self.ffn_norm = RMSNorm(config.hidden, config.norm_eps)
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[Hkv, G, T, D]``, keys and values ``[Hkv, T, D]`` of ``x [T, hidden]``, before RoPE."""
        rows = x.shape[0]
        h = self.attn_norm(x)
        q = self.q_norm(self.q_proj(h).view(rows, self.n_kv_heads, self.group, self.head_dim)).permute(1, 2, 0, 3)
        k = self.k_norm(self.k_proj(h).view(rows, self.n_kv_heads, self.head_dim)).permute(1, 0, 2)
        v = self.v_proj(h).view(rows, self.n_kv_heads, self.head_dim).permute(1, 0, 2)
        return q, k, v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add attention ``[Hkv, G, T, D]`` and the feed-forward part to ``x [T, hidden]``."""
        x = x + self.o_proj(attended.permute(2, 0, 1, 3).reshape(x.shape[0], -1))
        h = self.ffn_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Decoder(nn.Module):
    """Embedding, layers, final norm and head, all float32."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.requires_grad_(False)


_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "q_proj.weight": "self_attn.q_proj.weight",
    "k_proj.weight": "self_attn.k_proj.weight",
    "v_proj.weight": "self_attn.v_proj.weight",
    "o_proj.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "gate_proj.weight": "mlp.gate_proj.weight",
    "up_proj.weight": "mlp.up_proj.weight",
    "down_proj.weight": "mlp.down_proj.weight",
}


def checkpoint_names(config: DecoderConfig) -> dict[str, str]:
    """Our parameter names -> the tensor names of a Hugging Face checkpoint, in order of use."""
    of_layer = dict(_LAYER_NAMES)
    if config.spec.qkv_bias:
        of_layer |= {f"{part}_proj.bias": f"self_attn.{part}_proj.bias" for part in "qkv"}
    if config.spec.qk_norm:
        of_layer |= {f"{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"}
    names = {"embedding.weight": "model.embed_tokens.weight"}
    for layer in range(config.n_layers):
        names |= {f"layers.{layer}.{ours}": f"model.layers.{layer}.{theirs}" for ours, theirs in of_layer.items()}
    names["norm.weight"] = "model.norm.weight"
    if not config.tied:
        names["head.weight"] = "lm_head.weight"
    return names


def load_decoder(config: DecoderConfig, tensor: Callable[[str], Tensor]) -> Decoder:
    """Build a decoder whose weights are read one by one with ``tensor(checkpoint name)``, each float32.

    Raises ``WorkError`` when a tensor does not fit ``config``.
    """
    with torch.device("meta"):
        decoder = Decoder(config)
    load_weights(decoder, checkpoint_names(config), tensor)
    if config.tied:
        decoder.head.weight = decoder.embedding.weight
    return decoder.requires_grad_(False).eval()
