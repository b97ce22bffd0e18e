"""Prefill, query and decode against a slow reading of the contract, and against full attention while nothing is evicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from conftest import LanguageModelFactory, PlanFactory
from numpy.typing import NDArray

from exporter.models.decoder import Decoder
from exporter.models.dense import dense_logits
from runtime_py.engines.base import Array, Engine
from runtime_py.episodes.cache import EpisodeCache
from runtime_py.language_model import LanguageModel, Tail
from runtime_py.manifest import GraphPlan

F64 = NDArray[np.float64]
BUDGETS = [24, 16, 32]


@dataclass
class Rows:
    """The valid rows of one layer's cache, oldest first: keys before RoPE and values ``[Hkv, n, D]``, src ``[Hkv, n]``."""

    k: F64
    v: F64
    src: NDArray[np.int64]


class SlowModel:
    """Plain float64 attention, head by head and token by token, over real rows only: no padding, masks or fixed shapes."""

    def __init__(self, decoder: Decoder, plan: GraphPlan) -> None:
        self.config, self.plan = decoder.config, plan
        self.weights = {name: p.numpy().astype(np.float64) for name, p in decoder.state_dict().items()}

    def rows(self, cache: EpisodeCache) -> list[Rows]:
        """The valid rows of a padded cache."""
        found = []
        for k, v, src in zip(cache.k, cache.v, cache.src, strict=True):
            free = src.shape[1] - min(cache.n_seen, src.shape[1])
            found.append(Rows(k[:, free:].astype(np.float64), v[:, free:].astype(np.float64), src[:, free:].astype(np.int64)))
        return found

    def _norm(self, name: str, x: F64) -> F64:
        scaled: F64 = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.norm_eps) * self.weights[f"{name}.weight"]
        return scaled

    def _heads(self, layer: int, part: str, x: F64, heads: int) -> F64:
        y = self._norm(f"layers.{layer}.attn_norm", x) @ self.weights[f"layers.{layer}.{part}.weight"].T
        return y.reshape(len(x), heads, -1).swapaxes(0, 1)

    def _rotate(self, x: F64, positions: NDArray[np.int64]) -> F64:
        """RoPE as a product of complex numbers, element i paired with i + D/2."""
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.config.rope_theta ** (-2.0 * np.arange(half) / x.shape[-1])
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def forward(self, cache: list[Rows], n_seen: int, tokens: Sequence[int], prompt: Sequence[int]) -> tuple[F64, list[Rows]]:
        """Logits behind every token, and what each layer keeps of cache and ``tokens``, scored by ``prompt``."""
        config, start = self.config, min(max(self.plan.layer_budgets), n_seen)
        group = config.n_heads // config.n_kv_heads
        x = self.weights["embedding.weight"][[*tokens, *prompt]]
        kept = []
        for layer, old in enumerate(cache):
            n_old = old.k.shape[1]
            q = self._rotate(self._heads(layer, "q_proj", x, config.n_heads), start + np.arange(len(x)))
            k = np.concatenate([old.k, self._heads(layer, "k_proj", x, config.n_kv_heads)], axis=1)
            v = np.concatenate([old.v, self._heads(layer, "v_proj", x, config.n_kv_heads)], axis=1)
            turned = self._rotate(k, start - n_old + np.arange(k.shape[1]))
            rows = n_old + len(tokens)
            scores = np.zeros((config.n_kv_heads, rows))
            attended = np.zeros((len(x), config.n_heads * config.head_dim))
            for head in range(config.n_heads):
                shared = head // group
                for i in range(len(x)):
                    logits = turned[shared, : n_old + i + 1] @ q[head, i] / np.sqrt(config.head_dim)
                    weights = softmax(logits) @ v[shared, : n_old + i + 1]
                    attended[i, head * config.head_dim : (head + 1) * config.head_dim] = weights
                    if i >= len(tokens):
                        scores[shared] = np.maximum(scores[shared], softmax(logits[:rows]))
            x = x + attended @ self.weights[f"layers.{layer}.o_proj.weight"].T
            h = self._norm(f"layers.{layer}.ffn_norm", x)
            gate, up = (h @ self.weights[f"layers.{layer}.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.weights[f"layers.{layer}.down_proj.weight"].T
            src = np.concatenate([old.src, np.tile(n_seen + np.arange(len(tokens)), (config.n_kv_heads, 1))], axis=1)
            index = np.array([self._choice(scores[h], src[h], self.plan.layer_budgets[layer]) for h in range(len(src))])
            rows_of_k, rows_of_v = (np.take_along_axis(part, index[..., None], 1) for part in (k, v))
            kept.append(Rows(rows_of_k, rows_of_v, np.take_along_axis(src, index, 1)))
        return self._norm("norm", x) @ self.weights["head.weight"].T, kept

    def _choice(self, scores: F64, src: NDArray[np.int64], budget: int) -> list[int]:
        order = sorted(range(len(scores)), key=lambda row: (src[row] >= self.plan.n_sinks, -scores[row], row))
        return sorted(order[:budget])


def softmax(x: F64) -> F64:
    weights: F64 = np.exp(x - x.max())
    return weights / weights.sum()


def random_ids(seed: int, count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 97, count)]


def read_blocks(model: LanguageModel, ids: Sequence[int], sizes: Sequence[int], prompt: Sequence[int]) -> EpisodeCache:
    """A cache after blocks of these ``sizes``; only the blocks that need a prompt get one."""
    cache, start = EpisodeCache.empty(model.shape, model.plan), 0
    for size in sizes:
        fits = cache.n_seen + size <= model.plan.min_budget
        cache = model.prefill(cache, ids[start : start + size], [] if fits else prompt)
        start += size
    return cache


def assert_same_rows(model: SlowModel, found: EpisodeCache, expected: list[Rows]) -> None:
    for mine, theirs in zip(model.rows(found), expected, strict=True):
        assert mine.src.tolist() == theirs.src.tolist()
        np.testing.assert_allclose(mine.k, theirs.k, rtol=0, atol=1e-4)
        np.testing.assert_allclose(mine.v, theirs.v, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def plan(make_plan: PlanFactory) -> GraphPlan:
    return make_plan(BUDGETS)


@pytest.fixture(scope="module")
def model(tiny_decoder: Decoder, plan: GraphPlan, make_language_model: LanguageModelFactory) -> LanguageModel:
    return make_language_model(tiny_decoder, plan)


@pytest.fixture(scope="module")
def slow(tiny_decoder: Decoder, plan: GraphPlan) -> SlowModel:
    return SlowModel(tiny_decoder, plan)


@pytest.fixture(scope="module")
def evicted(model: LanguageModel) -> EpisodeCache:
    """A cache from which every layer has evicted several times."""
    return read_blocks(model, random_ids(11, 71), [8] * 8 + [7], random_ids(12, 6))


def test_prefill_keeps_what_the_scoring_rule_says(model: LanguageModel, slow: SlowModel) -> None:
    draw = np.random.default_rng(5)
    for history in range(6):
        cache, evictions = EpisodeCache.empty(model.shape, model.plan), 0
        for step in range(12):
            tokens = random_ids(100 * history + step, int(draw.integers(1, 9)))
            prompt = random_ids(100 * history + step + 50, int(draw.integers(1, 7)))
            _, expected = slow.forward(slow.rows(cache), cache.n_seen, tokens, prompt)
            cache = model.prefill(cache, tokens, prompt)
            assert_same_rows(slow, cache, expected)
            evictions += cache.n_seen > max(BUDGETS)
        assert evictions > 0


@pytest.mark.parametrize("n_tokens", range(1, 9))
def test_every_block_length(model: LanguageModel, slow: SlowModel, evicted: EpisodeCache, n_tokens: int) -> None:
    for cache in (EpisodeCache.empty(model.shape, model.plan), evicted):
        for n_prompt in (1, 6):
            tokens, prompt = random_ids(n_tokens, n_tokens), random_ids(n_prompt, n_prompt)
            _, expected = slow.forward(slow.rows(cache), cache.n_seen, tokens, prompt)
            assert_same_rows(slow, model.prefill(cache, tokens, prompt), expected)


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4, 5, 9])
def test_after_eviction_decode_is_full_attention_over_the_kept_rows(
    model: LanguageModel, slow: SlowModel, evicted: EpisodeCache, n_tokens: int
) -> None:
    tokens = random_ids(n_tokens, n_tokens + 3)
    expected, _ = slow.forward(slow.rows(evicted), evicted.n_seen, tokens, [])
    sealed, tail = model.seal(evicted), Tail.empty(model.shape, model.plan)
    found = [model.read(sealed, tail, tokens[:n_tokens])]
    found += [model.read(sealed, tail, [token]) for token in tokens[n_tokens:]]
    assert np.abs(expected).max() > 5
    np.testing.assert_allclose(np.stack(found), expected[n_tokens - 1 :], rtol=0, atol=1e-4)


