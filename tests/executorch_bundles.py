"""Small ExecuTorch bundles, built once for all test files that use them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from bundle_fixtures import SIZES

from exporter.build import build_bundle
from exporter.console import Stages
from exporter.plan import BuildPlan
from runtime_py.bundle import Bundle
from runtime_py.episodes.history import History


@functools.cache
def executorch_bundle(weights: str, root: Path, history: History) -> Bundle:
    """A verified bundle for ExecuTorch with these weights, below ``root``; read-only. Skips where a library is missing."""
    for name in ("executorch", *(["torchao"] if weights == "int4" else [])):
        pytest.importorskip(name, reason=f"the package {name} is not installed")
    out = root / f"executorch-{weights}"
    plan = BuildPlan(out=out, targets=("executorch",), weights=weights, **SIZES)  # type: ignore[arg-type]
    build_bundle(plan, history, Stages(quiet=True))
    return Bundle.open(out)
