"""Targets by name. A new target is one folder and one line in ``TARGETS``."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass

from exporter.targets.base import TargetLowering
from runtime_py.errors import UsageError


@dataclass(frozen=True)
class TargetEntry:
    """Where a target's ``LOWERING`` is, the library it needs, and the weights it can store.

    Kept apart from the lowering itself: a plan is checked before any of these libraries is imported.
    """

    module: str
    library: str
    weights: tuple[str, ...]


TARGETS = {
    "onnx": TargetEntry("exporter.targets.onnx.lowering", "onnxruntime", ("fp32", "int8")),
    "executorch": TargetEntry("exporter.targets.executorch.lowering", "executorch", ("fp32", "int4")),
}


def installed_targets(weights: str | None = None) -> list[str]:
    """The targets whose libraries are installed, of those that can store ``weights``."""
    return [
        name
        for name, entry in TARGETS.items()
        if importlib.util.find_spec(entry.library) is not None and (weights is None or weights in entry.weights)
    ]


def check_target(name: str, weights: str) -> None:
    """Raises ``UsageError`` for a target that is unknown, not installed, or cannot store ``weights``."""
    if name not in installed_targets():
        why = f"its library {TARGETS[name].library!r} is not installed" if name in TARGETS else "it is not known"
        raise UsageError(f"Target {name!r} cannot be built: {why}. Available: {', '.join(installed_targets())}.")
    if weights not in TARGETS[name].weights:
        allowed = ", ".join(TARGETS[name].weights)
        raise UsageError(f"--weights {weights} is not possible for the target {name}: allowed are {allowed}.")


def target(name: str) -> TargetLowering:
    """The lowering of one target, which ``check_target`` has accepted."""
    lowering: TargetLowering = importlib.import_module(TARGETS[name].module).LOWERING
    return lowering
