"""Which kept rows differ between two engines, and which of those were tied within float32 rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime_py.episodes.cache import EpisodeCache

# Scores of two engines differ by about 1e-5 of themselves after 30 layers. A row this close to the last kept score may fall on
# either side, in PyTorch on another processor as well: 3 of 11,520 choices did on the sample conversation.
TIE = 1e-4

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


@dataclass(frozen=True)
class KeptRows:
    """Rows that only one side kept: ``differing`` in all, ``tied`` of them by their score."""

    differing: int
    tied: int


def compare_kept(
    before: EpisodeCache, expected: EpisodeCache, found: EpisodeCache, n_sinks: int, scores: Callable[[], Sequence[F32]]
) -> KeptRows:
    """Compare what two engines kept of the cache ``before`` and one block.

    ``scores()`` gives the reference's scores ``[Hkv, M_l+B]`` a layer; it is asked only when something differs.
    """
    parts = [
        (layer, head, np.setxor1d(expected.src[layer][head], found.src[layer][head]))
        for layer in range(len(expected.src))
        for head in range(len(expected.src[layer]))
    ]
    parts = [part for part in parts if part[2].size]
    if not parts:
        return KeptRows(0, 0)
    by_layer = scores()
    tied = 0
    for layer, head, rows in parts:
        score = by_layer[layer][head]
        block = np.arange(before.n_seen, before.n_seen + len(score) - before.src[layer].shape[1])
        source = np.concatenate([before.src[layer][head], block])
        last_kept = score[np.isin(source, expected.src[layer][head]) & (source >= n_sinks)].min()
        own = score[np.isin(source, rows)]
        tied += int((np.abs(own - last_kept) <= TIE * last_kept).sum())
    return KeptRows(sum(part[2].size for part in parts), tied)
