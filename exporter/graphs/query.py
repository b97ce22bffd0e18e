"""The query graph, and with Q = 1 the decode graph: read a few tokens behind a sealed cache and a tail."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exporter.graphs.attention import PLAIN_OPS, AttentionOps, additive, cached_rows, causal
from exporter.models.decoder import Decoder, DecoderLayer
from exporter.models.rope import rotate
from runtime_py.manifest import GraphPlan


class QueryGraph(nn.Module):
    """query(tokens, n_tokens, n_seen, n_tail, cos, sin, k, v, tail_k, tail_v) -> logits, new_k, new_v.

    ``tokens int32 [1, Q]``; tables ``[Q, D/2]``; sealed ``k, v [Hkv, M_l, D]`` with rotated keys; tails ``[Hkv, R, D]``,
    left-aligned, rows at and after ``n_tail`` ignored. Returns logits ``[1, vocab]`` of the last valid token and the new rows
    ``[Hkv, Q, D]`` a layer, keys rotated. Caches are only read: three products are joined by their small logits, because
    joining the caches themselves would copy them for every token.
    """

    def __init__(self, decoder: Decoder, plan: GraphPlan, rows: int, ops: AttentionOps = PLAIN_OPS) -> None:
        super().__init__()
        self.decoder, self.plan, self.rows, self.ops = decoder, plan, rows, ops

    def forward(
        self,
        tokens: Tensor,
        n_tokens: Tensor,
        n_seen: Tensor,
        n_tail: Tensor,
        cos: Tensor,
        sin: Tensor,
        k: list[Tensor],
        v: list[Tensor],
        tail_k: list[Tensor],
        tail_v: list[Tensor],
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        plan, decoder, rows = self.plan, self.decoder, self.rows
        in_tail = torch.arange(plan.tail, dtype=torch.int32) < n_tail
        recent = torch.cat([in_tail.expand(rows, plan.tail), causal(rows, n_tokens)], dim=1)
        masks = {
            m: additive(torch.cat([cached_rows(m, n_seen).expand(rows, m), recent], dim=1)).repeat(decoder.config.group, 1)
            for m in sorted(set(plan.layer_budgets))
        }
        x = decoder.embedding(tokens[0].to(torch.int64))
        new_k: list[Tensor] = []
        new_v: list[Tensor] = []
        for layer, sealed_k, sealed_v, late_k, late_v, budget in zip(
            decoder.layers, k, v, tail_k, tail_v, plan.layer_budgets, strict=True
        ):
            assert isinstance(layer, DecoderLayer)
            q, own_k, own_v = layer.project(x)
            q, own_k = rotate(q, cos, sin), rotate(own_k, cos, sin)
            logits = torch.cat([self.ops.logits(q, part) for part in (sealed_k, late_k, own_k)], dim=-1)
            weights = torch.softmax(logits + masks[budget], dim=-1)
            end = budget + plan.tail
            attended = (
                torch.bmm(weights[:, :, :budget], sealed_v)
                + torch.bmm(weights[:, :, budget:end], late_v)
                + torch.bmm(weights[:, :, end:], own_v)
            )
            x = layer.finish(x, attended.view(q.shape))
            new_k.append(own_k)
            new_v.append(own_v)
        last = x.index_select(0, (n_tokens - 1).to(torch.int64))
        return decoder.head(decoder.norm(last)), new_k, new_v
