"""The host side of the language model: padding, positions, RoPE tables and cache ownership around an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime_py.engines.base import Array, Engine
from runtime_py.episodes.cache import F32, EpisodeCache, SealedCache
from runtime_py.errors import Cancelled
from runtime_py.manifest import GraphPlan, ModelShape
from runtime_py.rope import rope_table, rotate


@dataclass
class Tail:
    """The R free rows behind a sealed cache: ``k[l], v[l]`` float32 ``[Hkv, R, D]``, the first ``used`` rows valid."""

    k: list[F32]
    v: list[F32]
    used: int = 0

    @staticmethod
    def empty(shape: ModelShape, plan: GraphPlan) -> Tail:
        """A tail with no row used."""
        size = (shape.n_kv_heads, plan.tail, shape.head_dim)
        return Tail(
            [np.zeros(size, np.float32) for _ in range(shape.n_layers)],
            [np.zeros(size, np.float32) for _ in range(shape.n_layers)],
        )


class LanguageModel:
    """Runs prefill, query and decode on whole token lists; see design section "Graphs" for the contract it keeps."""

    def __init__(self, engine: Engine, shape: ModelShape, plan: GraphPlan) -> None:
        self.engine, self.shape, self.plan = engine, shape, plan
        self._inv_freq = np.array(shape.inv_freq, np.float32)

    def prefill(self, cache: EpisodeCache, tokens: Sequence[int], prompt: Sequence[int]) -> EpisodeCache:
        """Read one block of 1 to B ``tokens`` behind ``cache``; rows are kept by the attention of ``prompt`` (up to P tokens).

        With an empty prompt nothing may be evicted: ``n_seen + len(tokens)`` must not exceed the smallest layer budget.
        """
        outputs = self.engine.run("prefill", self.prefill_inputs(cache, tokens, prompt))
        layers = range(self.shape.n_layers)
        return EpisodeCache(
            [outputs[f"kept_k_{i}"].astype(np.float32, copy=False) for i in layers],
            [outputs[f"kept_v_{i}"].astype(np.float32, copy=False) for i in layers],
            [outputs[f"kept_src_{i}"].astype(np.int32, copy=False) for i in layers],
            cache.n_seen + len(tokens),
        )

    def prefill_inputs(self, cache: EpisodeCache, tokens: Sequence[int], prompt: Sequence[int]) -> dict[str, Array]:
        """The inputs of the prefill graph by name, for the arguments of ``prefill``."""
        plan, first = self.plan, first_position(self.plan, cache.n_seen)
        assert 1 <= len(tokens) <= plan.block and len(prompt) <= plan.prompt
        assert prompt or cache.n_seen + len(tokens) <= plan.min_budget
        positions = np.concatenate(
            [
                np.arange(first - plan.max_budget, first),
                first + np.arange(plan.block),
                first + len(tokens) + np.arange(plan.prompt),
            ]
        )
        cos, sin = rope_table(self._inv_freq, np.maximum(positions, 0))
        return {
            "tokens": _padded(tokens, plan.block),
            "prompt": _padded(prompt, plan.prompt),
            "n_tokens": _scalar(len(tokens)),
            "n_prompt": _scalar(len(prompt)),
            "n_seen": _scalar(cache.n_seen),
            "cos": cos,
            "sin": sin,
            **_named("k", cache.k),
            **_named("v", cache.v),
            **_named("src", cache.src),
        }

    def sealed_keys(self, cache: EpisodeCache) -> list[F32]:
        """Keys rotated at their compacted positions, float32 ``[Hkv, M_l, D]`` a layer."""
        plan, first = self.plan, first_position(self.plan, cache.n_seen)
        positions = np.maximum(np.arange(first - plan.max_budget, first), 0)
        cos, sin = rope_table(self._inv_freq, positions)
        return [
            rotate(k, cos[plan.max_budget - m :], sin[plan.max_budget - m :])
            for k, m in zip(cache.k, plan.layer_budgets, strict=True)
        ]

    def seal(self, cache: EpisodeCache) -> SealedCache:
        """The cache as query and decode read it."""
        return SealedCache(self.sealed_keys(cache), cache.v, cache.n_seen)

    def read(self, sealed: SealedCache, tail: Tail, tokens: Sequence[int], cancelled: Callable[[], bool] = lambda: False) -> F32:
        """Read 1 or more ``tokens`` into the tail, in chunks of Q; returns the logits ``[vocab]`` behind the last one.

        The tail must have room for all of them. Raises ``Cancelled`` between two chunks; those read stay in the tail.
        """
        assert tokens and tail.used + len(tokens) <= self.plan.tail
        logits: F32 = np.empty(0, np.float32)
        for start in range(0, len(tokens), self.plan.query):
            if cancelled():
                raise Cancelled("Reading the question was stopped.")
            logits = self._read_chunk(sealed, tail, tokens[start : start + self.plan.query])
        return logits

    def _read_chunk(self, sealed: SealedCache, tail: Tail, tokens: Sequence[int]) -> F32:
        graph, rows = ("decode", 1) if len(tokens) == 1 else ("query", self.plan.query)
        first = first_position(self.plan, sealed.n_seen) + tail.used
        cos, sin = rope_table(self._inv_freq, first + np.arange(rows))
        outputs = self.engine.run(
            graph,
            {
                "tokens": _padded(tokens, rows),
                "n_tokens": _scalar(len(tokens)),
                "n_seen": _scalar(sealed.n_seen),
                "n_tail": _scalar(tail.used),
                "cos": cos,
                "sin": sin,
                **_named("k", sealed.k),
                **_named("v", sealed.v),
                **_named("tail_k", tail.k),
                **_named("tail_v", tail.v),
            },
        )
        end = tail.used + len(tokens)
        for layer in range(self.shape.n_layers):
            tail.k[layer][:, tail.used : end] = outputs[f"new_k_{layer}"][:, : len(tokens)]
            tail.v[layer][:, tail.used : end] = outputs[f"new_v_{layer}"][:, : len(tokens)]
        tail.used = end
        return outputs["logits"][0].astype(np.float32, copy=False)


def first_position(plan: GraphPlan, n_seen: int) -> int:
    """P0: the position of the token behind the cache, ``min(Mmax, n_seen)``."""
    return min(plan.max_budget, n_seen)


def _scalar(value: int) -> NDArray[np.int32]:
    return np.array([value], np.int32)


def _padded(tokens: Sequence[int], length: int) -> NDArray[np.int32]:
    row = np.zeros((1, length), np.int32)
    row[0, : len(tokens)] = tokens
    return row


def _named(name: str, arrays: Sequence[Array]) -> dict[str, Array]:
    return {f"{name}_{layer}": array for layer, array in enumerate(arrays)}
