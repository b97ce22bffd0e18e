"""The ExecuTorch target: one program with prefill, query and decode, and one with the embedder, both for XNNPACK."""

from __future__ import annotations

import copy
import importlib.metadata
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from executorch.exir import ExecutorchBackendConfig
from executorch.exir.passes import MemoryPlanningPass
from torch import nn

from exporter.graphs.build import build_graphs
from exporter.graphs.signatures import example_inputs
from exporter.models.decoder import Decoder
from exporter.models.decoder_encoder import SentenceEncoder
from exporter.quantization.int4 import quantize_decoder_, quantize_encoder_, unpacked
from exporter.targets.base import GraphSource, Progress
from exporter.targets.executorch.fast_lowering import lower_to_edge
from exporter.targets.executorch.inspection import check_no_cache_copy, operators_outside
from exporter.targets.executorch.rewrite import XNNPACK_OPS, rewritten
from runtime_py.manifest import GraphSignature, Target

# file below executorch/ -> method name in the program by graph
_PROGRAMS: dict[str, dict[str, str]] = {
    "model.pte": {"prefill": "prefill", "query": "query", "decode": "decode"},
    "embedder.pte": {"embed": "forward"},
}


class ExecutorchLowering:
    """See ``TargetLowering``."""

    name = "executorch"

    def quantized(self, decoder: Decoder, encoder: SentenceEncoder, weights: dict[str, str]) -> tuple[Decoder, SentenceEncoder]:
        """See ``TargetLowering.quantized``."""
        quantized = _quantized(decoder, encoder, weights)
        return unpacked(quantized[0]), unpacked(quantized[1])

    def rounded_graphs(self, weights: dict[str, str]) -> frozenset[str]:
        """See ``TargetLowering.rounded_graphs``: all integer products of XNNPACK take activations of 8 bits."""
        return frozenset(graph for graph, kind in weights.items() if kind in ("int4", "int8"))

    def lower(self, source: GraphSource, folder: Path, progress: Progress) -> Target:
        """Write ``executorch/model.pte`` and ``executorch/embedder.pte``."""
        out = folder / self.name
        out.mkdir(parents=True)
        decoder, encoder = _quantized(source.decoder, source.encoder, source.weights)
        modules = build_graphs(rewritten(decoder), rewritten(encoder), source.plan, XNNPACK_OPS)
        details: dict[str, Any] = {}
        for file, methods in _PROGRAMS.items():
            graphs = {method: modules[graph] for graph, method in methods.items()}
            signatures = {method: source.signatures[graph] for graph, method in methods.items()}
            details |= _lower_program(graphs, signatures, out / file, progress)
        return Target(
            graphs={graph: f"{self.name}/{file}" for file, methods in _PROGRAMS.items() for graph in methods},
            minimum_runtime=f"executorch {importlib.metadata.version('executorch')}",
            details={"delegate": "XNNPACK", "operators_outside_delegate": details},
        )


def _quantized(decoder: Decoder, encoder: SentenceEncoder, weights: dict[str, str]) -> tuple[Decoder, SentenceEncoder]:
    """Copies in the form that ExecuTorch recognises; a model that stays in float32 is returned as it is."""
    return (
        quantize_decoder_(copy.deepcopy(decoder)) if weights["prefill"] == "int4" else decoder,
        quantize_encoder_(copy.deepcopy(encoder)) if weights["embed"] == "int8" else encoder,
    )


def _lower_program(
    graphs: Mapping[str, nn.Module],
    signatures: Mapping[str, GraphSignature],
    path: Path,
    progress: Progress,
) -> dict[str, dict[str, int]]:
    """Export, lower and write one program; returns the operators that each method leaves outside the delegate."""
    started = time.monotonic()
    with torch.no_grad():
        programs = {
            method: torch.export.export(module, (), kwargs=example_inputs(signatures[method]), strict=False)
            for method, module in graphs.items()
        }
    exported = time.monotonic()
    progress(f"{path.name}: exported {', '.join(programs)}, {exported - started:.0f} s; lowering")
    edge = lower_to_edge(programs, progress=progress)
    lowered = time.monotonic()
    outside = {}
    for method in programs:
        module = edge.exported_program(method).graph_module
        outside[method] = operators_outside(module)
        check_no_cache_copy(module, method)
    program = edge.to_executorch(
        ExecutorchBackendConfig(
            # Inputs are taken by pointer; outputs stay planned, because the stock Android class cannot set them.
            memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False),
            do_quant_fusion_and_const_prop=True,
        )
    )
    with path.open("wb") as file:
        program.write_to_file(file)
    delegates = {method: counts.get("delegate", 0) for method, counts in outside.items()}
    progress(
        f"{path.name}: {path.stat().st_size / 1e6:.1f} MB, lowered in {lowered - exported:.0f} s, "
        f"written in {time.monotonic() - lowered:.0f} s, delegates {delegates}"
    )
    return outside


LOWERING = ExecutorchLowering()
