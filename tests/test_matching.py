"""Routing, nearest segments and medoids."""

from __future__ import annotations

import numpy as np
import pytest

from runtime_py.episodes.matching import Centroids, medoids, nearest_segments, route
from runtime_py.errors import WorkError


def f32(*rows: list[float]) -> np.ndarray:
    return np.array(rows, np.float32)


def test_route_ignores_lengths_and_prefers_the_lower_index() -> None:
    centroids = Centroids.of(np.array([[10.0, 0.0], [0.0, 0.1], [0.0, 5.0]]))
    match = route(np.array([1.0, 2.0], np.float32), centroids)
    assert match.episode == 1
    np.testing.assert_allclose(match.similarities, [1 / 5**0.5, 2 / 5**0.5, 2 / 5**0.5], rtol=1e-15)
    assert route(np.array([3.0, 0.0], np.float32), centroids).episode == 0


def test_route_agrees_with_plain_cosine() -> None:
    rng = np.random.default_rng(0)
    raw, question = rng.standard_normal((5, 384)), rng.standard_normal(384).astype(np.float32)
    expected = raw @ question / np.linalg.norm(raw, axis=1) / np.linalg.norm(question.astype(np.float64))
    match = route(question, Centroids.of(raw))
    np.testing.assert_allclose(match.similarities, expected, rtol=1e-12)
    assert match.episode == expected.argmax()


def test_zero_vectors_match_nothing() -> None:
    centroids = Centroids.of(f32([0.0, 0.0], [-1.0, 0.0]))
    assert route(f32([1.0, 0.0])[0], centroids).similarities == [0.0, -1.0]
    assert route(f32([0.0, 0.0])[0], centroids).similarities == [0.0, 0.0]
    assert nearest_segments(f32([1.0, 0.0])[0], f32([0.0, 0.0], [1.0, 1.0], [-1.0, 0.0]), 2) == [0, 1]
    assert medoids(f32([0.0, 0.0], [1.0, 0.0]), np.array([0, 0], np.int32), np.zeros((1, 2)), 1) == [[0]]


def test_nearest_segments_come_in_order_of_time() -> None:
    vectors = f32([0.9, 0.1], [0.0, 1.0], [1.0, 0.0], [2.0, 0.0], [1.0, 0.0])
    question = f32([1.0, 0.0])[0]
    assert nearest_segments(question, vectors, 1) == [2]
    assert nearest_segments(question, vectors, 2) == [2, 3]
    assert nearest_segments(question, vectors, 4) == [0, 2, 3, 4]
    assert nearest_segments(question, vectors, 99) == [0, 1, 2, 3, 4]
    assert nearest_segments(question, vectors, 0) == []
    assert nearest_segments(question, np.empty((0, 2), np.float32), 3) == []


def test_medoids_are_the_nearest_members_in_order_of_time() -> None:
    vectors = f32([0.0, 1.0], [1.0, 0.3], [0.1, 1.0], [1.0, 0.0], [1.0, 0.1], [5.0, 0.5], [1.0, 0.9])
    labels = np.array([1, 0, 1, 0, 0, 0, 0], np.int32)
    centroids = np.array([[1.0, 0.1], [0.0, 1.0]])
    assert medoids(vectors, labels, centroids) == [[4, 5], [0, 2]]
    assert medoids(vectors, labels, centroids, 3) == [[3, 4, 5], [0, 2]]
    assert medoids(vectors, labels, centroids, 1) == [[4], [0]]
    assert medoids(vectors, labels, np.ones((3, 2)))[2] == []


def test_what_does_not_fit_is_refused() -> None:
    centroids = Centroids.of(np.eye(3))
    with pytest.raises(WorkError, match=r"shape \[2\] was compared with vectors of 3 numbers"):
        route(np.ones(2, np.float32), centroids)
    with pytest.raises(WorkError, match="not finite"):
        route(np.array([1.0, np.nan, 0.0], np.float32), centroids)
    with pytest.raises(WorkError, match=r"segment vector \(1\)"):
        nearest_segments(np.ones(2, np.float32), f32([1.0, 0.0], [np.inf, 0.0]), 1)
    with pytest.raises(WorkError, match="one label a vector"):
        medoids(np.ones((3, 2), np.float32), np.zeros(2, np.int32), np.eye(2))
    for shape in [(0, 3), (3,), (2, 0)]:
        with pytest.raises(WorkError, match="Centroids of shape"):
            Centroids.of(np.ones(shape))
