"""What a target does for a build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from runtime_py.manifest import GraphPlan, GraphSignature, Target

if TYPE_CHECKING:  # the list of targets is read without PyTorch
    from exporter.models.decoder import Decoder
    from exporter.models.decoder_encoder import SentenceEncoder

Progress = Callable[[str], None]


@dataclass(frozen=True)
class GraphSource:
    """What the graphs of one bundle are made of: float32 models, the plan, signatures and weight storage by graph."""

    decoder: Decoder
    encoder: SentenceEncoder
    plan: GraphPlan
    signatures: dict[str, GraphSignature]
    weights: dict[str, str]


class TargetLowering(Protocol):
    """Lowers a ``GraphSource`` for one runtime."""

    name: str

    def quantized(self, decoder: Decoder, encoder: SentenceEncoder, weights: dict[str, str]) -> tuple[Decoder, SentenceEncoder]:
        """The models with their weights as this target stores them: what its graphs are compared with.

        The models given are not changed; a model that is stored in float32 is returned as it is.
        """
        ...

    def rounded_graphs(self, weights: dict[str, str]) -> frozenset[str]:
        """Graphs whose activations are rounded to int8 while they run.

        Engines round at slightly different points, and one step more or less grows from layer to layer: such a graph is near
        its PyTorch model, never equal to it.
        """
        ...

    def lower(self, source: GraphSource, folder: Path, progress: Progress) -> Target:
        """Write the files below ``folder/<name>/`` and describe them. Raises ``WorkError`` when lowering fails."""
        ...
