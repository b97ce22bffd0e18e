"""The PyTorch engine: the same graphs run eagerly, from the checkpoint itself and not from the exported files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from exporter.graphs.build import build_graphs
from exporter.graphs.prefill import PrefillGraph
from exporter.graphs.signatures import flatten, nest, signatures
from exporter.models.decoder import Decoder
from exporter.models.decoder_encoder import SentenceEncoder
from runtime_py.engines.base import Array
from runtime_py.manifest import EmbedderInfo, GraphPlan, GraphSignature, ModelShape


class TorchEngine:
    """See ``runtime_py.engines.base.Engine``."""

    name = "torch"

    def __init__(self, modules: dict[str, nn.Module], graph_signatures: dict[str, GraphSignature]) -> None:
        self._modules, self._signatures = modules, graph_signatures

    @staticmethod
    def create(
        decoder: Decoder, encoder: SentenceEncoder, shape: ModelShape, plan: GraphPlan, embedder: EmbedderInfo
    ) -> TorchEngine:
        """An engine over these models as they are: the caller has quantised them where a target does."""
        return TorchEngine(build_graphs(decoder, encoder, plan), signatures(shape, plan, embedder))

    def run(self, graph: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See ``Engine.run``."""
        with torch.no_grad():
            outputs = flatten(self._modules[graph](**nest(self._tensors(graph, inputs))))
        return {s.name: t.numpy() for s, t in zip(self._signatures[graph].outputs, outputs, strict=True)}

    def _tensors(self, graph: str, inputs: Mapping[str, Array]) -> dict[str, Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # mapped caches are read-only, which the graphs respect
            return {spec.name: torch.from_numpy(np.asarray(inputs[spec.name])) for spec in self._signatures[graph].inputs}

    def scores(self, inputs: Mapping[str, Array]) -> list[NDArray[np.float32]]:
        """Scores of the cached and block rows, ``[Hkv, M_l+B]`` a layer, for the inputs of ``prefill``."""
        prefill = self._modules["prefill"]
        assert isinstance(prefill, PrefillGraph)
        with torch.no_grad():
            return [t.numpy() for t in prefill.scores(**nest(self._tensors("prefill", inputs)))]

    def close(self) -> None:
        """Nothing to release: the models belong to the caller."""
