"""From a log to episodes: segments, clusters, medoids and prompts; and where a store begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from runtime_py.embedder import F32, Embedder
from runtime_py.episodes.cache_files import read_cache
from runtime_py.episodes.kmeans import fit_kmeans
from runtime_py.episodes.matching import medoids
from runtime_py.episodes.prompts import patched_prompt
from runtime_py.episodes.rendering import Encode
from runtime_py.episodes.segments import Segment, make_segments
from runtime_py.episodes.store import Store
from runtime_py.episodes.store_index import INDEX
from runtime_py.errors import BundleError, StoreError
from runtime_py.manifest import GraphPlan
from runtime_py.tensor_files import map_tensors

if TYPE_CHECKING:
    from runtime_py.bundle import Bundle, EpisodesFile


def cluster_store(
    store: Store,
    embedder: Embedder,
    encode: Encode,
    plan: GraphPlan,
    keep_shared: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Segment], list[int]]:
    """Cluster the store's log anew: centroids, and one unread episode a cluster with its prompt and medoids.

    Returns the segments and the episode of each. Fewer different segments than episodes give fewer episodes.
    """
    segments = make_segments(store.utterances())
    vectors = embedder.embed_documents([s.text for s in segments], progress)
    fitted = fit_kmeans(vectors, plan.episodes)
    chosen = medoids(vectors, fitted.labels, fitted.centroids, plan.medoids)
    shared = store.shared() if keep_shared else None
    with store.transaction():
        store.clear_episodes()
        store.set_shared(shared)
        store.set_centroids(fitted.centroids.astype(np.float32))
        for episode, indices in enumerate(chosen):
            prompt = patched_prompt([segments[i].text for i in indices], encode, plan.prompt)
            store.put_prompt(episode, prompt, indices)
    return segments, [int(label) for label in fitted.labels]


def add_episode(store: Store, vector: F32, prompt: Sequence[int], medoid_segments: Sequence[int]) -> None:
    """Turn the oldest queued question into an unread episode around its ``vector [d]``."""
    centroids = store.centroids()
    known = [] if centroids is None else [centroids]
    with store.transaction():
        store.put_prompt(len(store.episodes()), prompt, medoid_segments)
        store.set_centroids(np.concatenate([*known, vector[None]]))
        store.unqueue_episode()


def open_store(bundle: Bundle, folder: Path) -> Store:
    """Open the store in ``folder``, or begin one with the history and the episodes of ``bundle``.

    Raises ``StoreError`` for a store that cannot be used and ``BundleError`` for episodes that do not fit their bundle.
    """
    base, history = bundle.path / "episodes", bundle.episodes_file()
    if (folder / INDEX).exists():
        store = Store.open(folder, bundle.id, base)
    else:
        _check_base(bundle, history)
        store = Store.create(folder, bundle.id, history.speakers, base)
    try:
        if not store.utterances() and not store.episodes():
            if list(store.speakers) != history.speakers:  # not what a kill between creating and filling leaves
                raise StoreError(f"{folder} holds no utterance. Wipe it, or name another folder.")
            _begin_with(store, history)
    except BaseException:
        store.close()
        raise
    return store


def _begin_with(store: Store, history: EpisodesFile) -> None:
    with store.transaction():
        store.append(history.utterances)
        store.use_base_centroids()
        for episode, record in enumerate(history.episodes):
            store.use_base_episode(episode, record.cache, record.sealed, record.prompt, record.medoids)


def _check_base(bundle: Bundle, history: EpisodesFile) -> None:
    """Refuse caches and centroids that are sound files but not those of this manifest and these episodes."""
    folder, manifest = bundle.path / "episodes", bundle.manifest
    for record in history.episodes:
        cache = read_cache(folder / record.cache)
        if not cache.fits(manifest.shape, manifest.plan) or cache.n_seen != record.n_seen:
            raise BundleError(f"{folder / record.cache} does not fit manifest.json and episodes.json. Build the bundle again.")
    path, expected = folder / "centroids.safetensors", (len(history.episodes), manifest.embedder.dimension)
    centroids = map_tensors(path)[0].get("centroids")
    if centroids is None or (centroids.shape, centroids.dtype) != (expected, np.float32):
        raise BundleError(f"{path} does not hold float32 centroids of shape {list(expected)}. Build the bundle again.")
