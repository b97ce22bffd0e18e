"""The KV caches of an episode, as the prefill graph takes and returns them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime_py.manifest import GraphPlan, ModelShape

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


@dataclass(frozen=True)
class EpisodeCache:
    """Kept rows of one episode: the truth from which everything else is derived.

    For layer l: ``k[l]`` (before RoPE) and ``v[l]`` are float32 ``[Hkv, M_l, D]``, ``src[l]`` int32 ``[Hkv, M_l]`` the index in
    the token stream of each kept token, -1 for free rows. Rows are right-aligned: free rows first, then oldest first.
    ``n_seen`` counts the tokens of the history read so far, prefix included.
    """

    k: list[F32]
    v: list[F32]
    src: list[I32]
    n_seen: int

    @staticmethod
    def empty(shape: ModelShape, plan: GraphPlan) -> EpisodeCache:
        """A cache that has seen nothing."""
        sizes = [(shape.n_kv_heads, m, shape.head_dim) for m in plan.layer_budgets]
        return EpisodeCache(
            [np.zeros(s, np.float32) for s in sizes],
            [np.zeros(s, np.float32) for s in sizes],
            [np.full(s[:2], -1, np.int32) for s in sizes],
            0,
        )

    def fits(self, shape: ModelShape, plan: GraphPlan) -> bool:
        """Whether the arrays have the shapes that these graphs take."""
        return [k.shape for k in self.k] == [(shape.n_kv_heads, m, shape.head_dim) for m in plan.layer_budgets]


@dataclass(frozen=True)
class SealedCache:
    """What query and decode read: keys rotated at their compacted positions. Usually memory-mapped and never written."""

    k: list[F32]
    v: list[F32]
    n_seen: int
