"""Layer sensitivity: how much a layer's keys change when attention sees only blocks (arXiv:2509.17396, section 3.3).

The mask is the one the paper describes, applied as a boolean mask [T, T] to every head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from exporter.models.decoder import Decoder
from exporter.models.dense import dense_pass

TEXT_TOKENS = 4096
BLOCK = 1024
SINKS = 128
WINDOW = 100


def block_mask(length: int, block: int = BLOCK, sinks: int = SINKS) -> Tensor:
    """bool ``[length, length]``: causal inside a block, plus the sinks, plus half a block of overlap before it."""
    index = torch.arange(length)
    start = index // block * block - block // 2
    row, column = index[:, None], index[None, :]
    return (column <= row) & ((column >= start[:, None]) | (column < sinks))


def window_similarity(full: Tensor, blocked: Tensor, window: int = WINDOW) -> float:
    """Mean over heads and windows of the cosine between flattened keys ``[Hkv, T, D]``; a partial last window is left out."""
    heads, rows, dim = full.shape
    count = rows // window
    shape = (heads, count, window * dim)
    a, b = (t[:, : count * window].reshape(shape) for t in (full, blocked))
    return float(F.cosine_similarity(a, b, dim=-1).mean())


def sensitivities(decoder: Decoder, tokens: Tensor, progress: Callable[[str], None] = lambda _: None) -> list[float]:
    """``s_l`` in [-1, 1] for each layer, from the first 4,096 of ``tokens int64 [T]`` (or as many as the context holds).

    Lower means more sensitive: its keys suffer more from a short view. Block and sinks shrink with a shorter text.
    """
    length = min(TEXT_TOKENS, decoder.config.context, tokens.shape[0])
    block, sinks = max(length * BLOCK // TEXT_TOKENS, 2), length * SINKS // TEXT_TOKENS
    tokens = tokens[:length]
    progress(f"full attention over {length} tokens")
    full = dense_pass(decoder, tokens)
    progress(f"blocks of {block} tokens")
    blocked = dense_pass(decoder, tokens, block_mask(length, block, sinks))
    window = min(WINDOW, length)
    return [window_similarity(a, b, window) for a, b in zip(full.keys, blocked.keys, strict=True)]
