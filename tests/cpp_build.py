"""Builds tests/cpp/runner.cpp against an installed or unpacked executorch wheel, which is a C++ SDK."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "cpp" / "runner.cpp"
LIBRARIES = ("kernels_optimized", "kernels_quantized", "backend_xnnpack", "threadpool")
# What the wheel itself was built with: the definitions change the layout of its classes.
_DEFINITIONS = ("C10_USING_CUSTOM_GENERATED_MACROS", "ET_EVENT_TRACER_ENABLED", "ET_USE_THREADPOOL")


def wheel_folder() -> Path:
    """The installed executorch package; skips the test without it."""
    spec = importlib.util.find_spec("executorch")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package executorch is not installed")
    return Path(spec.submodule_search_locations[0])


def build_runner(
    out: Path, wheel: Path, compiler: str = "g++", package: str = "g++", libraries: Sequence[str] = LIBRARIES
) -> Path:
    """Compile the runner to ``out``, linked with ``libraries`` of the wheel; skips without ``compiler`` (Debian: ``package``)."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed: apt-get install {package}")
    include = wheel / "include"
    command = [
        *(compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", *(f"-D{name}" for name in _DEFINITIONS)),
        *("-isystem", str(include), "-isystem", str(include / "executorch/runtime/core/portable_type/c10")),
        *(str(SOURCE), "-o", str(out), f"-L{wheel / 'lib'}", "-lexecutorch"),
        # Kernels and delegates register themselves when they are loaded; no symbol of theirs is named.
        *("-Wl,--no-as-needed", *(f"-lexecutorch_{name}" for name in libraries), f"-Wl,-rpath,{wheel / 'lib'}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return out
