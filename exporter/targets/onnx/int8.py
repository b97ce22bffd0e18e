"""int8 weights in ONNX: Gemm becomes MatMulNBits and Gather becomes GatherBlockQuantized (com.microsoft, 8 bits)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from exporter.quantization.int8 import GROUP, Int8Weight, quantizable, quantize

_DOMAIN = "com.microsoft"
# MatMulNBits' accuracy_level. Float32 activations dequantise the weights at every call: nothing beside a block of 512 rows,
# 7 times the work beside one token. So only query and decode quantise their activations too (int8, groups of 32).
_FLOAT32_ACTIVATIONS, _INT8_ACTIVATIONS = 1, 4
INT8_ACTIVATION_GRAPHS = ("query", "decode")


class Int8Codes:
    """Codes of a module's weights by parameter name, each quantised once however many graphs use it."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._weights: dict[str, torch.Tensor] = {}
        for module in modules.values():
            for name, part in quantizable(module).items():
                weight = part.weight
                assert isinstance(weight, torch.Tensor)
                self._weights[f"{name}.weight"] = weight
        self._done: dict[int, Int8Weight] = {}

    def get(self, name: str) -> Int8Weight | None:
        """The codes of parameter ``name``, or None when it is not quantised."""
        weight = self._weights.get(name)
        if weight is None:
            return None
        if id(weight) not in self._done:
            self._done[id(weight)] = quantize(weight)
        return self._done[id(weight)]


def quantize_model(model: ir.Model, codes: Int8Codes, name: str) -> None:
    """Replace, in place, every Gemm and Gather of the graph ``name`` whose weight has codes."""
    accuracy = _INT8_ACTIVATIONS if name in INT8_ACTIVATION_GRAPHS else _FLOAT32_ACTIVATIONS
    model.opset_imports[_DOMAIN] = 1
    graph = model.graph
    for node in list(graph):
        position = {"Gemm": 1, "Gather": 0}.get(node.op_type)
        weight = node.inputs[position] if position is not None else None
        label = weight.name if weight is not None else None
        quantized = codes.get(label) if label is not None and label in graph.initializers else None
        if label is None or quantized is None:
            continue
        if node.op_type == "Gather":
            _gather(graph, node, label, quantized)
        else:
            _matmul(graph, node, label, quantized, accuracy)
    for name in [n for n, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]


def _initializer(graph: ir.Graph, name: str, values: np.ndarray) -> ir.Value:
    if name not in graph.initializers:
        tensor = ir.tensor(values, name=name)
        graph.register_initializer(
            ir.Value(name=name, shape=ir.Shape(values.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        )
    return graph.initializers[name]


def _insert(graph: ir.Graph, old: ir.Node, new: list[ir.Node]) -> None:
    """Put ``new`` in the place of ``old``; the last of them takes over its output, name included."""
    output, last = old.outputs[0], new[-1].outputs[0]
    last.name, last.shape, last.type = output.name, output.shape, output.type
    graph.insert_before(old, new)
    ir.convenience.replace_all_uses_with(output, last, replace_graph_outputs=True)
    graph.remove(old, safe=True)


def _matmul(graph: ir.Graph, node: ir.Node, name: str, weight: Int8Weight, accuracy: int) -> None:
    rows, groups = weight.scales.shape
    codes = _initializer(graph, f"{name}.codes", weight.codes.numpy())
    scales = _initializer(graph, f"{name}.scales", weight.scales.numpy().reshape(-1))
    product = ir.node(
        "MatMulNBits",
        [node.inputs[0], codes, scales],
        {"K": groups * GROUP, "N": rows, "bits": 8, "block_size": GROUP, "accuracy_level": accuracy},
        domain=_DOMAIN,
    )
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    new = [product] if bias is None else [product, ir.node("Add", [product.outputs[0], bias])]
    _insert(graph, node, new)


def _gather(graph: ir.Graph, node: ir.Node, name: str, weight: Int8Weight) -> None:
    groups = weight.scales.shape[1]
    codes = _initializer(graph, f"{name}.codes", weight.codes.numpy())
    scales = _initializer(graph, f"{name}.row_scales", weight.scales.numpy()[..., None])
    rows = ir.node(
        "GatherBlockQuantized",
        [codes, node.inputs[1], scales],
        {"bits": 8, "block_size": GROUP, "gather_axis": 0, "quantize_axis": 2},
        domain=_DOMAIN,
    )
    shape = _initializer(graph, f"{name}.row_shape", np.array([-1, groups * GROUP], np.int64))
    _insert(graph, node, [rows, ir.node("Reshape", [rows.outputs[0], shape])])
