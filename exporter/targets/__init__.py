"""Targets by name. A new target is one folder and one line in ``TARGETS``."""

from __future__ import annotations

import importlib
import importlib.util

from exporter.targets.base import TargetLowering
from runtime_py.errors import UsageError

# name -> (module that offers LOWERING, library that must be installed)
TARGETS = {
    "onnx": ("exporter.targets.onnx.lowering", "onnxruntime"),
    "executorch": ("exporter.targets.executorch.lowering", "executorch"),
}


def installed_targets() -> list[str]:
    """The targets whose libraries are installed."""
    return [name for name, (_, library) in TARGETS.items() if importlib.util.find_spec(library) is not None]


def target(name: str) -> TargetLowering:
    """The lowering of one target. Raises ``UsageError`` for an unknown or uninstalled one."""
    if name not in installed_targets():
        why = f"its library {TARGETS[name][1]!r} is not installed" if name in TARGETS else "it is not known"
        raise UsageError(f"Target {name!r} cannot be built: {why}. Available: {', '.join(installed_targets())}.")
    lowering: TargetLowering = importlib.import_module(TARGETS[name][0]).LOWERING
    return lowering
