"""k-means: the same bits as a plain loop in another style, quality against scikit-learn, degenerate inputs."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime_py.episodes.kmeans import KMeans, SplitMix64, _assign, _lloyd, _seed_centroids, fit_kmeans, sum_rows
from runtime_py.errors import UsageError, WorkError

F32 = NDArray[np.float32]
Vector = list[float]


def test_splitmix64_golden_values() -> None:
    # The outputs for seed 1234567 are published test values of SplitMix64.
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    generator = SplitMix64(1234567)
    assert [generator.next_uint64() for _ in published] == published
    generator = SplitMix64(42)
    assert [generator.next_uint64() for _ in range(3)] == [0xBDD732262FEB6E95, 0x28EFE333B266F103, 0x47526757130F9F52]
    generator = SplitMix64(42)
    assert [generator.next_double() for _ in range(2)] == [
        float.fromhex("0x1.7bae644c5fd6dp-1"),
        float.fromhex("0x1.477f199d93378p-3"),
    ]


@pytest.mark.parametrize("shape", [(1, 1), (384, 1), (1000, 1), (384, 2), (3, 1000), (384, 257), (1000, 384)])
def test_sum_rows_equals_a_loop_bit_for_bit(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(shape[0])
    matrix = rng.standard_normal(shape) * 10.0 ** rng.integers(-8, 8, shape)
    matrix[:, 0] *= -1.0
    expected = []
    for column in matrix.T.tolist():
        total = 0.0
        for value in column:
            total += value
        expected.append(total)
    assert sum_rows(matrix).tobytes() == np.array(expected).tobytes()
    assert sum_rows(-np.zeros(shape)).tobytes() == np.zeros(shape[1]).tobytes()


class Slow:
    """The algorithm again, in plain Python: one number at a time, as Kotlin and Swift do it."""

    def __init__(self, vectors: F32, clusters: int) -> None:
        self.points: list[Vector] = vectors.astype(np.float64).tolist()
        self.clusters = clusters
        self.state = 42

    def uniform(self) -> float:
        self.state = (self.state + 0x9E3779B97F4A7C15) % 2**64
        z = self.state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return ((z ^ z >> 31) >> 11) / 2**53

    @staticmethod
    def distance(a: Vector, b: Vector) -> float:
        total = 0.0
        for x, y in zip(a, b, strict=True):
            total += (x - y) * (x - y)
        return total

    def seed(self) -> list[Vector]:
        chosen = [self.points[int(self.uniform() * len(self.points))]]
        while len(chosen) < self.clusters:
            weights = [min(self.distance(p, c) for c in chosen) for p in self.points]
            total = 0.0
            for weight in weights:
                total += weight
            if total == 0.0:
                break
            wanted, running = self.uniform() * total, 0.0
            for point, weight in zip(self.points, weights, strict=True):
                running += weight
                if running > wanted:
                    chosen.append(point)
                    break
        return [list(c) for c in chosen]

    def assign(self, centroids: list[Vector]) -> tuple[list[int], list[float]]:
        labels, distances = [], []
        for point in self.points:
            found = [self.distance(point, c) for c in centroids]
            labels.append(found.index(min(found)))
            distances.append(min(found))
        for j in range(len(centroids)):
            if j not in labels:
                free = [i for i in range(len(labels)) if labels.count(labels[i]) > 1]
                farthest = max(free, key=lambda i: (distances[i], -i))
                labels[farthest], distances[farthest], centroids[j] = j, 0.0, list(self.points[farthest])
        return labels, distances

    def run(self, centroids: list[Vector]) -> tuple[list[Vector], list[int], float, int]:
        labels, distances = self.assign(centroids)
        rounds = 0
        for _ in range(100):
            rounds += 1
            for j in range(len(centroids)):
                members = [p for p, label in zip(self.points, labels, strict=True) if label == j]
                for axis in range(len(members[0])):
                    total = 0.0
                    for member in members:
                        total += member[axis]
                    centroids[j][axis] = total / len(members)
            before = labels
            labels, distances = self.assign(centroids)
            if labels == before:
                break
        inertia = 0.0
        for distance in distances:
            inertia += distance
        return centroids, labels, inertia, rounds

    def fit(self) -> tuple[list[Vector], list[int], float, int]:
        runs = [self.run(self.seed()) for _ in range(10)]
        return min(runs, key=lambda run: run[2])


@pytest.mark.parametrize(
    ("n", "d", "clusters", "levels"),
    [(30, 5, 4, 0), (17, 1, 3, 0), (40, 3, 6, 3), (1, 4, 3, 0), (1, 1, 1, 0), (12, 2, 9, 2), (25, 8, 25, 0)],
)
def test_equals_a_plain_loop_bit_for_bit(n: int, d: int, clusters: int, levels: int) -> None:
    rng = np.random.default_rng(n)
    drawn = rng.integers(levels, size=(n, d)) if levels else rng.standard_normal((n, d))
    vectors = drawn.astype(np.float32)
    fast = fit_kmeans(vectors, clusters)
    centroids, labels, inertia, rounds = Slow(vectors, clusters).fit()
    assert fast.centroids.tobytes() == np.array(centroids).tobytes()
    assert fast.labels.tolist() == labels
    assert (fast.inertia, fast.rounds) == (inertia, rounds)
    assert (fast.centroids.dtype, fast.labels.dtype) == (np.float64, np.int32)


class Fixed(SplitMix64):
    """Draws given numbers, to reach the exact boundaries between vectors."""

    def __init__(self, numbers: list[float]) -> None:
        super().__init__(0)
        self.numbers = iter(numbers)

    def next_double(self) -> float:
        return next(self.numbers)


@pytest.mark.parametrize(
    ("numbers", "chosen"),
    [([0.0, 0.0], [0.0, 1.0]), ([0.0, 0.5], [0.0, -1.0]), ([0.4, 0.1], [1.0, 0.0]), ([0.9, 0.999], [-1.0, 1.0])],
)
def test_seeding_at_the_boundaries(numbers: list[float], chosen: list[float]) -> None:
    rows = np.array([[0.0], [1.0], [-1.0]])
    assert _seed_centroids(rows, np.ascontiguousarray(rows.T), 2, Fixed(numbers)).ravel().tolist() == chosen


def test_empty_cluster_takes_the_farthest_vector() -> None:
    rows = np.array([[0.0], [1.0], [9.0], [9.0], [40.0]])
    centroids = np.array([[0.0], [100.0], [20.0], [-100.0]])
    labels, distances = _assign(rows, np.ascontiguousarray(rows.T), centroids)
    # Vectors 2 and 3 are equally far from centroid 0; the lower one goes first. Vector 4 is farther, but alone.
    assert labels.tolist() == [0, 0, 1, 3, 2]
    assert centroids.tolist() == [[0.0], [9.0], [20.0], [9.0]]
    assert distances.tolist() == [0.0, 1.0, 0.0, 0.0, 400.0]


def test_lloyd_with_an_empty_cluster_equals_a_plain_loop() -> None:
    vectors = np.random.default_rng(4).standard_normal((20, 2)).astype(np.float32)
    centroids = np.array([[0.0, 0.0], [50.0, 50.0], [-60.0, 0.0]])
    rows = vectors.astype(np.float64)
    fast = _lloyd(rows, np.ascontiguousarray(rows.T), centroids.copy())
    slow = Slow(vectors, 3).run(centroids.tolist())
    assert fast.centroids.tobytes() == np.array(slow[0]).tobytes()
    assert (fast.labels.tolist(), fast.inertia, fast.rounds) == slow[1:]
    assert len(set(slow[1])) == 3


def test_golden_clustering() -> None:
    generator = SplitMix64(7)
    vectors = np.array([[generator.next_double() for _ in range(3)] for _ in range(12)], np.float32)
    found = fit_kmeans(vectors, 3)
    assert found.labels.tolist() == [1, 2, 2, 1, 0, 0, 0, 1, 0, 0, 2, 1]
    assert found.inertia.hex() == "0x1.47d3e5aaab37bp+0"
    assert found.centroids[0, 0].hex() == "0x1.5ba62f0000000p-1"


def unit_rows(matrix: np.ndarray) -> F32:
    return (matrix / np.linalg.norm(matrix, axis=1, keepdims=True)).astype(np.float32)


def datasets() -> list[tuple[str, F32, int]]:
    rng = np.random.default_rng(12)
    found = [("random unit", unit_rows(rng.standard_normal((200, 384))), 4)]
    found.append(("random 2-d", rng.standard_normal((300, 2)).astype(np.float32), 5))
    for clusters, spread in [(4, 0.3), (4, 1.0), (6, 0.5)]:
        centres = rng.standard_normal((clusters, 64))
        noise = spread * rng.standard_normal((240, 64))
        found.append((f"clustered {spread}", unit_rows(centres[rng.integers(clusters, size=240)] + noise), clusters))
    unequal = np.repeat(rng.standard_normal((4, 32)), [150, 40, 8, 2], axis=0)
    found.append(("unequal", unit_rows(unequal + 0.4 * rng.standard_normal(unequal.shape)), 4))
    return found


@pytest.mark.parametrize(("name", "vectors", "clusters"), datasets(), ids=lambda each: each if isinstance(each, str) else "")
def test_inertia_within_two_percent_of_scikit_learn(name: str, vectors: F32, clusters: int) -> None:
    cluster = pytest.importorskip("sklearn.cluster")
    reference = cluster.KMeans(clusters, n_init=10, random_state=0).fit(vectors.astype(np.float64))
    found = fit_kmeans(vectors, clusters)
    assert found.inertia <= 1.02 * reference.inertia_, name
    check_consistent(vectors, found)


def check_consistent(vectors: F32, found: KMeans) -> None:
    """Labels are the nearest centroids, centroids the means of their members, inertia the sum of the distances."""
    wide = vectors.astype(np.float64)
    distances = ((wide[:, None] - found.centroids[None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(distances[np.arange(len(wide)), found.labels], distances.min(axis=1), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.inertia, distances.min(axis=1).sum(), rtol=1e-9, atol=1e-12)
    for j, centroid in enumerate(found.centroids):
        np.testing.assert_allclose(centroid, wide[found.labels == j].mean(axis=0), rtol=1e-9, atol=1e-12)


def test_same_result_again_and_another_with_another_seed() -> None:
    vectors = np.random.default_rng(3).standard_normal((60, 8)).astype(np.float32)
    first, second, other = fit_kmeans(vectors, 4), fit_kmeans(vectors.copy(), 4), fit_kmeans(vectors, 4, seed=43)
    assert first.centroids.tobytes() == second.centroids.tobytes()
    assert first.centroids.tobytes() != other.centroids.tobytes()


def test_fewer_distinct_vectors_than_clusters() -> None:
    vectors = np.array([[1.0, 0.0]] * 5 + [[0.0, 1.0]] * 3, np.float32)
    found = fit_kmeans(vectors, 4)
    assert found.centroids.shape == (2, 2)
    assert found.inertia == 0.0
    assert len(set(found.labels[:5].tolist())) == len(set(found.labels[5:].tolist())) == 1
    assert found.labels[0] != found.labels[5]


def test_fewer_vectors_than_clusters() -> None:
    vectors = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    found = fit_kmeans(vectors, 4)
    assert sorted(found.labels.tolist()) == [0, 1, 2]
    assert found.inertia == 0.0
    np.testing.assert_array_equal(found.centroids[found.labels], vectors)
    assert fit_kmeans(np.zeros((1, 4), np.float32), 4).centroids.shape == (1, 4)


def test_column_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.random.default_rng(8).standard_normal((513, 5)).astype(np.float32)
    whole = fit_kmeans(vectors, 4)
    monkeypatch.setattr("runtime_py.episodes.kmeans._COLUMNS", 64)
    blocks = fit_kmeans(vectors, 4)
    assert whole.centroids.tobytes() == blocks.centroids.tobytes()
    assert whole.inertia == blocks.inertia


def test_what_cannot_be_clustered_is_refused() -> None:
    with pytest.raises(UsageError, match="0 episodes"):
        fit_kmeans(np.ones((3, 2), np.float32), 0)
    for shape in [(0, 4), (4, 0), (4,)]:
        with pytest.raises(WorkError, match="cannot be clustered"):
            fit_kmeans(np.ones(shape, np.float32), 2)
    vectors = np.ones((3, 2), np.float32)
    vectors[1, 1] = np.nan
    with pytest.raises(WorkError, match="Vector 1 holds"):
        fit_kmeans(vectors, 2)
