"""SHA256SUMS: the list, in the format of ``sha256sum``, of every file of a folder but itself."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from runtime_py.errors import BundleError, WorkError
from runtime_py.files import write_atomic

SUMS = "SHA256SUMS"
Progress = Callable[[int, int], None]
"""Called with the bytes hashed so far and the bytes in all."""

_LINE = re.compile(r"([0-9a-f]{64})  (.+)", re.DOTALL)
_CHUNK = 1 << 20


def sha256_file(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces; ``on_bytes`` gets the size of each. Raises ``OSError``."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if on_bytes:
                on_bytes(count)
    return digest.hexdigest()


def write_sums(folder: Path, progress: Progress | None = None) -> str:
    """Write ``folder/SHA256SUMS``, sorted by path, and return its own digest, the id of the bundle.

    Raises ``WorkError`` for what the list cannot hold: a link, a device, a name with a line break or a backslash.
    """
    names = []
    for name, problem in _walk(folder):
        if problem is None and (re.search(r"[\r\n\\]", name) or not _is_text(name)):
            problem = f"{_shown(name)} has a line break, a backslash or bytes outside UTF-8 in its name."
        if problem is not None:
            raise WorkError(f"{folder}: {problem} Remove or rename it, then write the checksums again.")
        names.append(name)
    count = _Count(progress, sum(_size(folder / name) for name in names))
    try:
        lines = [f"{sha256_file(folder / name, count)}  {name}\n" for name in sorted(names)]
    except OSError as error:
        raise WorkError(f"{error.filename} cannot be read ({error.strerror}). Make it readable, then try again.") from None
    data = "".join(lines).encode()
    write_atomic(folder / SUMS, data)
    return hashlib.sha256(data).hexdigest()


def check_sums(folder: Path, progress: Progress | None = None) -> list[str]:
    """Compare ``folder`` with its SHA256SUMS. Returns one sentence a problem, each naming its file."""
    try:
        data = (folder / SUMS).read_bytes()
    except OSError as error:
        return [f"{SUMS} cannot be read in {folder} ({error.strerror}): nothing can be checked."]
    listed, problems = _parse(data)
    present: dict[str, int] = {}
    for name, problem in _walk(folder):
        if problem is not None:
            problems.append(problem)
        elif name not in listed:
            problems.append(f"{_shown(name)} is not listed in {SUMS}.")
        else:
            present[name] = _size(folder / name)
    problems += [f"{_shown(name)} is missing or not a plain file." for name in listed if name not in present]
    count = _Count(progress, sum(present.values()))
    for name in sorted(present):
        try:
            found = sha256_file(folder / name, count)
        except OSError as error:
            problems.append(f"{_shown(name)} cannot be read ({error.strerror}).")
            continue
        if found != listed[name]:
            problems.append(f"{_shown(name)} has changed: its SHA-256 is {found}, {SUMS} says {listed[name]}.")
    return problems


def bundle_id(folder: Path) -> str:
    """The id of a bundle: the hexadecimal SHA-256 of its SHA256SUMS. Raises ``BundleError`` when there is none."""
    try:
        return hashlib.sha256((folder / SUMS).read_bytes()).hexdigest()
    except OSError as error:
        raise BundleError(
            f"{folder / SUMS} cannot be read ({error.strerror}). Copy the whole bundle again, or build it anew."
        ) from None


class _Count:
    """Turns sizes of pieces into calls of a progress callback."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self, count: int) -> None:
        self._done += count
        if self._progress:
            self._progress(self._done, self._total)


def _parse(data: bytes) -> tuple[dict[str, str], list[str]]:
    """Digests by path, and the lines that are not as ``write_sums`` writes them."""
    listed: dict[str, str] = {}
    problems: list[str] = []
    if not data:
        return listed, [f"{SUMS} is empty: it lists no file."]
    lines = data.split(b"\n")
    if lines.pop():
        problems.append(f"{SUMS} does not end with a line break: it was cut or changed.")
    previous = ""
    for number, raw in enumerate(lines, 1):
        match = _LINE.fullmatch(raw.decode("utf-8", "surrogateescape"))
        if not match or not _is_text(match[2]):
            problems.append(f"{SUMS} line {number} is malformed: 64 hexadecimal digits, two spaces, a path are expected.")
            continue
        digest, name = match.groups()
        if name.startswith("/") or ".." in name.split("/"):
            problems.append(f"{SUMS} line {number} names {_shown(name)}, which is outside the folder.")
        elif name == SUMS or any(part in ("", ".") for part in name.split("/")):
            problems.append(f"{SUMS} line {number} names {_shown(name)}, which is not the plain path of another file.")
        elif name in listed:
            problems.append(f"{_shown(name)} is listed twice in {SUMS}, again in line {number}.")
        else:
            if name < previous:
                problems.append(f"{SUMS} line {number} ({_shown(name)}) is out of order: lines are sorted by path.")
            listed[name], previous = digest, name
    return listed, problems


def _walk(folder: Path) -> Iterator[tuple[str, str | None]]:
    """Every file below ``folder`` but its SHA256SUMS as (posix path, None), or (path, what is wrong with it)."""
    pending = [""]
    while pending:
        prefix = pending.pop()
        try:
            with os.scandir(folder / prefix) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError as error:
            yield prefix, f"The folder {_shown(prefix or str(folder))} cannot be read ({error.strerror})."
            continue
        for entry in entries:
            name = prefix + entry.name
            if entry.is_symlink():
                yield name, f"{_shown(name)} is a symbolic link, which may lead outside the folder."
            elif entry.is_dir(follow_symlinks=False):
                pending.append(name + "/")
            elif not entry.is_file(follow_symlinks=False):
                yield name, f"{_shown(name)} is not a plain file."
            elif name != SUMS:
                yield name, None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _is_text(name: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _shown(name: str) -> str:
    return name if name.isprintable() else repr(name)
