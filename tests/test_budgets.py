"""Layer budgets: the promised memory is kept exactly, no layer goes blind, sensitive layers get more."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from exporter.budgets import FLOOR, layer_budgets
from runtime_py.errors import UsageError


def draws() -> list[tuple[list[float], int, float, int]]:
    """Random models: flat, steep, degenerate and negative sensitivities, every granularity in use."""
    draw = random.Random(1)
    cases = []
    for _ in range(400):
        layers, granularity = draw.randint(1, 40), draw.choice([1, 8, 64])
        low = draw.choice([-1.0, 0.0, 0.9, 0.999])
        values = [draw.choice([1.0, 0.0, draw.uniform(low, 1.0)]) for _ in range(layers)]
        cases.append((values, draw.randint(1, 128) * granularity, draw.choice([0.0, 0.5, 1.0, 2.0, 7.3]), granularity))
    return cases


def test_sum_floor_and_granularity_hold_for_random_models() -> None:
    floors_used = 0
    for sensitivities, budget, alpha, granularity in draws():
        budgets = layer_budgets(sensitivities, budget, alpha, granularity)
        assert len(budgets) == len(sensitivities)
        assert sum(budgets) == len(sensitivities) * budget
        assert all(m % granularity == 0 for m in budgets)
        floor = math.ceil(FLOOR * budget / granularity) * granularity
        assert min(budgets) >= floor
        floors_used += min(budgets) == floor < budget
    assert floors_used > 100  # or the floor was never tried


def test_more_sensitive_layers_get_at_least_as_much() -> None:
    for sensitivities, budget, alpha, granularity in draws():
        budgets = layer_budgets(sensitivities, budget, alpha, granularity)
        pairs = sorted(zip(sensitivities, budgets, strict=True))
        for (low, more), (high, less) in itertools.pairwise(pairs):
            assert more >= less or (low == high and less - more == granularity)


@pytest.mark.parametrize("sensitivities", [[0.1, 0.9, 0.99], [1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [0.5]])
def test_alpha_zero_is_uniform(sensitivities: list[float]) -> None:
    assert layer_budgets(sensitivities, 128, 0.0) == [128] * len(sensitivities)


def test_equal_layers_share_equally_at_any_alpha() -> None:
    assert layer_budgets([0.7] * 5, 96, 3.0) == [96] * 5
    assert layer_budgets([1.0] * 5, 96, 3.0) == [96] * 5  # all weights are zero


def test_shares_are_proportional_above_the_floor() -> None:
    assert layer_budgets([0.9, 0.8, 0.7], 128, 1.0, 8) == [64, 128, 192]
    assert layer_budgets([0.9, 0.8], 80, 2.0, 8) == [32, 128]


def test_lifted_layers_are_paid_for_by_the_others() -> None:
    # Weights 1 : 1 : 98. A clamp after normalising would keep 24 + 24 + 294 of a promised 300.
    assert layer_budgets([0.99, 0.99, 0.02], 96, 1.0, 8) == [24, 24, 240]


def test_largest_remainders_get_what_rounding_left_ties_to_the_lower_layer() -> None:
    # 6 units in shares of 2.4, 2.4 and 1.2: one is left over, for one of the first two.
    assert layer_budgets([0.0, 0.0, 0.5], 16, 1.0, 8) == [24, 16, 8]
    assert layer_budgets([0.5, 0.0, 0.0], 16, 1.0, 8) == [8, 24, 16]


@pytest.mark.parametrize(("budget", "granularity", "near"), [(100, 8, ("96", "104")), (4000, 64, ("3968", "4032"))])
def test_a_budget_between_multiples_is_refused_with_both_neighbours(budget: int, granularity: int, near: tuple[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        layer_budgets([0.5, 0.6], budget, 1.0, granularity)
    assert all(text in str(caught.value) for text in (str(budget), str(granularity), *near))
