"""The ONNX Runtime target: four graphs, one weights file for the language model's three."""

from __future__ import annotations

import copy
import time
from pathlib import Path

import onnx_ir as ir
import onnxruntime

from exporter.graphs.build import build_graphs
from exporter.models.decoder import Decoder
from exporter.models.decoder_encoder import SentenceEncoder
from exporter.quantization.int8 import fake_quantize_
from exporter.targets.base import GraphSource, Progress
from exporter.targets.onnx.export import export_graph
from exporter.targets.onnx.int8 import INT8_ACTIVATION_GRAPHS, Int8Codes, quantize_model
from exporter.targets.onnx.weights import WeightsFile
from runtime_py.manifest import Target


class OnnxLowering:
    """See ``TargetLowering``."""

    name = "onnx"

    def quantized(self, decoder: Decoder, encoder: SentenceEncoder, weights: dict[str, str]) -> tuple[Decoder, SentenceEncoder]:
        """See ``TargetLowering.quantized``."""
        return (
            fake_quantize_(copy.deepcopy(decoder)) if weights["prefill"] == "int8" else decoder,
            fake_quantize_(copy.deepcopy(encoder)) if weights["embed"] == "int8" else encoder,
        )

    def rounded_graphs(self, weights: dict[str, str]) -> frozenset[str]:
        """See ``TargetLowering.rounded_graphs``."""
        return frozenset(graph for graph in INT8_ACTIVATION_GRAPHS if weights[graph] == "int8")

    def lower(self, source: GraphSource, folder: Path, progress: Progress) -> Target:
        """Write ``onnx/<graph>.onnx`` and ``onnx/weights.bin``; the embedder is one file of its own."""
        out = folder / self.name
        out.mkdir(parents=True)
        modules = build_graphs(source.decoder, source.encoder, source.plan)
        codes = Int8Codes(modules)
        shared = WeightsFile(out / "weights.bin")
        files: dict[str, str] = {}
        for graph, module in modules.items():
            started = time.monotonic()
            model = export_graph(module, source.signatures[graph])
            if source.weights[graph] == "int8":
                quantize_model(model, codes, graph)
            if graph != "embed":
                shared.externalize(model)
            path = out / ("embedder.onnx" if graph == "embed" else f"{graph}.onnx")
            ir.save(model, path)
            files[graph] = f"{self.name}/{path.name}"
            size = path.stat().st_size / 1e6
            progress(f"{graph}: {len(list(model.graph))} nodes, {size:.1f} MB, {time.monotonic() - started:.0f} s")
        shared.close()
        return Target(graphs=files, minimum_runtime=f"onnxruntime {onnxruntime.__version__}")


LOWERING = OnnxLowering()
