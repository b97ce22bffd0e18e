"""What a person sees: the resolved configuration once, one line a stage, counts while a stage runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from exporter.interrupts import check_stop


class Stages:
    """Prints to standard error, so that ``--json`` on standard output stays clean."""

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False, emoji=False, soft_wrap=True)
        self._last = 0.0

    def line(self, text: str) -> None:
        """One line as it is."""
        check_stop()
        self._console.print(text, markup=False)

    @contextmanager
    def stage(self, name: str, size_of: Path | None = None) -> Iterator[Stages]:
        """A named stage; its line ends with the seconds it took and the bytes it left in ``size_of``."""
        started = time.monotonic()
        self._last = started
        self.line(f"[{name}]")
        yield self
        size = f", {folder_bytes(size_of) / 1e6:.1f} MB" if size_of is not None else ""
        self.line(f"[{name}] done in {time.monotonic() - started:.1f} s{size}")

    def note(self, text: str) -> None:
        """A detail of the running stage."""
        self.line(f"    {text}")

    def count(self, what: str, done: int, total: int) -> None:
        """Progress of a long stage, at most one line in five seconds, and always the last one."""
        check_stop()
        now = time.monotonic()
        if done >= total or now - self._last >= 5.0:
            self._last = now
            self.note(f"{what} {done}/{total}")


def folder_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; 0 for nothing."""
    if path.is_file():
        return path.stat().st_size
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
