"""Passes of ExecuTorch 1.5.1 that would leave a graph as it is are not run.

Nearly every pass retraces its whole graph with fake tensors, whether or not it found anything to change, and a transformer gives
most of them nothing. Each rule below is the condition under which the pass of that class, by its source, changes a graph; a pass
without a rule always runs, so a pass that a later release adds costs time, never correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from executorch.backends.xnnpack import _passes as xnnpack
from executorch.backends.xnnpack._passes import XNNPACKPassManager
from executorch.exir.dialects._ops import ops
from executorch.exir.passes.dim_order_ops_registry import MemoryFormatOpsMap
from executorch.exir.passes.normalize_transpose_pass import NormalizeTransposePass
from executorch.exir.passes.replace_broken_ops_with_function_ops_pass import ReplaceBrokenOpsWithFunctionalOpsPass
from executorch.exir.passes.sym_to_tensor_pass import SymToTensorPass
from executorch.exir.program import _program
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils import _pytree as pytree

Rule = Callable[[Graph], bool]

_edge = ops.edge.aten
_COPIES = (_edge._to_copy.default,)
_BATCH_NORMS = xnnpack.DecomposeBatchNorm.BATCH_NORM_OPS
_CHANNELS_LAST = xnnpack.ChannelsLastTaggedReshapePass


def _calls(graph: Graph) -> Iterator[Node]:
    return (node for node in graph.nodes if node.op == "call_function")


def _contains(targets: Iterable[object]) -> Rule:
    """The pass looks for these operations only."""
    wanted = frozenset(targets)
    return lambda graph: any(node.target in wanted for node in _calls(graph))


def _passes_annotations(graph: Graph) -> bool:
    """The pass hands ``custom`` metadata from a node to the (de)quantisation that reads it."""
    return any("custom" in node.meta for node in graph.nodes)


def _folds_constants(graph: Graph) -> bool:
    """The pass computes a call none of whose arguments depends on an input; without a first one there is no second."""
    return any(all(source.op == "get_attr" for source in node.all_input_nodes) for node in _calls(graph))


def _joins_many(graph: Graph) -> bool:
    """The pass splits ``cat`` of more than five tensors."""
    return any(node.target is _edge.cat.default and len(node.args[0]) > 5 for node in _calls(graph))  # type: ignore[arg-type]


def _has_channels_last(graph: Graph) -> bool:
    """The pass starts from an operation on channels-last images, or from an input or output stored that way."""
    ends = [node for node in graph.nodes if node.op == "placeholder"] + list(graph.output_node().all_input_nodes)
    values = [node.meta.get("val") for node in ends]
    stored = any(not isinstance(value, torch.Tensor) or _CHANNELS_LAST._is_nhwc_tensor(value) for value in values)
    return stored or _contains([*_CHANNELS_LAST.memory_sensitive_ops_nhwc, *_COPIES])(graph)


def _has_views(graph: Graph) -> bool:
    """The pass turns views into copies."""
    return any(not isinstance(n.target, torch._ops.OpOverload) or n.target.is_view for n in _calls(graph) if _is_torch(n))


def _is_torch(node: Node) -> bool:
    """False for ``getitem`` and its like, which that pass never sees."""
    return getattr(node.target, "__module__", "") != "_operator"


def _has_symbols(graph: Graph) -> bool:
    """The pass turns symbolic numbers into tensors; static shapes have none."""
    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return any(isinstance(value, symbolic) for node in graph.nodes for value in pytree.tree_leaves(node.meta.get("val")))


RULES: dict[type, Rule] = {
    # Inside the delegate, edge operations.
    xnnpack.XNNPACKRemoveCloneOpsTransform: _contains(xnnpack.XNNPACKRemoveCloneOpsTransform.clone_ops),
    xnnpack.DimOrderOpsRevertPass: _contains(MemoryFormatOpsMap),
    xnnpack.ConvertToUpsampleBilinear2d: _contains([_edge.upsample_bilinear2d.vec]),
    xnnpack.PropagateCustomMetaPass: _passes_annotations,
    xnnpack.ConvertToSDPAPass: _contains([_edge.where.self]),  # of a pattern of 12 operations, one that XNNPACK never takes
    xnnpack.ConstPropPass: _folds_constants,
    xnnpack.FuseBatchNormPass: _contains(_BATCH_NORMS),
    xnnpack.DecomposeBatchNorm: _contains(_BATCH_NORMS),
    xnnpack.FuseActivationPass: _contains(xnnpack.FuseActivationPass.FUSEABLE_ACTIVATIONS),
    xnnpack.DecomposeConcatenate: _joins_many,
    xnnpack.RemoveGetItemPass: _contains([_edge.max_pool2d_with_indices.default, _edge.max.dim]),
    xnnpack.InsertPadQDQPass: _contains([_edge.constant_pad_nd.default]),
    xnnpack.Conv1dUnsqueezePass: _contains([_edge.convolution.default]),
    xnnpack.PReLUReshapePass: _contains([_edge._prelu_kernel.default]),
    xnnpack.ChannelsLastTaggedReshapePass: _has_channels_last,
    xnnpack.RemoveRedundantCopyPass: _contains(_COPIES),
    # On the way from torch to edge operations.
    NormalizeTransposePass: _contains([torch.ops.aten.t.default]),
    ReplaceBrokenOpsWithFunctionalOpsPass: _has_views,
    SymToTensorPass: _has_symbols,
}


def may_change(pass_type: type, module: GraphModule) -> bool:
    """Whether a pass of this class can change ``module``. True where that is not known: no rule, or nested graphs."""
    rule = RULES.get(pass_type)
    nested = any(isinstance(child, GraphModule) for child in module.children())
    return rule is None or nested or rule(module.graph)


@contextmanager
def idle_passes_skipped() -> Iterator[None]:
    """Within the block, lowering leaves out passes that would change nothing. Process-wide: not for concurrent lowerings."""
    transform, to_edge_passes = XNNPACKPassManager.transform, _program.base_pre_op_replace_passes

    def transform_where_needed(self: Any) -> torch.export.ExportedProgram:
        program = self.exported_program
        # One at a time: a pass may bring in what a later one looks for.
        for pass_type in self.passes:
            if may_change(pass_type, program.graph_module):
                program = transform(XNNPACKPassManager(program, [pass_type]))
        return program

    XNNPACKPassManager.transform = transform_where_needed
    _program.base_pre_op_replace_passes = [_where_needed(each) for each in to_edge_passes]
    try:
        yield
    finally:
        XNNPACKPassManager.transform = transform
        _program.base_pre_op_replace_passes = to_edge_passes


def _where_needed(wrapped: Any) -> Callable[[GraphModule], PassResult]:
    # torch wraps each pass in a function that keeps it as __wrapped__.
    pass_type = type(getattr(wrapped, "__wrapped__", wrapped))
    return lambda module: wrapped(module) if may_change(pass_type, module) else PassResult(module, False)
