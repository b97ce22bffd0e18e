"""What an engine checks before it loads anything."""

from __future__ import annotations

import re
from pathlib import Path

from runtime_py.errors import BundleError, UsageError

MAX_THREADS = 256


def check_threads(threads: int) -> None:
    """Raises ``UsageError`` unless ``threads`` is 0 (the engine chooses) to 256."""
    if not 0 <= threads <= MAX_THREADS:
        raise UsageError(f"{threads} threads are not possible: allowed are 1 to {MAX_THREADS}, or 0 for as many as fit.")


def check_version(folder: Path, target: str, minimum: str, library: str, installed: str) -> None:
    """Refuse a bundle made for a newer runtime: it may use operators this one lacks, or computes otherwise.

    ``minimum`` is what the manifest says, like "onnxruntime 1.32.0". Raises ``BundleError``.
    """
    match = re.fullmatch(rf"{library} (\d{{1,6}}(?:\.\d{{1,6}}){{0,5}})(?:\D\S{{0,40}})?", minimum, re.ASCII)
    if match is None:
        raise BundleError(
            f"{folder / 'manifest.json'}: targets.{target}.minimum_runtime is {minimum[:80]!r}; a version like "
            f"'{library} {installed}' is expected. Copy the bundle again, or build it anew."
        )
    if _numbers(match[1]) > _numbers(installed):
        raise BundleError(
            f"{folder} needs {minimum} or newer; this is {library} {installed}. Update {library}, or build the "
            "bundle with this version."
        )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
