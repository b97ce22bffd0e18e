"""Bytes that follow from a model's shapes: its weights as a bundle stores them, and its caches on the phone."""

from __future__ import annotations

from dataclasses import dataclass

from exporter.models.config import DecoderConfig

_GROUP = 32
_CACHE_BYTES = 4  # a number in a cache: float32


@dataclass(frozen=True)
class WeightCounts:
    """Numbers in a decoder: token table, layers' linear weights, a head of its own (0 when tied), norms and biases."""

    table: int
    linear: int
    head: int
    vectors: int

    @property
    def total(self) -> int:
        """Parameters, as model cards count them."""
        return self.table + self.linear + self.head + self.vectors


def weight_counts(config: DecoderConfig) -> WeightCounts:
    """Counts for a whole decoder."""
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    linear = config.hidden * (2 * q + 2 * kv + 3 * config.ffn)
    vectors = 2 * config.hidden
    vectors += q + 2 * kv if config.spec.qkv_bias else 0
    vectors += 2 * config.head_dim if config.spec.qk_norm else 0
    table = config.vocab_size * config.hidden
    return WeightCounts(table, config.n_layers * linear, 0 if config.tied else table, config.n_layers * vectors + config.hidden)


def weight_bytes(config: DecoderConfig, weights: str) -> int:
    """Bytes of the weights in a bundle: "fp32", "int8" (ONNX) or "int4" (ExecuTorch). Graphs add about 2 % to them."""
    counts = weight_counts(config)
    vectors = 4 * counts.vectors
    if weights == "fp32":
        return 4 * (counts.table + counts.linear + counts.head) + vectors
    if weights == "int8":  # a code each and a float32 scale a group; a tied head shares the table's codes
        coded = counts.table + counts.linear + counts.head
        return coded + 4 * coded // _GROUP + vectors
    # 4 bits and a bfloat16 scale a group in the layers; table and head, tied or not, 8 bits and a float32 scale a row each.
    return counts.linear // 2 + 2 * counts.linear // _GROUP + 2 * (counts.table + 4 * config.vocab_size) + vectors


def cache_bytes(config: DecoderConfig, rows: int) -> int:
    """Keys and values of ``rows`` tokens in every layer."""
    return config.n_layers * rows * 2 * config.n_kv_heads * config.head_dim * _CACHE_BYTES


def phone_bytes(config: DecoderConfig, weights: str, budget: int, tail: int) -> int:
    """What answering holds: weights, one sealed cache of ``budget`` rows a layer on average, and the tail."""
    return weight_bytes(config, weights) + cache_bytes(config, budget + tail)
