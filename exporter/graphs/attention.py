"""Pieces of attention that all graphs share. Written for three runtimes: 3-D bmm, additive masks, static shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Large enough to vanish in a softmax, small enough for half precision, where -1e9 would become -inf and NaN.
MASKED = -3.0e4


def additive(valid: Tensor) -> Tensor:
    """0 where ``valid`` (bool or 0/1), ``MASKED`` elsewhere, float32."""
    return (valid.to(torch.float32) - 1.0) * -MASKED


def scaled_logits(q: Tensor, k: Tensor) -> Tensor:
    """``q [Hkv, G, T, D]`` against ``k [Hkv, S, D]`` -> ``[Hkv, G*T, S]``, scaled by D^-1/2 on the small side."""
    heads, group, rows, dim = q.shape
    return torch.bmm(q.reshape(heads, group * rows, dim) * dim**-0.5, k.transpose(1, 2))


def row_maximum(x: Tensor) -> Tensor:
    """``[H, R, S]`` -> ``[H, S]``: the largest value over the rows."""
    return x.amax(dim=1)


@dataclass(frozen=True)
class AttentionOps:
    """The operations that a target may write in another way; every version computes the same numbers."""

    logits: Callable[[Tensor, Tensor], Tensor] = scaled_logits
    row_maximum: Callable[[Tensor], Tensor] = row_maximum


PLAIN_OPS = AttentionOps()


def cached_rows(budget: int, n_seen: Tensor) -> Tensor:
    """Which of the M_l right-aligned cache rows hold a token: bool ``[M_l]`` for ``n_seen int32 [1]``."""
    return torch.arange(budget, dtype=torch.int32) >= budget - n_seen


def causal(rows: int, n_valid: Tensor) -> Tensor:
    """bool ``[rows, rows]``: row i sees valid rows j <= i."""
    index = torch.arange(rows, dtype=torch.int32)
    return torch.logical_and(index[None, :] <= index[:, None], index[None, :] < n_valid)
