"""Lowering to ExecuTorch with XNNPACK: the library's own call, and the same call with less work done twice."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, to_edge_transform_and_lower
from torch.export import ExportedProgram

# The release whose passes were read for the rules in fast_passes.
TESTED_VERSION = "1.5.1"


def lower_to_edge(
    programs: dict[str, ExportedProgram], fast: bool = True, progress: Callable[[str], None] | None = None
) -> EdgeProgramManager:
    """Every method of ``programs`` lowered to XNNPACK in one program, so that they share their weights.

    ``fast`` takes about a quarter of the time and gives the same bytes (docs/lowering.md). It is process-wide while it runs, so
    one lowering at a time. With another ExecuTorch than ``TESTED_VERSION`` it has no effect, which ``progress`` is told. Raises
    what ``to_edge_transform_and_lower`` raises.
    """
    installed = version("executorch")
    if fast and installed != TESTED_VERSION:
        if progress is not None:
            progress(f"fast lowering is tested with ExecuTorch {TESTED_VERSION}, not {installed}: lowering the slow way")
        fast = False
    if not fast:
        return _lower(programs, XnnpackPartitioner)
    # Imported here: both modules name internals that another release may not have.
    from exporter.targets.executorch.fast_partitioner import OneDecompositionPartitioner
    from exporter.targets.executorch.fast_passes import idle_passes_skipped

    with idle_passes_skipped():
        return _lower(programs, OneDecompositionPartitioner)


def _lower(programs: dict[str, ExportedProgram], partitioner: Callable[[], XnnpackPartitioner]) -> EdgeProgramManager:
    # No validity check, because it refuses what XNNPACK keeps whole; no dim-order copies, because every tensor is contiguous.
    config = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
    return to_edge_transform_and_lower(programs, partitioner={name: [partitioner()] for name in programs}, compile_config=config)
