"""A check: one number against one limit, for one graph of one target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A part of the largest magnitude; 30 layers of the default model measure 4e-6 at most.
FLOAT_LIMIT = 2e-5

# For graphs that round their activations to int8 (``TargetLowering.rounded_graphs``), with what was measured on 30 layers.
ROUNDED_WHY = "activations are rounded to int8, and engines round at slightly different points"
# KL in nats by weights. 8da4w is chaotic: embeddings changed by 1e-7 of themselves move the outputs of its own 30-layer PyTorch
# model by 0.026 on average (docs/int4.md). ONNX int8, where only query and decode round, measures 0.004.
ROUNDED_KL = {"int8": 0.02, "int4": 0.15}
# Part of the greedy choices. 8da4w makes 11 % others than itself; over 60 tokens that is 4 % more or less, three times over.
ROUNDED_CHOICES = {"int8": 0.15, "int4": 0.25}
ROUNDED_ROWS = 0.05  # part of the kept rows
ROUNDED_CACHE = 0.25  # root mean square difference as a part of the root mean square
ROUNDED_VECTOR = 5e-3  # cosine distance
ROUNDED_LAYER, ROUNDED_CENTROID = 5e-3, 0.1  # parts of the largest magnitude


@dataclass(frozen=True)
class Check:
    """``value`` must not exceed ``limit``; ``why`` says what is measured and where the limit comes from."""

    target: str
    graph: str
    name: str
    value: float
    limit: float
    why: str

    @property
    def passed(self) -> bool:
        """NaN never passes."""
        return self.value <= self.limit

    def to_json(self) -> dict[str, Any]:
        """The form of ``verify --json``; JSON has no NaN and no infinity, so ``value`` is null for them."""
        return {
            "target": self.target,
            "graph": self.graph,
            "name": self.name,
            "value": self.value if math.isfinite(self.value) else None,
            "limit": self.limit,
            "pass": self.passed,
            "why": self.why,
        }


def relative_difference(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Largest absolute difference as a part of the largest expected magnitude; NaN when there is nothing to compare.

    That is so when shapes differ, when they hold no number, and when a number is not finite.
    """
    if found.shape != expected.shape or not expected.size or not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return float("nan")
    return float(np.abs(found - expected).max() / max(float(np.abs(expected).max()), 1e-9))


def kl_divergence(expected: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """KL(expected || found) in nats of the distributions with logits ``[vocab]``."""
    p, q = (x.astype(np.float64) - x.max() for x in (expected, found))
    p, q = p - np.log(np.exp(p).sum()), q - np.log(np.exp(q).sum())
    return float((np.exp(p) * (p - q)).sum())


def worst(values: Sequence[float]) -> float:
    """The largest value; NaN if any is NaN, infinity when there is none."""
    return float(np.max(values)) if len(values) else float("inf")
