"""The embed graph: one padded text to one unit vector, pooling and norm included."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exporter.graphs.attention import PLAIN_OPS, AttentionOps, additive, causal
from exporter.models.decoder import DecoderLayer
from exporter.models.decoder_encoder import DecoderEncoder, SentenceEncoder
from exporter.models.dense import rope_tables
from exporter.models.encoder import Encoder
from exporter.models.rope import rotate


def embed_graph(encoder: SentenceEncoder, length: int, ops: AttentionOps = PLAIN_OPS) -> nn.Module:
    """embed(tokens int32 [1, S], n_tokens int32 [1]) -> vector float32 [hidden], L2-normalised, for either kind of encoder."""
    return EmbedGraph(encoder, length) if isinstance(encoder, Encoder) else DecoderEmbedGraph(encoder, length, ops)


def _unit(x: Tensor) -> Tensor:
    return x / torch.clamp(torch.sqrt((x * x).sum()), min=1e-12)


class EmbedGraph(nn.Module):
    """See ``embed_graph``: the mean of a BERT's valid rows, or its first row."""

    def __init__(self, encoder: Encoder, length: int) -> None:
        super().__init__()
        self.encoder, self.length = encoder, length

    def forward(self, tokens: Tensor, n_tokens: Tensor) -> Tensor:
        encoder = self.encoder
        valid = torch.arange(self.length, dtype=torch.int32) < n_tokens
        x = encoder.tokens(tokens[0].to(torch.int64)) + encoder.positions.weight[: self.length]
        x = encoder.norm(x + encoder.types.weight[0])
        mask = additive(valid)
        for layer in encoder.layers:
            x = layer(x, mask)
        if encoder.config.pooling == "cls":
            return _unit(x[0])
        # The mean's divisor cancels in the norm; the sum alone keeps one operation less to round.
        return _unit((x * valid.to(torch.float32)[:, None]).sum(0))


class DecoderEmbedGraph(nn.Module):
    """See ``embed_graph``: the last valid row of a decoder under its causal mask."""

    def __init__(self, encoder: DecoderEncoder, length: int, ops: AttentionOps = PLAIN_OPS) -> None:
        super().__init__()
        self.encoder, self.length, self.ops = encoder, length, ops
        cos, sin = rope_tables(encoder.config, torch.arange(length))
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, tokens: Tensor, n_tokens: Tensor) -> Tensor:
        encoder, cos, sin = self.encoder, self.cos, self.sin
        assert isinstance(cos, Tensor) and isinstance(sin, Tensor)
        mask = additive(causal(self.length, n_tokens)).repeat(encoder.config.group, 1)
        x = encoder.tokens(tokens[0].to(torch.int64))
        for layer in encoder.layers:
            assert isinstance(layer, DecoderLayer)
            q, k, v = layer.project(x)
            weights = torch.softmax(self.ops.logits(rotate(q, cos, sin), rotate(k, cos, sin)) + mask, dim=-1)
            x = layer.finish(x, torch.bmm(weights, v).view(q.shape))
        last = x.index_select(0, (n_tokens - 1).to(torch.int64))
        return _unit(encoder.norm(last)[0])
