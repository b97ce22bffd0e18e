"""The plan refuses what cannot work, says what would, and resolves the rest into the numbers of the graphs."""

from __future__ import annotations

import dataclasses

import pytest

from exporter.budgets import layer_budgets
from exporter.manifest_parts import memory_figures, model_shape
from exporter.models.config import DecoderConfig
from exporter.plan import GRANULARITY, MIN_BUDGET, BuildPlan, parse_count
from runtime_py.episodes.cache import EpisodeCache
from runtime_py.errors import UsageError
from runtime_py.language_model import Tail
from runtime_py.manifest import Template

DECODER = DecoderConfig("llama", 4, 4, 2, 8, 32, 64, 97, 2048, 10000.0, 1e-5, tied=True)
LONGEST_TEXT = 512
SENSITIVITIES = [0.99, 0.95, 0.9, 0.8]


def template(prefix: int = 30, around: int = 16) -> Template:
    """Pieces of this many tokens in all: the prefix, and the three around a question."""
    return Template([1] * prefix, [1] * (around - 8), [1] * 3, [1] * 5, [1] * 50, [2])


def test_the_defaults_pass_and_are_those_of_the_contract() -> None:
    plan = BuildPlan()
    plan.check(DECODER, LONGEST_TEXT)
    assert (plan.block, plan.prompt, plan.tail, plan.query) == (256, 256, 512, 32)
    assert (plan.embed_length, plan.episodes, plan.model, plan.embedder) == (256, 4, "smollm2-135m", "minilm-l6")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"budget": 56}, ["--budget 56", "64 to 1536"]),
        ({"budget": 4096}, ["--budget 4096", "64 to 1536"]),
        ({"budget": 1544}, ["--budget 1544", "64 to 1536"]),
        ({"block": 31}, ["--block 31", "32 to 2048"]),
        ({"block": 4096}, ["--block 4096", "32 to 2048"]),
        ({"prompt": 8}, ["--prompt 8", "32 to 2048"]),
        ({"tail": 32}, ["--tail 32", "64 to 2048"]),
        ({"query": 1}, ["--query 1", "2 to 256"]),
        ({"query": 257}, ["--query 257", "2 to 256"]),
        ({"tail": 64, "query": 33}, ["--query 33", "2 to 32"]),
        ({"episodes": 0}, ["--episodes 0", "1 to 64"]),
        ({"episodes": 65}, ["--episodes 65", "1 to 64"]),
        ({"alpha": -0.1}, ["--alpha -0.1", "0 to 16"]),
        ({"alpha": float("nan")}, ["--alpha nan", "0 to 16"]),
        ({"alpha": 16.5}, ["--alpha 16.5", "0 to 16"]),
        ({"embed_length": 8}, ["--embed-length 8", "16 to 512"]),
        ({"embed_length": 513}, ["--embed-length 513", "16 to 512"]),
        ({"block": 1024, "prompt": 1024}, ["--block 1024", "--prompt 1024", "2048", "64"]),
        ({"tail": 2000}, ["--tail 2000", "2048", "64"]),
    ],
)
def test_refusals_name_the_flag_the_value_and_what_is_allowed(changes: dict[str, float], parts: list[str]) -> None:
    plan = dataclasses.replace(BuildPlan(), **changes)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        plan.check(DECODER, LONGEST_TEXT)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_the_limits_themselves_are_allowed() -> None:
    for changes in (
        {"budget": MIN_BUDGET, "block": 32, "prompt": 32, "tail": 64, "query": 2, "episodes": 1, "embed_length": 16},
        {"budget": 1536, "query": 256, "episodes": 64, "embed_length": 512},
    ):
        dataclasses.replace(BuildPlan(), **changes).check(DECODER, LONGEST_TEXT)  # type: ignore[arg-type]
    dataclasses.replace(BuildPlan(), alpha=0.0).check(DECODER, LONGEST_TEXT)
    dataclasses.replace(BuildPlan(), alpha=16.0).check(DECODER, LONGEST_TEXT)


def fits(plan: BuildPlan, budget: int) -> bool:
    """Whether every graph stays inside the trained context, from the definition."""
    largest = max(layer_budgets(SENSITIVITIES, budget, plan.alpha, GRANULARITY))
    return largest + plan.block + plan.prompt <= DECODER.context and largest + plan.tail <= DECODER.context


