"""Checks of the stored episodes: what can be computed again from the history without reading all of it."""

from __future__ import annotations

import numpy as np
import torch

from exporter.models.decoder import Decoder, DecoderLayer
from exporter.parity.checks import (
    FLOAT_LIMIT,
    ROUNDED_CENTROID,
    ROUNDED_LAYER,
    ROUNDED_WHY,
    Check,
    relative_difference,
    worst,
)
from runtime_py.bundle import Bundle, EpisodesFile
from runtime_py.embedder import F32
from runtime_py.episodes.cache import I32, EpisodeCache
from runtime_py.episodes.cache_files import read_cache, read_sealed
from runtime_py.episodes.prompts import patched_prompt
from runtime_py.episodes.rendering import TokenStream
from runtime_py.episodes.segments import Segment, make_segments
from runtime_py.language_model import LanguageModel
from runtime_py.manifest import GraphPlan
from runtime_py.tensor_files import map_tensors

CENTROIDS_FILE = "episodes/centroids.safetensors"


def episode_checks(bundle: Bundle, model: LanguageModel, decoder: Decoder, rounded: frozenset[str]) -> list[Check]:
    """Every episode has read the whole history, keeps rows in order, and holds what belongs to their tokens.

    ``decoder`` has the weights the bundle computes with. Keys and values of layer 0 follow from a row's token alone; those of
    deeper layers depend on all that was read before, so for them SHA256SUMS is the only witness.
    """
    history, manifest = bundle.episodes_file(), bundle.manifest
    encode = bundle.text_tokenizer().encode
    stream = TokenStream(manifest.template.prefix, encode, history.speakers, history.utterances)
    tokens = stream.tokens(0, len(stream))
    behind, misplaced, sealed, first_layer = 0, 0, [0.0], [0.0]
    for record in history.episodes:
        folder = bundle.path / "episodes"
        cache, (keys, n_seen) = read_cache(folder / record.cache), read_sealed(folder / record.sealed)
        behind += not cache.n_seen == n_seen == record.n_seen == len(tokens)
        if [k.shape[1] for k in cache.k] != manifest.plan.layer_budgets or [k.shape for k in keys] != [k.shape for k in cache.k]:
            misplaced += 1
            continue
        misplaced += sum(_misplaced(src, cache.n_seen, manifest.plan) for src in cache.src)
        sealed += [relative_difference(k, e) for k, e in zip(keys, model.sealed_keys(cache), strict=True)]
        first_layer += _first_layer(cache, decoder, tokens)
    n = len(history.episodes)
    limit, reason = (ROUNDED_LAYER, ROUNDED_WHY) if "prefill" in rounded else (FLOAT_LIMIT, "float32 rounding")
    token_only = f"layer 0's keys and values, computed again from each row's token; {reason}"
    return [
        Check("bundle", "episodes", "behind", behind, 0, f"of {n} episodes, of {len(tokens)} tokens"),
        Check("bundle", "episodes", "rows", misplaced, 0, "rows out of order, outside the history, or in place of a sink"),
        Check("bundle", "episodes", "sealed_keys", worst(sealed), 1e-6, "rotated again here; one bit of cos or sin"),
        Check("bundle", "episodes", "first_layer", worst(first_layer), limit, token_only),
        _prompt_check(bundle, history),
    ]


def _misplaced(src: I32, n_seen: int, plan: GraphPlan) -> int:
    """Rows of ``src [Hkv, M]`` that are not where a full or a filling cache has them: free rows, sinks, then by age."""
    rows = src.shape[1]
    if n_seen <= rows:
        return int((src != np.arange(n_seen - rows, n_seen).clip(-1)).sum())
    sinks = min(plan.n_sinks, rows)
    wrong = (src[:, :sinks] != np.arange(sinks)).sum() + (np.diff(src, axis=1) <= 0).sum()
    return int(wrong + ((src < 0) | (src >= n_seen)).sum())


def _first_layer(cache: EpisodeCache, decoder: Decoder, tokens: list[int]) -> list[float]:
    """How far layer 0 of ``cache`` is from what its rows' tokens give; NaN for rows that no token can be named for."""
    src = cache.src[0]
    if not ((src >= -1) & (src < len(tokens))).all():
        return [float("nan")]
    layer = decoder.layers[0]
    assert isinstance(layer, DecoderLayer)
    _, k, v = layer.project(decoder.embedding(torch.tensor(tokens)))
    heads = np.arange(len(src))[:, None]
    free = (src < 0)[..., None]
    pairs = ((cache.k[0], k.numpy()), (cache.v[0], v.numpy()))
    return [relative_difference(np.where(free, 0, found), np.where(free, 0, every[heads, src])) for found, every in pairs]


def _prompt_check(bundle: Bundle, history: EpisodesFile) -> Check:
    """Segments, medoids and prompts are those of the history: the graphs cannot tell, they read any prompt."""
    segments = make_segments(history.utterances)
    table = map_tensors(bundle.path / CENTROIDS_FILE)[0].get("medoids")
    encode, limit = bundle.text_tokenizer().encode, bundle.manifest.plan.prompt
    wrong = 0
    for i, record in enumerate(history.episodes):
        known = all(m < len(segments) and history.segments[m].episode == i for m in record.medoids)
        stored = table is not None and i < len(table) and [int(m) for m in table[i] if m >= 0] == record.medoids
        wrong += not (known and stored and record.prompt == patched_prompt(_texts(segments, record.medoids), encode, limit))
    wrong += [(s.first, s.last, s.part) for s in segments] != [(s.first, s.last, s.part) for s in history.segments]
    why = f"of {len(history.episodes)} medoid lists with prompts, and the list of segments, made again from the history"
    return Check("bundle", "episodes", "prompts", wrong, 0, why)


def _texts(segments: list[Segment], indices: list[int]) -> list[str]:
    return [segments[i].text for i in indices]


def centroid_check(bundle: Bundle, vectors: F32, rounded: frozenset[str]) -> Check:
    """Each centroid is the mean of its segments' ``vectors [n_segments, d]``, embedded again by the reference."""
    labels = np.array([s.episode for s in bundle.episodes_file().segments])
    stored = map_tensors(bundle.path / CENTROIDS_FILE)[0]["centroids"]
    value = float("nan")
    if len(labels) == len(vectors) and set(labels.tolist()) == set(range(len(stored))):
        means = np.stack([vectors[labels == i].astype(np.float64).mean(0) for i in range(len(stored))])
        value = relative_difference(stored, means.astype(np.float32))
    limit, reason = (ROUNDED_CENTROID, ROUNDED_WHY) if "embed" in rounded else (FLOAT_LIMIT, "float32 rounding")
    why = f"of {len(stored)} centroids to the means of their segments, embedded again; {reason}"
    return Check("bundle", "episodes", "centroids", value, limit, why)
