"""Files of an episode: kept rows (k_l before RoPE, v_l, src_l) and sealed keys (k_l), with n_seen as metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from runtime_py.episodes.cache import F32, I32, EpisodeCache
from runtime_py.errors import BundleError, UsageError
from runtime_py.tensor_files import Array, map_tensors, write_tensors


def write_cache(path: Path, cache: EpisodeCache) -> str:
    """Write kept rows atomically and return the file's SHA-256.

    Raises ``UsageError`` for arrays that are not of the shapes of ``EpisodeCache``, ``WorkError`` without space.
    """
    tensors: dict[str, Array] = {}
    for name, arrays in (("k", cache.k), ("v", cache.v), ("src", cache.src)):
        tensors.update({f"{name}_{layer}": array for layer, array in enumerate(arrays)})
    problem = _cache_problem(tensors)
    if problem or cache.n_seen < 0:
        raise UsageError(f"This is not an episode's cache: {problem or f'n_seen is {cache.n_seen}'}. Give kept rows.")
    return write_tensors(path, tensors, {"n_seen": str(cache.n_seen)})


def read_cache(path: Path) -> EpisodeCache:
    """Map kept rows, read-only. Raises ``BundleError`` naming the file and the tensor."""
    tensors, metadata = map_tensors(path)
    problem = _cache_problem(tensors)
    if problem:
        raise BundleError(f"{path} is not an episode's cache: {problem}. Build it again.")
    k, v, src = (_layers(tensors, name) for name in ("k", "v", "src"))
    return EpisodeCache(k, v, src, _n_seen(path, metadata))


def write_sealed(path: Path, keys: Sequence[F32], n_seen: int) -> str:
    """Write rotated keys, one float32 ``[Hkv, M_l, D]`` a layer, atomically; returns the file's SHA-256."""
    return write_tensors(path, {f"k_{layer}": array for layer, array in enumerate(keys)}, {"n_seen": str(n_seen)})


def read_sealed(path: Path) -> tuple[list[F32], int]:
    """Map rotated keys, read-only, and the n_seen they were made at. Raises ``BundleError`` naming the file."""
    tensors, metadata = map_tensors(path)
    keys: list[F32] = _layers(tensors, "k")
    if set(tensors) != {f"k_{layer}" for layer in range(len(keys))}:
        raise BundleError(f"{path} does not hold sealed keys: its tensors are {sorted(tensors)[:4]}. Seal it again.")
    return keys, _n_seen(path, metadata)


def _layers(tensors: Mapping[str, Array], name: str) -> list[Array]:
    found: list[Array] = []
    while f"{name}_{len(found)}" in tensors:
        found.append(tensors[f"{name}_{len(found)}"])
    return found


def _cache_problem(tensors: Mapping[str, F32 | I32]) -> str | None:
    n_layers = len(_layers(tensors, "k"))
    expected = {f"{name}_{layer}" for name in ("k", "v", "src") for layer in range(n_layers)}
    if not n_layers or set(tensors) != expected:
        return f"k_l, v_l and src_l are expected for every layer, found {sorted(tensors)[:6]}"
    for layer in range(n_layers):
        k, v, src = (tensors[f"{name}_{layer}"] for name in ("k", "v", "src"))
        if k.ndim != 3 or v.shape != k.shape or src.shape != k.shape[:2]:
            return f"layer {layer} has shapes k {k.shape}, v {v.shape}, src {src.shape}"
        if (k.dtype, v.dtype, src.dtype) != (np.float32, np.float32, np.int32):
            return f"layer {layer} has dtypes k {k.dtype}, v {v.dtype}, src {src.dtype}; float32 and int32 are allowed"
    return None


def _n_seen(path: Path, metadata: Mapping[str, str]) -> int:
    text = metadata.get("n_seen", "")
    if not re.fullmatch(r"\d{1,15}", text, re.ASCII):
        raise BundleError(f"{path}: n_seen is {text!r}; a number of tokens is expected. Build it again.")
    return int(text)
