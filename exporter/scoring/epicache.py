"""EpiCache's score: how much the medoids' text attends to a row (arXiv:2509.17396, section 3; the patched prompt)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def row_scores(prompt_logits: Tensor, row_mask: Tensor, prompt_valid: Tensor, row_maximum: Callable[[Tensor], Tensor]) -> Tensor:
    """Score of each cached or block row, ``[Hkv, S]`` in [0, 1].

    ``prompt_logits [Hkv, G*P, S]`` are the scaled logits of the prompt's tokens on those rows only: the prompt's own keys are
    left out of the denominator. ``row_mask [S]`` is additive; ``prompt_valid [P]`` is 1.0 for the scoring tokens. The maximum
    runs over the query group and the scoring tokens; ``row_maximum`` takes ``[Hkv, G*P, S]`` to ``[Hkv, S]``.
    """
    group = prompt_logits.shape[1] // prompt_valid.shape[0]
    weights = torch.softmax(prompt_logits + row_mask, dim=-1)
    return row_maximum(weights * prompt_valid.repeat(group)[None, :, None])