def test_src_names_the_token_behind_every_kept_row(model: LanguageModel, slow: SlowModel, evicted: EpisodeCache) -> None:
    """The first layer's keys and values depend on nothing but the token, so they can be computed from src alone."""
    ids = random_ids(11, 71)
    first = slow.rows(evicted)[0]
    for head in range(2):
        x = slow.weights["embedding.weight"][[ids[j] for j in first.src[head]]]
        np.testing.assert_allclose(first.k[head], slow._heads(0, "k_proj", x, 2)[head], rtol=0, atol=1e-4)
        np.testing.assert_allclose(first.v[head], slow._heads(0, "v_proj", x, 2)[head], rtol=0, atol=1e-4)


@pytest.mark.parametrize("sizes", [[16], [8, 8], [8, 1, 7], [1] * 16, [3], [1]])
def test_before_any_eviction_the_tiny_model_equals_full_attention(
    tiny_decoder: Decoder, make_plan: PlanFactory, make_language_model: LanguageModelFactory, sizes: list[int]
) -> None:
    model = make_language_model(tiny_decoder, make_plan(BUDGETS, block=16))
    ids = random_ids(21, sum(sizes) + 12)
    cache = read_blocks(model, ids, sizes, [])
    expected = dense_logits(tiny_decoder, torch.tensor(ids)).numpy()
    sealed, tail = model.seal(cache), Tail.empty(model.shape, model.plan)
    found = [model.read(sealed, tail, ids[cache.n_seen : cache.n_seen + 7])]
    found += [model.read(sealed, tail, [token]) for token in ids[cache.n_seen + 7 :]]
    np.testing.assert_allclose(np.stack(found), expected[cache.n_seen + 6 :], rtol=0, atol=1e-4)


