"""Rotary position embedding on the host (RoFormer, arXiv:2104.09864; half-split layout of Llama checkpoints).

The graphs take cos and sin as inputs, so that no engine computes them in half precision.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def rope_table(inv_freq: F32, positions: NDArray[np.int64]) -> tuple[F32, F32]:
    """cos and sin, each float32 ``[len(positions), D/2]``.

    The angle is the float32 product position * inv_freq, as in transformers; its cosine is taken in float64 and rounded
    once, which every language reproduces to the last bit or one beside it.
    """
    angles = positions.astype(np.float32)[:, None] * inv_freq.astype(np.float32)[None, :]
    wide = angles.astype(np.float64)
    return np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)


def rotate(keys: F32, cos: F32, sin: F32) -> F32:
    """Rotate ``keys [..., T, D]`` by tables ``[T, D/2]``; returns a new array of the same shape."""
    half = keys.shape[-1] // 2
    first, second = keys[..., :half], keys[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1, dtype=np.float32)
