"""Builds with random weights: what they borrow, and how much they read. Sizes, memory and speed are real, answers are noise."""

from __future__ import annotations

import dataclasses
import json
from importlib.resources import files

import numpy as np

from runtime_py.episodes.history import History
from runtime_py.episodes.rendering import Encode, TokenStream
from runtime_py.manifest import GraphPlan

EVICTING_BLOCKS = 2
_LENDER = "profiles/smollm2-135m.json"


def borrowed_sensitivities(n_layers: int) -> list[float]:
    """SmolLM2's ``s_l`` stretched to ``n_layers``: random layers have none of their own, and real budgets are uneven."""
    found = json.loads(files("calibration").joinpath(_LENDER).read_text(encoding="utf-8"))["sensitivities"]
    places = np.linspace(0, len(found) - 1, n_layers)
    return [float(s) for s in np.interp(places, np.arange(len(found)), found)]


def shortened(history: History, plan: GraphPlan, prefix: list[int], encode: Encode) -> History:
    """The first utterances of ``history``, enough for ``EVICTING_BLOCKS`` blocks behind the first eviction."""
    wanted = plan.min_budget + EVICTING_BLOCKS * plan.block
    stream = TokenStream(prefix, encode, history.speakers)
    for i, utterance in enumerate(history.utterances, start=1):
        stream.append(utterance)
        if len(stream) >= wanted:
            return dataclasses.replace(history, utterances=history.utterances[:i])
    return history