def test_before_any_eviction_real_weights_equal_full_attention(
    smollm_short: Decoder, make_plan: PlanFactory, make_language_model: LanguageModelFactory, story_ids: list[int]
) -> None:
    plan = make_plan([256, 192, 320], block=64, prompt=32, tail=64, query=8, n_sinks=30)
    model = make_language_model(smollm_short, plan)
    cache = read_blocks(model, story_ids, [64, 1, 37, 64, 26], [])
    assert cache.n_seen == plan.min_budget
    expected = dense_logits(smollm_short, torch.tensor(story_ids[:222])).numpy()
    sealed, tail = model.seal(cache), Tail.empty(model.shape, plan)
    found = [model.read(sealed, tail, story_ids[192:211])]
    found += [model.read(sealed, tail, [token]) for token in story_ids[211:222]]
    np.testing.assert_allclose(np.stack(found), expected[210:], rtol=0, atol=1e-4)


def test_a_prompt_before_the_first_eviction_changes_nothing(model: LanguageModel) -> None:
    ids = random_ids(31, 16)
    cache = read_blocks(model, ids, [8], [])
    with_prompt, without = model.prefill(cache, ids[8:], random_ids(32, 6)), model.prefill(cache, ids[8:], [])
    for name in ("k", "v", "src"):
        for a, b in zip(getattr(with_prompt, name), getattr(without, name), strict=True):
            np.testing.assert_array_equal(a, b)


def test_kept_rows_are_ordered_aligned_and_complete(model: LanguageModel) -> None:
    draw, plan = np.random.default_rng(8), model.plan
    cache = EpisodeCache.empty(model.shape, plan)
    for step in range(40):
        cache = model.prefill(cache, random_ids(step, int(draw.integers(1, 9))), random_ids(step + 99, int(draw.integers(1, 7))))
        for budget, src in zip(plan.layer_budgets, cache.src, strict=True):
            valid = min(cache.n_seen, budget)
            assert (src[:, : budget - valid] == -1).all()
            rows = src[:, budget - valid :]
            assert (np.diff(rows, axis=1) > 0).all()
            assert rows.min() >= 0 and rows.max() < cache.n_seen
            sinks = min(plan.n_sinks, cache.n_seen)
            assert (rows[:, :sinks] == np.arange(sinks)).all()
    assert cache.n_seen > 4 * max(BUDGETS)


