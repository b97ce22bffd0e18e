"""The PyTorch engine: the same graphs run eagerly, from the checkpoint itself and not from the exported files."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from exporter.graphs.embed import EmbedGraph
from exporter.graphs.prefill import PrefillGraph
from exporter.graphs.query import QueryGraph
from exporter.graphs.signatures import flatten, nest, signatures
from exporter.models.decoder import Decoder
from exporter.models.encoder import Encoder
from exporter.quantization.int8 import fake_quantize_
from runtime_py.engines.base import Array
from runtime_py.manifest import EmbedderInfo, GraphPlan, GraphSignature, ModelShape


def build_graphs(decoder: Decoder, encoder: Encoder, plan: GraphPlan) -> dict[str, nn.Module]:
    """The four graphs as modules that share their weights."""
    return {
        "prefill": PrefillGraph(decoder, plan).eval(),
        "query": QueryGraph(decoder, plan, plan.query).eval(),
        "decode": QueryGraph(decoder, plan, 1).eval(),
        "embed": EmbedGraph(encoder, plan.embed_length).eval(),
    }


class TorchEngine:
    """See ``runtime_py.engines.base.Engine``."""

    name = "torch"

    def __init__(self, modules: dict[str, nn.Module], graph_signatures: dict[str, GraphSignature]) -> None:
        self._modules, self._signatures = modules, graph_signatures

    @staticmethod
    def create(decoder: Decoder, encoder: Encoder, shape: ModelShape, plan: GraphPlan, embedder: EmbedderInfo) -> TorchEngine:
        """An engine over float32 models, quantised as ``plan.weights`` says; the models given are left as they are."""
        if plan.weights == "int8":
            decoder = fake_quantize_(copy.deepcopy(decoder))
        if embedder.weights == "int8":
            encoder = fake_quantize_(copy.deepcopy(encoder))
        return TorchEngine(build_graphs(decoder, encoder, plan), signatures(shape, plan, embedder))

    def run(self, graph: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See ``Engine.run``."""
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # mapped caches are read-only, which the graphs respect
            tensors = {spec.name: torch.from_numpy(np.asarray(inputs[spec.name])) for spec in self._signatures[graph].inputs}
            outputs = flatten(self._modules[graph](**nest(tensors)))
        return {s.name: t.numpy() for s, t in zip(self._signatures[graph].outputs, outputs, strict=True)}

    def close(self) -> None:
        """Nothing to release: the models belong to the caller."""
