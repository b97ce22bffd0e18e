"""Which episode answers a question, which segments are nearest to it, and which segments stand for an episode.

Everything is a cosine in float64, summed in index order, so that two runtimes agree on near ties.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime_py.episodes.kmeans import F32, F64, I32, sum_rows
from runtime_py.errors import WorkError


@dataclass(frozen=True)
class Centroids:
    """Centroids of length 1, float64 ``[k, d]``; a zero centroid stays zero and matches nothing."""

    normalised: F64

    @staticmethod
    def of(centroids: F32 | F64) -> Centroids:
        """Normalise ``centroids [k, d]``. Raises ``WorkError`` when there is none, or a number is not finite."""
        if centroids.ndim != 2 or 0 in centroids.shape:
            raise WorkError(
                f"Centroids of shape {list(centroids.shape)} were given; [k, d] with k and d of at least 1 is needed. "
                "Build the episodes again."
            )
        return Centroids(_normalise(centroids, "centroid"))


@dataclass(frozen=True)
class Match:
    """The episode whose centroid is nearest to a question, and the cosine to every centroid."""

    episode: int
    similarities: list[float]


def route(question_vector: F32, centroids: Centroids) -> Match:
    """Match ``question_vector [d]`` to an episode, the lower index among equals.

    Raises ``WorkError`` when d differs or a number is not finite.
    """
    similarities = _cosines(centroids.normalised, question_vector)
    return Match(int(similarities.argmax()), similarities.tolist())


def nearest_segments(question_vector: F32, segment_vectors: F32, count: int) -> list[int]:
    """Indices of the ``count`` rows of ``segment_vectors [n, d]`` with the highest cosine to ``question_vector [d]``.

    Among equals the lower index is taken; the result is in order of time. All are returned when there are fewer.
    Raises ``WorkError`` when d differs or a number is not finite.
    """
    if count < 1 or len(segment_vectors) == 0:
        return []
    similarities = _cosines(_normalise(segment_vectors, "segment vector"), question_vector)
    return _highest(similarities, count)


def medoids(vectors: F32, labels: I32, centroids: F64, count: int = 2) -> list[list[int]]:
    """Medoid segments of every cluster: the ``count`` members nearest to its centroid by cosine, in order of time.

    ``vectors [n, d]``, ``labels [n]``, ``centroids [k, d]``. Among equals the lower index is taken; a cluster with
    fewer members gives them all. Raises ``WorkError`` when shapes do not fit or a number is not finite.
    """
    if vectors.ndim != 2 or labels.shape != vectors.shape[:1]:
        raise WorkError(
            f"{list(labels.shape)} labels were given for vectors of shape {list(vectors.shape)}; one label a vector is "
            "needed. Cluster the segments again."
        )
    normalised = _normalise(vectors, "segment vector")
    result = []
    for j, centroid in enumerate(centroids):
        members = np.flatnonzero(labels == j)
        similarities = _cosines(normalised[members], centroid)
        result.append([int(members[i]) for i in _highest(similarities, count)])
    return result


def _highest(similarities: F64, count: int) -> list[int]:
    order = np.argsort(-similarities, kind="stable")[:count]
    return sorted(int(i) for i in order)


def _cosines(normalised: F64, vector: NDArray[np.floating]) -> F64:
    """Cosine of ``vector [d]`` to every row of ``normalised [n, d]``; 0 for zero vectors."""
    if vector.shape != normalised.shape[1:]:
        raise WorkError(
            f"A vector of shape {list(vector.shape)} was compared with vectors of {normalised.shape[1]} numbers. "
            "Embed both with the bundle's embedder."
        )
    if len(normalised) == 0:
        return np.empty(0)
    unit = _normalise(vector[None, :], "vector")[0]
    return sum_rows(np.ascontiguousarray((normalised * unit).T))


def _normalise(vectors: NDArray[np.floating], what: str) -> F64:
    """float64 rows of length 1; zero rows stay zero. ``vectors [n, d]``."""
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise WorkError(f"A {what} ({int(finite.argmin())}) holds a number that is not finite. Embed its text again.")
    wide = vectors.astype(np.float64)
    if len(wide) == 0:
        return wide
    lengths = np.sqrt(sum_rows(np.ascontiguousarray((wide * wide).T)))
    return wide / np.where(lengths > 0.0, lengths, 1.0)[:, None]
