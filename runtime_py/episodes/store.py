"""A history on disk that goes on: log, centroids, episodes and settings, committed together by one small file."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime_py.episodes.cache import F32, EpisodeCache
from runtime_py.episodes.cache_files import read_cache, read_sealed, write_cache, write_sealed
from runtime_py.episodes.history import Utterance, check_session_order
from runtime_py.episodes.log import append_log, read_log, write_log
from runtime_py.episodes.store_commit import Commits, State, data_name, delete_store, remove_litter
from runtime_py.episodes.store_index import (
    INDEX,
    SCHEMA_VERSION,
    EpisodeEntry,
    QueueEntry,
    SharedEntry,
    StoreIndex,
    damaged_error,
    json_bytes,
    read_index,
)
from runtime_py.episodes.store_lock import LOCK, WriterLock
from runtime_py.errors import BundleError, StoreError, UsageError
from runtime_py.files import write_atomic, writing_folder
from runtime_py.tensor_files import map_tensors, write_tensors


@dataclass(frozen=True)
class QueuedEpisode:
    """A question that asked for an episode of its own, with its embedding float32 ``[d]`` where that was kept."""

    question: str
    vector: F32 | None


class Store:
    """One open store; made by ``create`` or ``open``, and the only writer of its folder until ``close``.

    Every method that changes something is durable when it returns; inside ``with store.transaction():`` all changes
    become durable together at its end, and none of them when it raises. Methods may be called from several threads.
    They raise ``StoreError`` for a damaged file or a closed store, ``WorkError`` without space, ``UsageError`` for an
    episode that does not exist.
    """

    def __init__(self, commits: Commits, lock: WriterLock) -> None:
        self._commits, self._lock = commits, lock

    @staticmethod
    def create(folder: Path, bundle_id: str, speakers: Sequence[str], base: Path | None = None) -> Store:
        """Create an empty store for one bundle and open it. Raises ``StoreError`` when ``folder`` holds anything."""
        folder = folder.resolve()
        if folder.is_dir():
            try:
                if [path.name for path in folder.iterdir()] == [LOCK]:  # what a killed wipe leaves
                    (folder / LOCK).unlink()
                folder.rmdir()
            except OSError as error:
                raise StoreError(
                    f"{folder} cannot become a new store ({error.strerror}). Open what is there, or name another."
                ) from None
        with writing_folder(folder) as building:
            building.chmod(0o700)  # it will hold private conversations
            log = write_log(building / data_name("log", 1, ".jsonl"), ())
            index = StoreIndex(SCHEMA_VERSION, bundle_id, 1, list(speakers), log.entry)
            write_atomic(building / INDEX, index.encode())
        return Store.open(folder, bundle_id, base)

    @staticmethod
    def open(folder: Path, bundle_id: str, base: Path | None = None) -> Store:
        """Open a store; ``base`` is the episodes folder of its bundle, read only.

        What a killed writer left uncommitted is removed. Raises ``StoreError``: not a store, another bundle's, damaged
        index or log, in use by another process.
        """
        folder = folder.resolve()
        read_index(folder / INDEX)  # before the lock file is made, so that nothing is written into a stranger's folder
        lock = WriterLock(folder)
        try:
            index = read_index(folder / INDEX)
            if index.bundle_id != bundle_id:
                raise StoreError(
                    f"{folder} belongs to bundle {index.bundle_id}, not to {bundle_id}. Use it with that bundle, or "
                    "build a new one with `python -m exporter episodes --store`."
                )
            if base is None and any(entry.base for entry in index.files.values()):
                raise StoreError(f"{folder} uses files of its bundle's episodes folder. Open it with that bundle.")
            log = read_log(folder / index.log.file, index.log)
            remove_litter(folder, index)
            return Store(Commits(folder, base.resolve() if base else None, State(index, log)), lock)
        except BaseException:
            lock.release()
            raise

    def close(self) -> None:
        """Let another writer in. Arrays already given out stay valid."""
        with self._commits.threads:
            self._commits.close()
            self._lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def transaction(self) -> AbstractContextManager[None]:
        """Commit all changes of the body together; one inside another joins it."""
        return self._commits.transaction()

    @property
    def folder(self) -> Path:
        """Where the store is."""
        return self._commits.folder

    @property
    def bundle_id(self) -> str:
        """The bundle it belongs to."""
        return self._current.index.bundle_id

    @property
    def speakers(self) -> tuple[str, ...]:
        """Who speaks, in the order of the history's header."""
        return tuple(self._current.index.speakers)

    def utterances(self) -> list[Utterance]:
        """The whole log, in order."""
        return list(self._current.log.utterances)

    def episodes(self) -> list[EpisodeEntry]:
        """n_seen, prompt, medoids and file names of every episode."""
        return list(self._current.index.episodes)

    def settings(self) -> dict[str, Any]:
        """What ``set_settings`` was last given."""
        return dict(json.loads(json_bytes(self._current.index.settings)))

    def cache(self, i: int) -> EpisodeCache | None:
        """Kept rows of episode ``i`` as read-only mapped views; None when it has read nothing of its own."""
        with self._commits.threads:
            entry = self._episode(i)
            return self._map_cache(entry.cache, entry.n_seen)

    def sealed(self, i: int) -> list[F32] | None:
        """Rotated keys of episode ``i`` as read-only mapped views; None when missing, damaged or of another n_seen."""
        with self._commits.threads:
            entry, cache = self._episode(i), self.cache(i)
            if entry.sealed is None or cache is None:
                return None
            try:
                keys, n_seen = read_sealed(self._commits.checked_path(entry.sealed))
            except (StoreError, BundleError):
                return None
            fits = n_seen == entry.n_seen and [(k.shape, k.dtype) for k in keys] == [(k.shape, k.dtype) for k in cache.k]
            return keys if fits else None

    def shared(self) -> EpisodeCache | None:
        """The early cache that all episodes share, mapped."""
        with self._commits.threads:
            entry = self._current.index.shared
            return self._map_cache(entry.cache, entry.n_seen) if entry else None

    def centroids(self) -> F32 | None:
        """Centroids of the episodes, float32 ``[E, d]``, mapped."""
        with self._commits.threads:
            name = self._current.index.centroids
            return None if name is None else self._map_one(name, "centroids")

    def queued(self) -> list[QueuedEpisode]:
        """Questions that wait for an episode of their own, oldest first; a damaged vector is left out."""
        with self._commits.threads:
            found = []
            for entry in self._current.index.queue:
                vector = None
                if entry.vector is not None:
                    with contextlib.suppress(StoreError):
                        vector = self._map_one(entry.vector, "vector")
                found.append(QueuedEpisode(entry.question, vector))
            return found

    def append(self, utterances: Sequence[Utterance]) -> None:
        """Add utterances at the end of the log. Raises ``WorkError`` when their sessions go back."""
        with self.transaction():
            log = self._current.log
            _check_order((*log.utterances[-1:], *utterances), max(len(log.utterances) - 1, 0))
            if utterances:
                self._commits.set_log(append_log(self._commits.folder, log, utterances))

    def replace_log(
        self, utterances: Sequence[Utterance], keep_episodes: Collection[int] = (), keep_shared: bool = False
    ) -> None:
        """Put ``utterances`` in place of the whole log: what ``forget`` needs.

        Episodes not in ``keep_episodes`` lose cache, sealed keys, prompt and medoids, the shared cache goes unless
        kept, and so does the queue, whose questions may repeat forgotten text. Centroids stay: set new ones in the
        same transaction. Afterwards no file of the store holds the old text.
        """
        _check_order(utterances, 0)
        with self.transaction():
            self._commits.set_log(write_log(self._commits.new_path("log", ".jsonl"), utterances))
            index = self._current.index
            episodes = [e if i in keep_episodes else EpisodeEntry() for i, e in enumerate(index.episodes)]
            self._commits.change(episodes=episodes, queue=[], shared=index.shared if keep_shared else None)

    def put_episode(
        self, i: int, cache: EpisodeCache, prompt: Sequence[int] | None = None, medoids: Sequence[int] | None = None
    ) -> None:
        """Store the kept rows of episode ``i``, or of a new one after the last; its sealed keys become stale."""
        with self.transaction():
            entry = self._episode(i, new=True)
            path = self._commits.new_path(f"episode-{i}")
            self._commits.register(path, write_cache(path, cache))
            entry = dataclasses.replace(entry, cache=path.name, sealed=None, n_seen=cache.n_seen)
            self._set_episode(i, _with_prompt(entry, prompt, medoids))

    def put_prompt(self, i: int, prompt: Sequence[int], medoids: Sequence[int]) -> None:
        """Set patched prompt (token ids) and medoid segments of episode ``i``, or of a new one after the last."""
        with self.transaction():
            self._set_episode(i, _with_prompt(self._episode(i, new=True), prompt, medoids))

    def put_sealed(self, i: int, keys: Sequence[F32]) -> None:
        """Store the rotated keys made from ``cache(i)``. Raises ``UsageError`` when the shapes differ from its keys."""
        with self.transaction():
            entry, cache = self._episode(i), self.cache(i)
            shapes = [k.shape for k in keys]
            if cache is None or shapes != [k.shape for k in cache.k] or any(k.dtype != np.float32 for k in keys):
                raise UsageError(f"Sealed keys of shapes {shapes} do not fit episode {i}. Seal its own float32 keys.")
            path = self._commits.new_path(f"episode-{i}", ".sealed.safetensors")
            self._commits.register(path, write_sealed(path, keys, entry.n_seen))
            self._set_episode(i, dataclasses.replace(entry, sealed=path.name))

    def reset_episode(self, i: int) -> None:
        """Drop the caches of episode ``i``, damaged or not; it reads the log again from the start."""
        with self.transaction():
            entry = self._episode(i)
            self._set_episode(i, dataclasses.replace(entry, cache=None, sealed=None, n_seen=0))

    def clear_episodes(self) -> None:
        """Drop every episode, the centroids and the shared cache, to cluster anew."""
        with self.transaction():
            self._commits.change(episodes=[], centroids=None, shared=None)

    def set_shared(self, cache: EpisodeCache | None) -> None:
        """Store the early cache that all episodes share, or drop it."""
        with self.transaction():
            shared = None
            if cache is not None:
                path = self._commits.new_path("shared")
                self._commits.register(path, write_cache(path, cache))
                shared = SharedEntry(path.name, cache.n_seen)
            self._commits.change(shared=shared)

    def set_centroids(self, centroids: F32) -> None:
        """Store the centroids, float32 ``[E, d]``."""
        with self.transaction():
            self._commits.change(centroids=self._put_one("centroids", "centroids", centroids))

    def queue_episode(self, question: str, vector: F32 | None = None) -> None:
        """Ask for an episode around ``question``, whose embedding is ``vector`` float32 ``[d]``."""
        with self.transaction():
            name = None if vector is None else self._put_one("question", "vector", vector)
            self._commits.change(queue=[*self._current.index.queue, QueueEntry(question, name)])

    def unqueue_episode(self) -> None:
        """Take the oldest question off the queue."""
        with self.transaction():
            self._commits.change(queue=self._current.index.queue[1:])

    def set_settings(self, settings: Mapping[str, Any]) -> None:
        """Replace all settings. Raises ``UsageError`` for values that JSON does not have."""
        try:
            kept = json.loads(json_bytes(dict(settings)))
        except (TypeError, ValueError) as error:
            raise UsageError(f"Settings {settings!r} cannot be stored ({error}). Use JSON values only.") from None
        with self.transaction():
            self._commits.change(settings=kept)

    def use_base_episode(self, i: int, cache: str, sealed: str | None, prompt: Sequence[int], medoids: Sequence[int]) -> None:
        """Let episode ``i`` start from the files ``cache`` and ``sealed`` of the bundle's episodes folder."""
        with self.transaction():
            entry = self._episode(i, new=True)
            try:
                n_seen = read_cache(self._commits.adopt(cache)).n_seen
            except BundleError as error:
                raise StoreError(str(error)) from None
            if sealed is not None:
                self._commits.adopt(sealed)
            entry = dataclasses.replace(entry, cache=cache, sealed=sealed, n_seen=n_seen)
            self._set_episode(i, _with_prompt(entry, prompt, medoids))

    def use_base_centroids(self, name: str = "centroids.safetensors") -> None:
        """Use the centroids of the bundle's episodes folder."""
        with self.transaction():
            self._commits.adopt(name)
            self._commits.change(centroids=name)

    def wipe(self) -> None:
        """Delete everything in the store, and its folder. The store is closed afterwards."""
        with self._commits.threads:
            self._commits.require_open()
            self._commits.close()
            try:
                delete_store(self._commits.folder)
            finally:
                self._lock.release()

    @property
    def _current(self) -> State:
        return self._commits.current

    def _episode(self, i: int, new: bool = False) -> EpisodeEntry:
        """Entry of episode ``i``; with ``new`` also an empty one for the place after the last."""
        episodes = self._current.index.episodes
        if new and i == len(episodes):
            return EpisodeEntry()
        if not 0 <= i < len(episodes):
            raise UsageError(f"There is no episode {i}; the store has {len(episodes)}, counted from 0. Name one of them.")
        return episodes[i]

    def _set_episode(self, i: int, entry: EpisodeEntry) -> None:
        episodes = self._current.index.episodes
        self._commits.change(episodes=[*episodes[:i], entry, *episodes[i + 1 :]])

    def _map_cache(self, name: str | None, n_seen: int) -> EpisodeCache | None:
        if name is None:
            return None
        path = self._commits.checked_path(name)
        try:
            cache = read_cache(path)
        except BundleError as error:
            raise StoreError(str(error)) from None
        if cache.n_seen != n_seen:
            raise damaged_error(path, f"its n_seen is {cache.n_seen}, the index says {n_seen}")
        return cache

    def _put_one(self, stem: str, tensor: str, array: F32) -> str:
        path = self._commits.new_path(stem)
        return self._commits.register(path, write_tensors(path, {tensor: np.asarray(array, np.float32)}, {}))

    def _map_one(self, name: str, tensor: str) -> F32:
        path = self._commits.checked_path(name)
        try:
            tensors, _ = map_tensors(path)
        except BundleError as error:
            raise StoreError(str(error)) from None
        if tensor not in tensors or tensors[tensor].dtype != np.float32:
            raise damaged_error(path, f"it has no float32 tensor {tensor!r}")
        return tensors[tensor]


def _with_prompt(entry: EpisodeEntry, prompt: Sequence[int] | None, medoids: Sequence[int] | None) -> EpisodeEntry:
    return dataclasses.replace(
        entry,
        prompt=entry.prompt if prompt is None else [int(t) for t in prompt],
        medoids=entry.medoids if medoids is None else [int(m) for m in medoids],
    )


def _check_order(utterances: Sequence[Utterance], first: int) -> None:
    for i, (before, after) in enumerate(itertools.pairwise(utterances), first + 1):
        check_session_order(before.session, after.session, i)
