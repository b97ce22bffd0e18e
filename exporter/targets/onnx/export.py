"""One PyTorch graph to one ONNX model: exported unoptimised, then folded, because that is fast and keeps weight names."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings

import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from onnxscript.optimizer import fold_constants
from torch import nn

from exporter.graphs.signatures import example_inputs
from runtime_py.errors import WorkError
from runtime_py.manifest import GraphSignature

OPSET = 21


def export_graph(module: nn.Module, signature: GraphSignature) -> ir.Model:
    """Export ``module`` so that its inputs and outputs are named, typed and shaped as ``signature`` says.

    Parameters keep their PyTorch names as initializers. Raises ``WorkError`` when the exported interface differs.
    """
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module,
                (),
                kwargs=example_inputs(signature),
                dynamo=True,
                opset_version=OPSET,
                optimize=False,
                verbose=False,
            )
    finally:
        logger.setLevel(level)
    assert program is not None
    model = program.model
    fold_constants(model)
    for each in (
        passes.RemoveUnusedNodesPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.IdentityEliminationPass(),
        passes.RemoveUnusedNodesPass(),
        passes.ClearMetadataAndDocStringPass(),
    ):
        each(model)
    _name_interface(model, signature)
    return model


def _name_interface(model: ir.Model, signature: GraphSignature) -> None:
    """Rename outputs to the signature's names and check that every input and output is what it says."""
    for kind, values, specs in (
        ("input", model.graph.inputs, signature.inputs),
        ("output", model.graph.outputs, signature.outputs),
    ):
        if len(values) != len(specs):
            raise WorkError(f"The exported graph has {len(values)} {kind}s, the contract {len(specs)}.")
        for value, spec in zip(values, specs, strict=True):
            if kind == "output":
                value.name = spec.name
            shape = [d if isinstance(d, int) else str(d) for d in value.shape] if value.shape is not None else None
            dtype = value.dtype.numpy().name if value.dtype is not None else None
            if (value.name, dtype, shape) != (spec.name, spec.dtype, spec.shape):
                raise WorkError(f"The exported {kind} {value.name} {dtype} {shape} is not the contract's {spec}.")
