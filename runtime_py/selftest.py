"""The self-test of a bundle: a short run through every graph, compared with numbers that PyTorch computed at build time.

A phone does the same to see that its engine computes what was verified. The run is a chain, because its inputs are then small:
a block before the first eviction, a block with a prompt behind it, a question in one chunk and one more token, one embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime_py.bundle import Bundle
from runtime_py.engines.base import Engine
from runtime_py.episodes.cache import EpisodeCache
from runtime_py.errors import BundleError
from runtime_py.language_model import LanguageModel, Tail
from runtime_py.tensor_files import map_tensors

Array = NDArray[Any]

# Bounds for quantised weights, whose activations are rounded differently by each engine; float32 has FLOAT only.
FLOAT, OTHER_ROWS, KL = 2e-5, 0.05, 0.1
COSINE_DISTANCE = 5e-3  # the embedder rounds activations on XNNPACK; arm64 measured 1.4e-3
TIED_ROWS = 1e-4  # part of the rows: float32 scores that tie within rounding may fall either way


@dataclass(frozen=True)
class SelftestResult:
    """``value`` may not exceed ``limit``."""

    graph: str
    name: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        """NaN never passes."""
        return self.value <= self.limit


def selftest_file(target: str) -> str:
    """Where the vectors of a target are, inside the bundle."""
    return f"selftest/{target}.safetensors"


def run_chain(model: LanguageModel, engine: Engine, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Run every graph on ``tokens``, ``prompt``, ``question`` (int32) and ``text``, ``n_text`` (one padded text).

    Returns ``src [Hkv, sum M_l]``, the layers side by side, the sum of each kept row's key and value alike, the logits of query
    and decode ``[vocab]`` and the vector ``[d]``.
    """
    tokens = [int(t) for t in inputs["tokens"]]
    cache = EpisodeCache.empty(model.shape, model.plan)
    while cache.n_seen < model.plan.min_budget:
        end = min(cache.n_seen + model.plan.block, model.plan.min_budget)
        cache = model.prefill(cache, tokens[cache.n_seen : end], [])
    cache = model.prefill(cache, tokens[cache.n_seen :], [int(t) for t in inputs["prompt"]])
    sealed, tail = model.seal(cache), Tail.empty(model.shape, model.plan)
    question = [int(t) for t in inputs["question"]]
    query = model.read(sealed, tail, question[:-1])
    decode = model.read(sealed, tail, question[-1:])
    vector = engine.run("embed", {"tokens": inputs["text"], "n_tokens": inputs["n_text"]})["vector"]
    return {
        "src": np.concatenate(cache.src, axis=1),
        "key_sums": np.concatenate([k.sum(-1) for k in cache.k], axis=1),
        "value_sums": np.concatenate([v.sum(-1) for v in cache.v], axis=1),
        "query": query,
        "decode": decode,
        "vector": vector,
    }


def selftest(bundle: Bundle, engine: Engine) -> list[SelftestResult]:
    """Replay the vectors of ``engine``'s target. Raises ``BundleError`` when the bundle has none for it."""
    path = bundle.path / selftest_file(engine.name)
    if not path.is_file():
        have = sorted(p.stem for p in (bundle.path / "selftest").glob("*.safetensors"))
        raise BundleError(f"{bundle.path} has no self-test for {engine.name}. It has: {', '.join(have) or 'none'}.")
    vectors, _ = map_tensors(path)
    model = LanguageModel(engine, bundle.manifest.shape, bundle.manifest.plan)
    found = run_chain(model, engine, vectors)
    plan = bundle.manifest.plan
    return compare(found, vectors, plan.layer_budgets, plan.weights == "fp32")


def compare(
    found: Mapping[str, Array], expected: Mapping[str, Array], budgets: Sequence[int], exact: bool
) -> list[SelftestResult]:
    """Results for each graph; ``exact`` holds float32 to rounding, anything else to the bounds of quantised weights."""
    other = _other_rows(found["src"], expected["src"], budgets)
    same = (found["src"] == expected["src"]) & (expected["src"] >= 0)
    results = [SelftestResult("prefill", "other_rows", other, TIED_ROWS if exact else OTHER_ROWS)]
    if exact:
        for name in ("key_sums", "value_sums"):
            results.append(SelftestResult("prefill", name, _difference(found[name][same], expected[name][same]), FLOAT))
    for name in ("query", "decode"):
        value = _difference(found[name], expected[name]) if exact else _kl(expected[name], found[name])
        results.append(SelftestResult(name, "logits" if exact else "logits_kl", value, FLOAT if exact else KL))
    cosine = float(np.dot(found["vector"].astype(np.float64), expected["vector"].astype(np.float64)))
    results.append(SelftestResult("embed", "cosine_distance", 1.0 - cosine, COSINE_DISTANCE))
    return results


def _other_rows(found: Array, expected: Array, budgets: Sequence[int]) -> float:
    """Part of the expected rows that were not kept, layer by layer and head by head."""
    ends = np.cumsum(budgets)[:-1]
    missing = sum(
        int(np.setdiff1d(e, f).size)
        for layer_f, layer_e in zip(np.split(found, ends, axis=1), np.split(expected, ends, axis=1), strict=True)
        for f, e in zip(layer_f, layer_e, strict=True)
    )
    return missing / max(expected.size, 1)


def _difference(found: Array, expected: Array) -> float:
    if found.shape != expected.shape or found.size == 0 or not np.isfinite(found).all():
        return float("nan")
    return float(np.abs(found - expected).max() / max(float(np.abs(expected).max()), 1e-9))


def _kl(expected: Array, found: Array) -> float:
    p, q = (x.astype(np.float64) - float(x.max()) for x in (expected, found))
    p, q = p - np.log(np.exp(p).sum()), q - np.log(np.exp(q).sum())
    return float((np.exp(p) * (p - q)).sum())
