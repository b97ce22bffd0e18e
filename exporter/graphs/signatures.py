"""Names, shapes and dtypes of every graph's inputs and outputs: one table for lowering, engines and the manifest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from runtime_py.manifest import EmbedderInfo, GraphPlan, GraphSignature, ModelShape, TensorSpec

T = TypeVar("T")
_DTYPES = {"int32": torch.int32, "float32": torch.float32}


def signatures(shape: ModelShape, plan: GraphPlan, embedder: EmbedderInfo) -> dict[str, GraphSignature]:
    """The I/O signature of ``prefill``, ``query``, ``decode`` and ``embed``, in the order of the graphs' arguments."""
    length, dimension = embedder.length, embedder.dimension
    return {
        "prefill": _prefill(shape, plan),
        "query": _query(shape, plan, plan.query),
        "decode": _query(shape, plan, 1),
        "embed": GraphSignature(
            [TensorSpec("tokens", "int32", [1, length]), _count("n_tokens")],
            [TensorSpec("vector", "float32", [dimension])],
        ),
    }


def _count(name: str) -> TensorSpec:
    return TensorSpec(name, "int32", [1])


def _per_layer(name: str, shapes: list[list[int]], dtype: str = "float32") -> list[TensorSpec]:
    return [TensorSpec(f"{name}_{layer}", dtype, shape) for layer, shape in enumerate(shapes)]


def _prefill(shape: ModelShape, plan: GraphPlan) -> GraphSignature:
    table = [plan.max_budget + plan.block + plan.prompt, shape.head_dim // 2]
    src = [[shape.n_kv_heads, budget] for budget in plan.layer_budgets]
    rows = [[*each, shape.head_dim] for each in src]
    return GraphSignature(
        [
            TensorSpec("tokens", "int32", [1, plan.block]),
            TensorSpec("prompt", "int32", [1, plan.prompt]),
            _count("n_tokens"),
            _count("n_prompt"),
            _count("n_seen"),
            TensorSpec("cos", "float32", table),
            TensorSpec("sin", "float32", table),
            *_per_layer("k", rows),
            *_per_layer("v", rows),
            *_per_layer("src", src, "int32"),
        ],
        [*_per_layer("kept_k", rows), *_per_layer("kept_v", rows), *_per_layer("kept_src", src, "int32")],
    )


def _query(shape: ModelShape, plan: GraphPlan, rows: int) -> GraphSignature:
    sealed = [[shape.n_kv_heads, budget, shape.head_dim] for budget in plan.layer_budgets]
    tail = [[shape.n_kv_heads, plan.tail, shape.head_dim]] * shape.n_layers
    new = [[shape.n_kv_heads, rows, shape.head_dim]] * shape.n_layers
    table = [rows, shape.head_dim // 2]
    return GraphSignature(
        [
            TensorSpec("tokens", "int32", [1, rows]),
            _count("n_tokens"),
            _count("n_seen"),
            _count("n_tail"),
            TensorSpec("cos", "float32", table),
            TensorSpec("sin", "float32", table),
            *_per_layer("k", sealed),
            *_per_layer("v", sealed),
            *_per_layer("tail_k", tail),
            *_per_layer("tail_v", tail),
        ],
        [
            TensorSpec("logits", "float32", [1, shape.vocab_size]),
            *_per_layer("new_k", new),
            *_per_layer("new_v", new),
        ],
    )


def example_inputs(signature: GraphSignature) -> dict[str, Any]:
    """Zero tensors of the right shapes, nested as a graph's ``forward`` takes them."""
    return nest({s.name: torch.zeros(s.shape, dtype=_DTYPES[s.dtype]) for s in signature.inputs})


def nest(flat: Mapping[str, T]) -> dict[str, T | list[T]]:
    """``{"k_0": a, "k_1": b, "n_seen": c}`` -> ``{"k": [a, b], "n_seen": c}``."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        if match := re.fullmatch(r"(.+)_(\d+)", name):
            nested.setdefault(match[1], []).append(value)
        else:
            nested[name] = value
    return nested


def flatten(outputs: object) -> list[Tensor]:
    """The tensors of a graph's result in signature order."""
    if isinstance(outputs, Tensor):
        return [outputs]
    assert isinstance(outputs, (list, tuple))
    return [tensor for part in outputs for tensor in flatten(part)]
