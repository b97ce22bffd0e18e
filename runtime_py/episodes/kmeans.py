"""k-means that gives the same bits in every language.

Only IEEE 754 float64 additions, subtractions, multiplications and divisions are used, in a fixed order and never fused;
every sum starts at +0.0 and adds its terms one by one in index order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime_py.errors import UsageError, WorkError

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]

MAX_ROUNDS = 100
STARTS = 10
_MASK = (1 << 64) - 1
# Columns worked on at once: 384 dimensions of them stay in the second-level cache.
_COLUMNS = 256


class SplitMix64:
    """Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014), with Vigna's constants.

    All arithmetic is modulo 2^64: state += 0x9E3779B97F4A7C15; z = state; z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB; the output is z ^ z >> 31.
    """

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def next_uint64(self) -> int:
        """The next 64 random bits, as 0 <= value < 2^64."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def next_double(self) -> float:
        """The next uniform number in [0, 1): the top 53 bits times 2^-53."""
        return (self.next_uint64() >> 11) * 2.0**-53


@dataclass(frozen=True)
class KMeans:
    """A clustering: centroids float64 ``[k, d]``, labels int32 ``[n]``, ``inertia`` the sum of the squared distances to
    the own centroid, ``rounds`` the Lloyd rounds of the winning start."""

    centroids: F64
    labels: I32
    inertia: float
    rounds: int


def fit_kmeans(vectors: F32, clusters: int, seed: int = 42) -> KMeans:
    """Cluster float32 ``vectors [n, d]`` into at most ``clusters`` clusters.

    Ten starts draw from one generator; the lowest inertia wins, the earlier start among equals. With fewer distinct
    vectors than ``clusters`` there are as many clusters as distinct vectors. Raises ``UsageError`` for ``clusters``
    below 1 and ``WorkError`` for vectors that are none, not a matrix, or not finite.
    """
    if clusters < 1:
        raise UsageError(f"{clusters} episodes were asked for; at least 1 is needed. Use --episodes 1 or more.")
    if vectors.ndim != 2 or 0 in vectors.shape:
        raise WorkError(
            f"Vectors of shape {list(vectors.shape)} cannot be clustered; [n, d] with n and d of at least 1 is needed. "
            "Embed at least one segment."
        )
    if not np.isfinite(vectors).all():
        row = int(np.argmin(np.isfinite(vectors).all(axis=1)))
        raise WorkError(
            f"Vector {row} holds a number that is not finite; only finite ones can be clustered. "
            "Check the embedder with `verify`, then embed the segment again."
        )
    rows = np.ascontiguousarray(vectors, np.float64)
    columns = np.ascontiguousarray(rows.T)
    generator = SplitMix64(seed)
    best: KMeans | None = None
    for _ in range(STARTS):
        found = _lloyd(rows, columns, _seed_centroids(rows, columns, clusters, generator))
        if best is None or found.inertia < best.inertia:
            best = found
    assert best is not None
    return best


def sum_rows(matrix: F64) -> F64:
    """Sum over axis 0 of C-contiguous ``[m, n]``, row after row; returns ``[n]``.

    numpy adds whole rows in order as long as a row has two or more numbers; a single column it would sum pairwise.
    """
    if matrix.shape[1] == 1:
        # accumulate starts at the first term: + 0.0 turns a sum of -0.0 into the +0.0 that the loop would give.
        return np.add.accumulate(matrix[:, 0])[-1:] + 0.0
    return np.add.reduce(matrix, axis=0)


def _squared_distances(columns: F64, centroid: F64) -> F64:
    """Squared distance of every vector to one centroid; ``columns [d, n]``, ``centroid [d]``, result ``[n]``."""
    n = columns.shape[1]
    result = np.empty(n)
    for start in range(0, n, _COLUMNS):
        difference = columns[:, start : start + _COLUMNS] - centroid[:, None]
        np.multiply(difference, difference, out=difference)
        result[start : start + _COLUMNS] = sum_rows(difference)
    return result


def _seed_centroids(rows: F64, columns: F64, clusters: int, generator: SplitMix64) -> F64:
    """k-means++ (Arthur and Vassilvitskii, SODA 2007): each further centroid is a vector, drawn with a probability
    proportional to its squared distance to the nearest one so far.

    The first is vector floor(u * n); a further one is the first vector whose running sum of squared distances exceeds
    u * total. Stops early, without a draw, when every vector coincides with a centroid.
    """
    n = rows.shape[0]
    chosen = [int(generator.next_double() * n)]
    nearest = _squared_distances(columns, rows[chosen[0]])
    while len(chosen) < clusters:
        running = np.add.accumulate(nearest)
        if running[-1] == 0.0:
            break
        drawn = int(np.searchsorted(running, generator.next_double() * running[-1], side="right"))
        # Rounding could put u * total at the total itself; then the last vector with any weight is meant.
        chosen.append(min(drawn, int(np.flatnonzero(nearest)[-1])))
        np.minimum(nearest, _squared_distances(columns, rows[chosen[-1]]), out=nearest)
    return rows[chosen]


def _lloyd(rows: F64, columns: F64, centroids: F64) -> KMeans:
    """Lloyd's rounds (means, then nearest centroid) until no label changes, at most ``MAX_ROUNDS``."""
    labels, distances = _assign(rows, columns, centroids)
    rounds = 0
    while rounds < MAX_ROUNDS:
        rounds += 1
        for j in range(len(centroids)):
            members = rows[labels == j]
            centroids[j] = sum_rows(members) / len(members)
        previous = labels
        labels, distances = _assign(rows, columns, centroids)
        if np.array_equal(labels, previous):
            break
    return KMeans(centroids, labels, float(np.add.accumulate(distances)[-1]), rounds)


def _assign(rows: F64, columns: F64, centroids: F64) -> tuple[I32, F64]:
    """Nearest centroid of every vector (the lower index among equals) and the squared distance to it.

    A centroid without vectors moves onto the vector farthest from its own centroid (the lower index among equals),
    among those that do not stand alone; lower centroids choose first. ``centroids`` is changed in place.
    """
    table = np.stack([_squared_distances(columns, centroid) for centroid in centroids])
    labels = table.argmin(axis=0).astype(np.int32)
    distances = table.min(axis=0)
    sizes = np.bincount(labels, minlength=len(centroids))
    for j in np.flatnonzero(sizes == 0):
        farthest = int(np.where(sizes[labels] > 1, distances, -1.0).argmax())
        sizes[labels[farthest]] -= 1
        sizes[j] = 1
        labels[farthest], distances[farthest] = j, 0.0
        centroids[j] = rows[farthest]
    return labels, distances
