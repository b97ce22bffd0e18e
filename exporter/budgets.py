"""Layer budgets: which layer keeps how many rows (arXiv:2509.17396, section 3.3; the sum is exact here)."""

from __future__ import annotations

from collections.abc import Sequence

from runtime_py.errors import UsageError

FLOOR = 0.25  # of the average budget: no layer goes blind


def layer_budgets(sensitivities: Sequence[float], budget: int, alpha: float, granularity: int = 8) -> list[int]:
    """Rows per layer, M_l, multiples of ``granularity``, summing to exactly ``len(sensitivities) * budget``.

    ``M_l`` is proportional to ``(1 - s_l)^alpha``. Layers below the floor are lifted to it and the others share what is left
    (water-filling), so the promised memory is kept. Raises ``UsageError`` when ``budget`` is no multiple of ``granularity``.
    """
    if budget % granularity:
        low = budget // granularity * granularity
        raise UsageError(f"Budget {budget} is not a multiple of {granularity} rows. Nearest: {low} or {low + granularity}.")
    total = len(sensitivities) * (budget // granularity)  # in units of the granularity from here on
    floor = -(-budget * FLOOR // granularity)
    shares = _water_fill([max(1.0 - s, 0.0) ** alpha for s in sensitivities], float(total), floor)
    units = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (units[i] - shares[i], i))
    for i in by_remainder[: total - sum(units)]:
        units[i] += 1
    return [unit * granularity for unit in units]


def _water_fill(weights: list[float], total: float, floor: float) -> list[float]:
    """Shares of ``total`` in proportion to ``weights``, none below ``floor``."""
    if not any(weights):
        weights = [1.0] * len(weights)
    at_floor: set[int] = set()
    while True:
        rest = total - floor * len(at_floor)
        scale = sum(w for i, w in enumerate(weights) if i not in at_floor)
        shares = [floor if i in at_floor else rest * w / scale for i, w in enumerate(weights)]
        below = {i for i, share in enumerate(shares) if share < floor} - at_floor
        if not below:
            return shares
        at_floor |= below
