"""Reading the history into episodes, block by block; every block is a checkpoint, so a killed job goes on where it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from runtime_py.episodes.cache import EpisodeCache, SealedCache
from runtime_py.episodes.rendering import TokenStream
from runtime_py.episodes.store import Store
from runtime_py.errors import Cancelled, StoreError
from runtime_py.language_model import LanguageModel

# episode index (-1: the part all episodes share), tokens read, tokens in all
ReadProgress = Callable[[int, int, int], None]


class EpisodeReader:
    """Brings the episodes of a store up to date with its token stream."""

    def __init__(
        self,
        model: LanguageModel,
        store: Store,
        stream: TokenStream,
        cancelled: Callable[[], bool] = lambda: False,
        progress: ReadProgress = lambda _episode, _done, _total: None,
        checkpoint: bool = True,
    ) -> None:
        self._model, self._store, self._stream = model, store, stream
        self._cancelled, self._progress, self._checkpoint = cancelled, progress, checkpoint

    def sealed(self, episode: int) -> SealedCache:
        """The up-to-date sealed cache of ``episode``, memory-mapped. Raises ``Cancelled`` between two blocks."""
        cache = self.catch_up(episode)
        keys = self._store.sealed(episode)
        if keys is None:
            self._store.put_sealed(episode, self._model.sealed_keys(cache))
            keys = self._store.sealed(episode)
        if keys is None:
            raise StoreError(f"The sealed keys of episode {episode} in {self._store.folder} cannot be read back.")
        return SealedCache(keys, cache.v, cache.n_seen)

    def catch_up(self, episode: int) -> EpisodeCache:
        """Read what ``episode`` has not seen yet and return its cache as stored. Raises ``Cancelled`` between two blocks."""
        cache = self._stored(episode)
        total = len(self._stream)
        if cache is None or cache.n_seen < min(self._model.plan.min_budget, total):
            cache = self._shared(cache)
            if cache.n_seen >= total:
                self._store.put_episode(episode, cache)
        prompt = self._store.episodes()[episode].prompt
        while cache.n_seen < total:
            cache = self._read_block(cache, prompt)
            self._progress(episode, cache.n_seen, total)
            if self._checkpoint or cache.n_seen >= total:
                self._store.put_episode(episode, cache)
        stored = self._store.cache(episode)
        assert stored is not None
        return stored

    def _stored(self, episode: int) -> EpisodeCache | None:
        """What the store holds; a damaged cache is dropped and read anew, for the log is the truth behind it."""
        with contextlib.suppress(StoreError):
            cache = self._store.cache(episode)
            if cache is None or self._belongs(cache):
                return cache
        self._store.reset_episode(episode)
        return None

    def _belongs(self, cache: EpisodeCache) -> bool:
        return cache.fits(self._model.shape, self._model.plan) and cache.n_seen <= len(self._stream)

    def _shared(self, start: EpisodeCache | None) -> EpisodeCache:
        """The part before the first eviction, which no prompt can change, read once for all episodes.

        ``start`` is an episode's cache from before the first eviction, where there is one.
        """
        cache = None
        with contextlib.suppress(StoreError):
            cache = self._store.shared()
        if cache is None or not self._belongs(cache):
            cache = start or EpisodeCache.empty(self._model.shape, self._model.plan)
        end = min(self._model.plan.min_budget, len(self._stream))
        while cache.n_seen < end:
            cache = self._read_block(cache, [])
            self._progress(-1, cache.n_seen, end)
            if cache.n_seen >= end:
                self._store.set_shared(cache)
        return cache

    def _read_block(self, cache: EpisodeCache, prompt: list[int]) -> EpisodeCache:
        """One block: without a prompt up to the first eviction, with it behind."""
        if self._cancelled():
            raise Cancelled("Reading the history was stopped; the blocks read so far are kept.")
        plan = self._model.plan
        early = cache.n_seen < plan.min_budget
        end = min(cache.n_seen + plan.block, len(self._stream))
        if early:
            end = min(end, plan.min_budget)
        return self._model.prefill(cache, self._stream.tokens(cache.n_seen, end), [] if early else prompt)