class NoisyEngine:
    """The given engine, but everything the contract calls padding or free is garbage when it gets there."""

    name = "noisy"

    def __init__(self, engine: Engine, plan: GraphPlan, seed: int) -> None:
        self._engine, self._plan, self._draw = engine, plan, np.random.default_rng(seed)

    def run(self, graph: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        noisy = {name: array.copy() for name, array in inputs.items()}
        n_tokens, n_seen = int(inputs["n_tokens"][0]), int(inputs["n_seen"][0])
        self._spoil(noisy["tokens"][:, n_tokens:])
        for layer, budget in enumerate(self._plan.layer_budgets):
            for name in ("k", "v"):
                self._spoil(noisy[f"{name}_{layer}"][:, : max(budget - n_seen, 0)])
        if graph == "prefill":
            largest, n_prompt = self._plan.max_budget, int(inputs["n_prompt"][0])
            self._spoil(noisy["prompt"][:, n_prompt:])
            for name in ("cos", "sin"):
                self._spoil(noisy[name][: max(largest - n_seen, 0)])
                self._spoil(noisy[name][largest + n_tokens : largest + self._plan.block])
                self._spoil(noisy[name][largest + self._plan.block + n_prompt :])
        else:
            for name in ("tail_k", "tail_v"):
                for layer in range(len(self._plan.layer_budgets)):
                    self._spoil(noisy[f"{name}_{layer}"][:, int(inputs["n_tail"][0]) :])
            for name in ("cos", "sin"):
                self._spoil(noisy[name][n_tokens:])
        return self._engine.run(graph, noisy)

    def _spoil(self, part: Array) -> None:
        noise = self._draw.integers(0, 97, part.shape) if part.dtype == np.int32 else self._draw.normal(0, 20, part.shape)
        part[...] = noise.astype(part.dtype)

    def close(self) -> None:
        self._engine.close()


@pytest.mark.parametrize("seed", range(3))
def test_padding_and_free_rows_have_no_influence(model: LanguageModel, slow: SlowModel, seed: int) -> None:
    noisy = LanguageModel(NoisyEngine(model.engine, model.plan, seed), model.shape, model.plan)
    draw = np.random.default_rng(seed)
    clean_cache = noisy_cache = EpisodeCache.empty(model.shape, model.plan)
    for step in range(9):
        tokens = random_ids(40 + step, int(draw.integers(1, 9)))
        prompt = random_ids(70 + step, int(draw.integers(1, 7)))
        clean_cache, noisy_cache = model.prefill(clean_cache, tokens, prompt), noisy.prefill(noisy_cache, tokens, prompt)
        for a, b in zip(slow.rows(clean_cache), slow.rows(noisy_cache), strict=True):
            assert all(np.array_equal(getattr(a, part), getattr(b, part)) for part in ("k", "v", "src"))
        assert all(np.array_equal(a, b) for a, b in zip(clean_cache.src, noisy_cache.src, strict=True))
        tails = [Tail.empty(model.shape, model.plan) for _ in range(2)]
        for question in (random_ids(step, int(draw.integers(1, 12))), random_ids(step + 1, 1), random_ids(step + 2, 3)):
            expected = model.read(model.seal(clean_cache), tails[0], question)
            np.testing.assert_array_equal(noisy.read(noisy.seal(noisy_cache), tails[1], question), expected)


def test_chunks_equal_single_tokens(model: LanguageModel, evicted: EpisodeCache) -> None:
    tokens, sealed = random_ids(51, 30), model.seal(evicted)
    single, chunked, uneven = (Tail.empty(model.shape, model.plan) for _ in range(3))
    expected = [model.read(sealed, single, [token]) for token in tokens]
    np.testing.assert_allclose(model.read(sealed, chunked, tokens), expected[-1], rtol=0, atol=1e-4)
    for start, end in ((0, 1), (1, 8), (8, 10), (10, 30)):
        np.testing.assert_allclose(model.read(sealed, uneven, tokens[start:end]), expected[end - 1], rtol=0, atol=1e-4)
    for layer in range(3):
        for part in ("k", "v"):
            rows = [getattr(tail, part)[layer] for tail in (single, chunked, uneven)]
            np.testing.assert_allclose(rows[1], rows[0], rtol=0, atol=1e-4)
            np.testing.assert_allclose(rows[2], rows[0], rtol=0, atol=1e-4)
