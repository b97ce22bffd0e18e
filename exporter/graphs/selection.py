"""Which rows stay: a total order that every engine reproduces, whatever its top-k does with ties."""

from __future__ import annotations

import torch
from torch import Tensor

_SINK = 2.0  # above every score, which is at most 1
_FREE = -1.0  # below every score


def kept_rows(scores: Tensor, valid: Tensor, sink: Tensor, budget: int) -> Tensor:
    """Indices of the kept rows, int64 ``[Hkv, budget]``, ascending (oldest first, free rows before them).

    ``scores [Hkv, S]``; ``valid`` and ``sink`` are 0/1 floats ``[Hkv, S]``. Order: sinks, then higher score, then lower position.
    Only the values of top-k are used, never its indices, because engines order equal values differently.
    """
    size = scores.shape[-1]
    priority = torch.maximum(scores * valid, sink * _SINK) + (valid - 1.0) * -_FREE
    threshold = torch.topk(priority, budget, dim=-1).values[:, budget - 1 :]
    above = (priority > threshold).to(torch.float32)
    ties = (priority == threshold).to(torch.float32)
    room = budget - above.sum(-1, keepdim=True)
    keep = above + ties * (torch.cumsum(ties, dim=-1) <= room).to(torch.float32)
    countdown = torch.arange(size, 0, -1, dtype=torch.float32)
    return (size - torch.topk(keep * countdown, budget, dim=-1).values).to(torch.int64)


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """``rows [Hkv, S, ...]`` at ``index [Hkv, M]`` -> ``[Hkv, M, ...]`` by one flat ``index_select``."""
    heads, size = rows.shape[0], rows.shape[1]
    flat = (index + torch.arange(heads, dtype=torch.int64)[:, None] * size).reshape(-1)
    return rows.reshape(heads * size, *rows.shape[2:]).index_select(0, flat).reshape(*index.shape, *rows.shape[2:])
