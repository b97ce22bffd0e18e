"""Rewrites for XNNPACK: the same numbers from operations that its delegate takes."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exporter.graphs.attention import AttentionOps
from exporter.models.decoder import RMSNorm

M = TypeVar("M", bound=nn.Module)


def _logits(q: Tensor, k: Tensor) -> Tensor:
    """``scaled_logits`` with the keys on the left: XNNPACK would write out a transposed cache, here only the queries turn."""
    heads, group, rows, dim = q.shape
    queries = (q.reshape(heads, group * rows, dim) * dim**-0.5).transpose(1, 2)
    return torch.bmm(k, queries).transpose(1, 2)


def _row_maximum(x: Tensor) -> Tensor:
    """Maximum over dim 1 by halves: ``amax`` stays outside the delegate, and a whole score tensor a layer would leave it."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        joined = torch.maximum(x[:, :half], x[:, half : 2 * half])
        x = torch.maximum(joined, x[:, -1:]) if x.shape[1] % 2 else joined
    return x.squeeze(1)


XNNPACK_OPS = AttentionOps(_logits, _row_maximum)


class LinearRMSNorm(nn.Module):
    """RMSNorm whose mean is a linear layer of one row, because XNNPACK has no mean over the last dimension.

    ``eps`` is that layer's bias; both are buffers, so that quantisation leaves them alone.
    """

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        width = norm.weight.shape[0]
        self.weight = norm.weight
        self.register_buffer("mean", torch.full((1, width), 1.0 / width))
        self.register_buffer("eps", torch.tensor([norm.eps]))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.mean, Tensor) and isinstance(self.eps, Tensor)
        return x * torch.rsqrt(F.linear(x * x, self.mean, self.eps)) * self.weight


def rewritten(model: M) -> M:
    """A copy of ``model`` that shares its weights and has every RMSNorm replaced."""
    shared: dict[int, object] = {id(p): p for p in (*model.parameters(), *model.buffers())}
    result = copy.deepcopy(model, shared)
    for parent in list(result.modules()):
        for name, child in parent.named_children():
            if isinstance(child, RMSNorm):
                setattr(parent, name, LinearRMSNorm(child))
    return result