@pytest.mark.parametrize("changes", [{}, {"tail": 1000}, {"block": 512, "alpha": 3.0}, {"prompt": 32, "alpha": 0.3}])
def test_the_largest_budget_offered_is_really_the_largest(changes: dict[str, float]) -> None:
    plan = dataclasses.replace(BuildPlan(budget=1976), **changes)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        plan.resolve(DECODER, SENSITIVITIES, template())
    message = str(caught.value)
    assert "--budget 1976" in message and "2048" in message
    largest = int(message.rsplit("fits is ", 1)[1].rstrip("."))
    assert fits(plan, largest)
    assert not any(fits(plan, m) for m in range(largest + GRANULARITY, DECODER.context + 1, GRANULARITY))
    dataclasses.replace(plan, budget=largest).resolve(DECODER, SENSITIVITIES, template())


def test_when_no_budget_fits_it_says_which_numbers_to_lower() -> None:
    plan = BuildPlan(budget=128, block=1024, prompt=896, alpha=8.0)
    with pytest.raises(UsageError, match="No budget fits; lower --block, --prompt, --tail"):
        plan.resolve(DECODER, [0.999, 0.999, 0.999, 0.1], template())


def test_a_budget_between_multiples_is_refused() -> None:
    with pytest.raises(UsageError, match=r"100 is not a multiple of 8.*96 or 104"):
        BuildPlan(budget=100).resolve(DECODER, SENSITIVITIES, template())


def test_resolved_numbers() -> None:
    plan = BuildPlan(budget=256, query=16, weights="int8", alpha=2.0, episodes=3)
    graphs = plan.resolve(DECODER, SENSITIVITIES, template())
    assert graphs.layer_budgets == layer_budgets(SENSITIVITIES, 256, 2.0, 8)
    assert sum(graphs.layer_budgets) == 4 * 256
    assert (graphs.block, graphs.prompt, graphs.tail, graphs.query) == (256, 256, 512, 16)
    assert (graphs.weights, graphs.episodes, graphs.alpha, graphs.budget) == ("int8", 3, 2.0, 256)


def test_a_tail_must_hold_four_times_the_template_around_a_question() -> None:
    BuildPlan(tail=100).resolve(DECODER, SENSITIVITIES, template(around=25))
    with pytest.raises(UsageError, match=r"--tail 99 is too short: .* takes 25 tokens; allowed are 100 and more"):
        BuildPlan(tail=99).resolve(DECODER, SENSITIVITIES, template(around=25))


def test_memory_figures_are_the_sizes_of_the_arrays() -> None:
    shape, plan = model_shape(DECODER), BuildPlan(budget=256).resolve(DECODER, SENSITIVITIES, template())
    cache, tail = EpisodeCache.empty(shape, plan), Tail.empty(shape, plan)
    layers = [k.nbytes + v.nbytes for k, v in zip(cache.k, cache.v, strict=True)]
    figures = memory_figures(shape, plan)
    assert figures["sealed_cache_per_layer"] == layers
    assert figures["sealed_cache_per_episode"] == sum(layers) == 4 * 256 * 2 * 2 * 8 * 4  # L * M * 2 * Hkv * D floats
    assert figures["tail"] == sum(array.nbytes for array in tail.k + tail.v)
    sealed_keys = sum(k.nbytes for k in cache.k)
    assert figures["episode_on_disk"] == sum(layers) + sealed_keys + sum(src.nbytes for src in cache.src)
    assert figures["full_cache_at"]["30000"] == 30_000 * figures["full_cache_per_token"] == 30_000 * sum(layers) // 256


@pytest.mark.parametrize(("prefix", "sinks"), [(0, 4), (12, 16), (13, 16), (500, 16)])
def test_sinks_are_the_prefix_and_four_more_at_most_a_quarter_of_the_smallest_layer(prefix: int, sinks: int) -> None:
    graphs = BuildPlan(budget=64, alpha=0.0).resolve(DECODER, SENSITIVITIES, template(prefix))
    assert graphs.n_sinks == sinks
    assert graphs.n_sinks <= graphs.min_budget // 4


@pytest.mark.parametrize(("text", "count"), [("512", 512), ("4k", 4096), ("4K", 4096), (" 1k ", 1024), ("0", 0), ("007", 7)])
def test_parse_count(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "-1", "+1", "4.5k", "4kk", "4 k", "4m", "1e3", "0x10", "1" * 10, "1_000", "½"])
def test_parse_count_refuses_the_rest_and_says_how_to_write_it(text: str) -> None:
    with pytest.raises(UsageError, match="Write a whole number, like 512, or 4k for 4,096") as caught:
        parse_count(text)
    assert repr(text) in str(caught.value)
