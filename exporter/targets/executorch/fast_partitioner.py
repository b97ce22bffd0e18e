"""An XNNPACK partitioner that lets a program be decomposed once instead of three times."""

from __future__ import annotations

from collections.abc import Callable

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir.tracer import _default_decomposition_table
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Node


class OneDecompositionPartitioner(XnnpackPartitioner):
    """For one program, through two public hooks of ExecuTorch's ``Partitioner``; the results equal those of the parent.

    The parent names operations that XNNPACK takes whole (``linear``, quantisation) and a filter on their instances. That costs
    three decompositions: one that only makes the program functional, one that stops at those operations, and one for what the
    filter refuses, with the accepted instances hidden behind stand-ins. Where the filter accepts all of them the second is all
    that is needed, and ExecuTorch itself raises an error if such an operation is left undelegated in the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._takes_all = True

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[OpOverload], Callable[[Node], bool] | None]:
        operations, accepts = super().ops_to_not_decompose(ep)
        return operations, None if self._takes_all else accepts

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        operations, _ = super().ops_to_not_decompose(exported_program)
        table = _default_decomposition_table()
        for operation in operations:
            table.pop(operation, None)
        once = exported_program.run_decompositions(table)
        _, accepts = super().ops_to_not_decompose(once)
        self._takes_all = all(accepts(node) for node in once.graph.nodes if node.target in operations)
        if not self._takes_all:
            return exported_program
        # ExecuTorch now asks for a functional program, then for this same table: it is both already. Only this object is changed.
        once.run_decompositions = lambda *_, **__: once
        return once
