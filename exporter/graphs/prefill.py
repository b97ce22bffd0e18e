"""The prefill graph: read one block, score every row with the episode's prompt, keep M_l rows a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from exporter.graphs.attention import PLAIN_OPS, AttentionOps, additive, cached_rows, causal
from exporter.graphs.selection import kept_rows, take_rows
from exporter.models.decoder import Decoder, DecoderLayer
from exporter.models.rope import rotate
from exporter.scoring.epicache import row_scores
from runtime_py.manifest import GraphPlan


@dataclass(frozen=True)
class _Masks:
    """What depends on the counts and on one layer budget M, shared by the layers that have it."""

    row_valid: Tensor  # [M+B] 0/1
    rows: Tensor  # [M+B] additive
    block: Tensor  # [G*B, M+B] additive
    prompt: Tensor  # [G*P, M+B+P] additive


@dataclass(frozen=True)
class _Rows:
    """What one layer may keep: its cached and block rows (``keys`` and ``values`` have the prompt's behind them)."""

    budget: int
    keys: Tensor  # [Hkv, M+B+P, D], before RoPE
    values: Tensor  # [Hkv, M+B+P, D]
    sources: Tensor  # [Hkv, M+B] int32
    scores: Tensor  # [Hkv, M+B]
    valid: Tensor  # [M+B] 0/1


class PrefillGraph(nn.Module):
    """prefill(tokens, prompt, n_tokens, n_prompt, n_seen, cos, sin, k, v, src) -> kept k, v, src.

    Shapes and dtypes are those of design section "Graphs": ids and counts int32, tables ``[Mmax+B+P, D/2]`` and caches float32,
    keys before RoPE and right-aligned. Padding: block tokens at and after ``n_tokens``, prompt tokens at and after ``n_prompt``.
    """

    def __init__(self, decoder: Decoder, plan: GraphPlan, ops: AttentionOps = PLAIN_OPS) -> None:
        super().__init__()
        self.decoder, self.plan, self.ops = decoder, plan, ops

    def forward(
        self,
        tokens: Tensor,
        prompt: Tensor,
        n_tokens: Tensor,
        n_prompt: Tensor,
        n_seen: Tensor,
        cos: Tensor,
        sin: Tensor,
        k: list[Tensor],
        v: list[Tensor],
        src: list[Tensor],
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        kept: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        for rows in self._read(tokens, prompt, n_tokens, n_prompt, n_seen, cos, sin, k, v, src):
            sink = (rows.sources < self.plan.n_sinks).to(torch.float32) * rows.valid
            index = kept_rows(rows.scores, rows.valid.expand(rows.scores.shape), sink, rows.budget)
            for part, values in zip(kept, (rows.keys, rows.values, rows.sources), strict=True):
                part.append(take_rows(values, index))
        return kept

    def scores(self, **inputs: Any) -> list[Tensor]:
        """The score of each cached or block row, ``[Hkv, M_l+B]`` a layer, for the inputs of ``forward``."""
        return [rows.scores for rows in self._read(**inputs)]

    def _read(
        self,
        tokens: Tensor,
        prompt: Tensor,
        n_tokens: Tensor,
        n_prompt: Tensor,
        n_seen: Tensor,
        cos: Tensor,
        sin: Tensor,
        k: list[Tensor],
        v: list[Tensor],
        src: list[Tensor],
    ) -> Iterator[_Rows]:
        """Run the layers; each gives the rows it may keep."""
        plan, decoder = self.plan, self.decoder
        prompt_valid = (torch.arange(plan.prompt, dtype=torch.int32) < n_prompt).to(torch.float32)
        block_src = torch.arange(plan.block, dtype=torch.int32) + n_seen
        masks = {m: self._masks(m, n_tokens, n_prompt, n_seen) for m in sorted(set(plan.layer_budgets))}
        x = decoder.embedding(torch.cat([tokens[0], prompt[0]]).to(torch.int64))
        for layer, cache_k, cache_v, cache_src, budget in zip(decoder.layers, k, v, src, plan.layer_budgets, strict=True):
            assert isinstance(layer, DecoderLayer)
            mask = masks[budget]
            q, new_k, new_v = layer.project(x)
            keys = torch.cat([cache_k, new_k], dim=1)
            values = torch.cat([cache_v, new_v], dim=1)
            first = plan.max_budget - budget
            attended, scores = self._attend(q, rotate(keys, cos[first:], sin[first:]), values, cos, sin, mask, prompt_valid)
            x = layer.finish(x, attended)
            sources = torch.cat([cache_src, block_src.expand(cache_src.shape[0], plan.block)], dim=1)
            yield _Rows(budget, keys, values, sources, scores, mask.row_valid)

    def _masks(self, budget: int, n_tokens: Tensor, n_prompt: Tensor, n_seen: Tensor) -> _Masks:
        block, prompt, group = self.plan.block, self.plan.prompt, self.decoder.config.group
        cached = cached_rows(budget, n_seen)
        valid = torch.cat([cached, torch.arange(block, dtype=torch.int32) < n_tokens])
        of_block = torch.cat([cached.expand(block, budget), causal(block, n_tokens)], dim=1)
        of_prompt = torch.cat([valid.expand(prompt, budget + block), causal(prompt, n_prompt)], dim=1)
        return _Masks(
            valid.to(torch.float32),
            additive(valid),
            additive(of_block).repeat(group, 1),
            additive(of_prompt).repeat(group, 1),
        )

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, mask: _Masks, prompt_valid: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention of block and prompt rows ``[Hkv, G, B+P, D]`` and the scores ``[Hkv, M+B]``.

        Two products, so that block rows never meet the prompt's keys and only the prompt's logits are kept for scoring.
        """
        plan = self.plan
        rows = mask.rows.shape[0]
        heads, group, _, dim = q.shape
        rotated = rotate(q, cos[plan.max_budget :], sin[plan.max_budget :])
        block_logits = self.ops.logits(rotated[:, :, : plan.block], keys[:, :rows]) + mask.block
        of_block = torch.bmm(torch.softmax(block_logits, dim=-1), values[:, :rows])
        prompt_logits = self.ops.logits(rotated[:, :, plan.block :], keys)
        of_prompt = torch.bmm(torch.softmax(prompt_logits + mask.prompt, dim=-1), values)
        attended = torch.cat(
            [of_block.view(heads, group, plan.block, dim), of_prompt.view(heads, group, plan.prompt, dim)], dim=2
        )
        return attended, row_scores(prompt_logits[:, :, :rows], mask.rows, prompt_valid, self.ops.row_maximum)
