"""Small caches and utterances for the tests of the store."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from runtime_py.episodes import store_index
from runtime_py.episodes.cache import EpisodeCache
from runtime_py.episodes.history import Utterance
from runtime_py.episodes.store import Store

BUNDLE = "a" * 64


def make_cache(seed: int, layers: tuple[int, ...] = (4, 6)) -> EpisodeCache:
    rng = np.random.default_rng(seed)
    sizes = [(2, rows, 8) for rows in layers]
    return EpisodeCache(
        [rng.standard_normal(size, np.float32) for size in sizes],
        [rng.standard_normal(size, np.float32) for size in sizes],
        [rng.integers(-1, 99, size[:2], np.int32) for size in sizes],
        seed,
    )


def equal(first: EpisodeCache | None, second: EpisodeCache) -> bool:
    if first is None:
        return False
    arrays = zip([*first.k, *first.v, *first.src], [*second.k, *second.v, *second.src], strict=True)
    return first.n_seen == second.n_seen and all(np.array_equal(a, b) for a, b in arrays)


def said(first: int, count: int = 3) -> list[Utterance]:
    names = ("Ana", "Béla")
    return [
        Utterance(i // 8, "8 May 2023", names[i % 2], f'utterance {i}: "quoted"\n🙂 한국', f"D1:{i}")
        for i in range(first, first + count)
    ]


def reopened(store: Store, base: Path | None = None) -> Store:
    store.close()
    store_index._checked.clear()  # as in a new process
    return Store.open(store.folder, BUNDLE, base)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def one(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path
