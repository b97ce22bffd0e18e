"""The embed graph: one padded text to one unit vector, pooling and norm included."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exporter.graphs.attention import additive
from exporter.models.encoder import Encoder


class EmbedGraph(nn.Module):
    """embed(tokens int32 [1, S], n_tokens int32 [1]) -> vector float32 [hidden], L2-normalised mean of the valid rows."""

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
        # The mean's divisor cancels in the norm; the sum alone keeps one operation less to round.
        total = (x * valid.to(torch.float32)[:, None]).sum(0)
        return total / torch.clamp(torch.sqrt((total * total).sum()), min=1e-12)
