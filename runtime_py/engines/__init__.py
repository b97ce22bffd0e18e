"""Inference engines by name. A new engine is one file and one line in ``ENGINES``."""

from __future__ import annotations

import importlib
from pathlib import Path

from runtime_py.engines.base import Engine
from runtime_py.errors import UsageError
from runtime_py.manifest import Manifest

# name -> (module, class); imported on use, so that one engine's libraries are not needed for another
ENGINES = {
    "onnx": ("runtime_py.engines.onnx", "OnnxEngine"),
    "executorch": ("runtime_py.engines.executorch", "ExecutorchEngine"),
}


def open_engine(name: str, folder: Path, manifest: Manifest, threads: int = 0) -> Engine:
    """The engine ``name`` over the bundle in ``folder``. Raises ``UsageError`` when it is unknown or not in the bundle."""
    if name not in ENGINES or name not in manifest.targets:
        usable = sorted(set(ENGINES) & set(manifest.targets))
        raise UsageError(f"Engine {name!r} cannot run this bundle. It can be run by: {', '.join(usable) or 'none'}.")
    module, attribute = ENGINES[name]
    engine: Engine = getattr(importlib.import_module(module), attribute)(folder, manifest, threads)
    return engine
