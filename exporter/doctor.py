"""What ``doctor`` looks at. Nothing is imported that could fail to import: a broken installation is what it is asked about."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from exporter.checkpoints.hub import cached_snapshot
from exporter.checkpoints.hub_model import HubModel
from exporter.models.encoder_registry import ENCODERS
from exporter.models.registry import DECODERS, PackagedFile, packaged_path
from exporter.sizes import weight_bytes
from exporter.targets import TARGETS
from runtime_py.errors import WorkError

_PACKAGE = "epicache-export"
_PINNED = re.compile(r"([A-Za-z0-9_.-]+)==([^;,\s]+)")
_MEMORY = 8 << 30  # what the default build takes at most, with room to spare
_DISK = 4 << 30


@dataclass(frozen=True)
class Finding:
    """``state``: "ok", "warning" (works, but), "missing" (a build needs it) or "absent" (a choice that is not there)."""

    subject: str
    state: str
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Every finding, in the order in which one would look."""
    return [*_versions(), *_machine(), *_targets(), *_models()]


def _versions() -> Iterator[Finding]:
    python = platform.python_version()
    right = sys.version_info[:2] == (3, 11)
    yield Finding("python", "ok" if right else "missing", python, "" if right else "Install Python 3.11, then scripts/install.")
    try:
        requirements = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(_PACKAGE, "missing", "not installed", "Run scripts/install.")
        return
    for requirement in requirements:
        match = _PINNED.match(requirement)
        if match is None or "extra ==" in requirement:
            continue
        name, wanted = match.groups()
        try:
            found = importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "missing", f"not installed; tested with {wanted}", "Run scripts/install.")
            continue
        same = found == wanted
        remedy = "" if same else f"The tested set has {wanted}: run scripts/install, or pip install {name}=={wanted}."
        yield Finding(name, "ok" if same else "warning", found, remedy)


def _machine() -> Iterator[Finding]:
    free = available_memory()
    if free is not None:
        short = free < _MEMORY
        remedy = "Close other programs, or build one target at a time with --targets." if short else ""
        yield Finding("free memory", "warning" if short else "ok", f"{free / 1e9:.1f} GB", remedy)
    disk = shutil.disk_usage(Path.cwd()).free
    remedy = "Make room, or name a folder on another disk with --out." if disk < _DISK else ""
    yield Finding("free disk here", "warning" if remedy else "ok", f"{disk / 1e9:.1f} GB", remedy)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("processor", "ok", f"{platform.machine()}, {cores} cores{_features()}")


def available_memory() -> int | None:
    """Bytes that a new process may use without swapping (Linux: MemAvailable, and the control group's limit), or None."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        return free if limit == "max" else min(free, int(limit) - int(used))
    except (OSError, ValueError):
        return free


def _features() -> str:
    """The vector extensions that decide how fast 8-bit products are, where Linux tells."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    flags = set(text.split())
    known = [name for name in ("avx2", "avx512f", "avx512_vnni", "amx_int8", "asimddp", "i8mm") if name in flags]
    return f", {' '.join(known)}" if known else ""


def _targets() -> Iterator[Finding]:
    for name, entry in TARGETS.items():
        installed = importlib.util.find_spec(entry.library) is not None
        found = f"weights {', '.join(entry.weights)}" if installed else f"{entry.library} is not installed"
        yield Finding(f"target {name}", "ok" if installed else "absent", found, "" if installed else "Run scripts/install.")


def _models() -> Iterator[Finding]:
    for name, preset in DECODERS.items():
        size = f", {weight_bytes(preset.config, 'fp32') / 2e9:.1f} GB"  # two bytes a weight, as its makers publish it
        yield _model(f"model {name}", preset.packaged, HubModel(preset.repo_id, preset.licence, preset.gated), size)
    for name, encoder in ENCODERS.items():
        yield _model(f"embedder {name}", encoder.packaged, HubModel(encoder.repo_id, encoder.licence), "")


def _model(subject: str, packaged: PackagedFile | None, hub: HubModel, size: str) -> Finding:
    if packaged is not None:
        try:
            return Finding(subject, "ok", f"in the package {packaged_path(packaged).parts[-2]}")
        except WorkError as error:
            return Finding(subject, "absent", "not installed", str(error))
    found = cached_snapshot(hub)
    if found is not None:
        return Finding(subject, "ok", f"in the Hugging Face cache, commit {found.revision[:12]}")
    login = f"Accept its licence at {hub.page}, run `hf auth login`; then a build" if hub.gated else "A build"
    return Finding(subject, "absent", "not in the Hugging Face cache", f"{login} downloads it{size}.")
