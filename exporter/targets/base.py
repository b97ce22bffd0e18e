"""What a target does for a build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import nn

from runtime_py.manifest import GraphSignature, Target

Progress = Callable[[str], None]


@dataclass(frozen=True)
class GraphSet:
    """The graphs of one bundle: full-precision modules, their signatures, and how the weights of each are to be stored."""

    modules: dict[str, nn.Module]
    signatures: dict[str, GraphSignature]
    weights: dict[str, str]


class TargetLowering(Protocol):
    """Lowers a ``GraphSet`` for one runtime."""

    name: str
    weights: tuple[str, ...]

    def lower(self, graphs: GraphSet, folder: Path, progress: Progress) -> Target:
        """Write the files below ``folder/<name>/`` and describe them. Raises ``WorkError`` when lowering fails."""
        ...
