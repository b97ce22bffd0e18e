"""Which rows stay is a total order: the slow, obvious choice, PyTorch and ONNX Runtime agree whatever is tied."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from exporter.graphs.attention import MASKED, PLAIN_OPS
from exporter.graphs.selection import kept_rows, take_rows
from exporter.scoring.epicache import row_scores
from runtime_py.manifest import GraphSignature, TensorSpec

HEADS, ROWS, BUDGET = 2, 40, 24
FEW = np.array([0.0, 1e-30, 0.25, 0.5, 1.0], np.float32)

Arrays = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]


def slow_choice(scores: list[float], valid: list[bool], sink: list[bool], budget: int) -> list[int]:
    """Sinks, then the highest scores, then free rows; ties to the lower position; in order of position."""

    def rank(row: int) -> tuple[int, float, int]:
        if not valid[row]:
            return 2, 0.0, row
        return (0, 0.0, row) if sink[row] else (1, -scores[row], row)

    return sorted(sorted(range(len(scores)), key=rank)[:budget])


def cases() -> Iterator[Arrays]:
    """Scores, valid and sink ``[2, 40]``: free rows in front and padding behind, few or many different scores, sinks."""
    draw = np.random.default_rng(4)
    for i in range(300):
        scores = draw.choice(FEW[: draw.integers(1, 6)], (HEADS, ROWS)) if i % 3 else draw.random((HEADS, ROWS), np.float32)
        free, padding = draw.integers(0, BUDGET + 1), draw.integers(0, 12)
        valid = np.zeros((HEADS, ROWS), np.float32)
        valid[:, free : ROWS - padding] = 1
        sink = valid * (draw.random((HEADS, ROWS)) < draw.choice([0.0, 0.1, 0.9]))
        yield scores.astype(np.float32), valid, sink.astype(np.float32)


def expected_rows(case: Arrays) -> list[list[int]]:
    values, valid, sink = case
    return [slow_choice(values[h].tolist(), (valid[h] > 0).tolist(), (sink[h] > 0).tolist(), BUDGET) for h in range(HEADS)]


def test_kept_rows_equal_the_obvious_choice() -> None:
    for case in cases():
        scores, valid, sink = (torch.from_numpy(part) for part in case)
        found = kept_rows(scores, valid, sink, BUDGET)
        assert found.dtype == torch.int64
        assert found.tolist() == expected_rows(case)


class Selection(nn.Module):
    """``kept_rows`` as a graph of its own."""

    def forward(self, scores: Tensor, valid: Tensor, sink: Tensor) -> Tensor:
        return kept_rows(scores, valid, sink, BUDGET)


def test_the_exported_selection_chooses_the_same_rows_in_onnx_runtime() -> None:
    import onnx_ir as ir
    import onnxruntime as ort

    from exporter.targets.onnx.export import export_graph

    names = ["scores", "valid", "sink"]
    signature = GraphSignature(
        [TensorSpec(name, "float32", [HEADS, ROWS]) for name in names], [TensorSpec("rows", "int64", [HEADS, BUDGET])]
    )
    model = ir.to_proto(export_graph(Selection(), signature)).SerializeToString()
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    for case in cases():
        (found,) = session.run(None, dict(zip(names, case, strict=True)))
        assert found.tolist() == expected_rows(case)


def test_take_rows_takes_each_heads_own_rows() -> None:
    rows = torch.arange(2 * 5 * 3, dtype=torch.float32).reshape(2, 5, 3)
    index = torch.tensor([[0, 4, 2], [1, 1, 3]])
    assert torch.equal(take_rows(rows, index), torch.stack([rows[0][index[0]], rows[1][index[1]]]))
    assert take_rows(rows[..., 0].to(torch.int32), index).tolist() == [[0, 12, 6], [18, 18, 24]]


@pytest.mark.parametrize("n_valid", [1, 2, 3])
def test_row_scores_are_the_largest_attention_over_group_and_scoring_tokens(n_valid: int) -> None:
    heads, group, prompt, rows = 2, 3, 3, 6
    logits = torch.randn(heads, group * prompt, rows, generator=torch.Generator().manual_seed(2)) * 3
    hidden = [0, 5]  # a free row and a padded one
    mask = torch.zeros(rows)
    mask[hidden] = MASKED
    valid = (torch.arange(prompt) < n_valid).float()
    found = row_scores(logits, mask, valid, PLAIN_OPS.row_maximum)
    for head in range(heads):
        best = [0.0] * rows
        for g in range(group):
            for p in range(n_valid):
                weights = [0.0 if r in hidden else math.exp(logits[head, g * prompt + p, r].item()) for r in range(rows)]
                best = [max(b, w / sum(weights)) for b, w in zip(best, weights, strict=True)]
        assert found[head].tolist() == pytest.approx(best, abs=1e-6)
        assert found[head][hidden].tolist() == [0.0, 0.0]
