"""index.json of a store: the one file whose replacement commits everything else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime_py.errors import BundleError, StoreError
from runtime_py.integrity import sha256_file
from runtime_py.manifest import parse_dataclass

INDEX = "index.json"
SCHEMA_VERSION = 1

# The text before the body has a fixed length, so that any language can check the body's bytes without parsing them.
_HEAD = re.compile(rb'\{"sha256":"([0-9a-f]{64})","index":')
_HEAD_BYTES = 85
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True)
class FileEntry:
    """Checksum and size of a data file; ``base`` marks one in the bundle's episodes folder, which is never touched."""

    sha256: str
    bytes: int
    base: bool = False


@dataclass(frozen=True)
class LogEntry:
    """The part of the log that counts: its first ``bytes`` bytes, which hold ``utterances`` lines."""

    file: str
    bytes: int
    utterances: int
    sha256: str


@dataclass(frozen=True)
class EpisodeEntry:
    """Files of one episode (None: not there), tokens read so far, patched prompt as ids, segments used as medoids."""

    cache: str | None = None
    sealed: str | None = None
    n_seen: int = 0
    prompt: list[int] = field(default_factory=list)
    medoids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class SharedEntry:
    """The early cache that all episodes share until the first eviction."""

    cache: str
    n_seen: int


@dataclass(frozen=True)
class QueueEntry:
    """A question that asked for an episode of its own; ``vector`` is the file of its embedding."""

    question: str
    vector: str | None = None


@dataclass(frozen=True)
class StoreIndex:
    """All that a store knows about its files. ``generation`` counts the names given to data files."""

    schema_version: int
    bundle_id: str
    generation: int
    speakers: list[str]
    log: LogEntry
    files: dict[str, FileEntry] = field(default_factory=dict)
    episodes: list[EpisodeEntry] = field(default_factory=list)
    shared: SharedEntry | None = None
    centroids: str | None = None
    queue: list[QueueEntry] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def data_files(self) -> set[str]:
        """Names of the data files in use; the log is not one of them."""
        names = {name for each in self.episodes for name in (each.cache, each.sealed)}
        names |= {each.vector for each in self.queue} | {self.centroids, self.shared.cache if self.shared else None}
        return {name for name in names if name is not None}

    def own_files(self) -> set[str]:
        """Names of the files that belong in the store's own folder, the log included."""
        return {name for name in self.data_files() if not self.files[name].base} | {self.log.file}

    def pruned(self) -> StoreIndex:
        """The same index without entries for files no longer in use."""
        used = self.data_files()
        return dataclasses.replace(self, files={name: entry for name, entry in self.files.items() if name in used})

    def encode(self) -> bytes:
        """The text of index.json: the index behind the SHA-256 of its own bytes."""
        body = json_bytes(dataclasses.asdict(self))
        return b'{"sha256":"%s","index":%s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)


def read_index(path: Path) -> StoreIndex:
    """Read index.json and check its checksum and every name in it. Raises ``StoreError`` naming the file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise StoreError(
            f"{path.parent} is not a store: it has no {path.name}. `python -m exporter episodes --store` creates one."
        ) from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror}). Make it readable, then try again.") from None
    head, body = _HEAD.match(data), data[_HEAD_BYTES:-2]
    if not head or not data.endswith(b"}\n") or hashlib.sha256(body).hexdigest().encode() != head[1]:
        raise damaged_error(path, "its checksum does not fit its contents")
    try:
        content = json.loads(body)
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA_VERSION:
            raise StoreError(f"{path}: schema_version is {version!r}; this runtime reads {SCHEMA_VERSION}. Update it.")
        index = parse_dataclass(StoreIndex, content, str(path))
    except (ValueError, RecursionError, BundleError) as error:
        raise damaged_error(path, str(error)) from None
    for name in sorted(index.data_files() | {index.log.file}):
        if not _NAME.fullmatch(name) or name == INDEX:
            raise damaged_error(path, f"{name!r} is not the name of a data file")
        if name != index.log.file and name not in index.files:
            raise damaged_error(path, f"{name!r} has no checksum")
    return index


def json_bytes(value: Any) -> bytes:
    """One line of JSON in UTF-8; text that UTF-8 cannot hold (a lone surrogate) is escaped. Raises ``ValueError``."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


# Files already checked by this process: path -> size, time, inode and digest at that moment.
_checked: dict[Path, tuple[int, int, int, str]] = {}


def check_file(path: Path, entry: FileEntry) -> None:
    """Compare a data file with its entry; a file that did not change since is not read again.

    Raises ``StoreError`` naming the file when it is missing or has changed.
    """
    try:
        if path.stat().st_size != entry.bytes:
            raise damaged_error(path, f"it has {path.stat().st_size} bytes, not {entry.bytes}")
        if _checked.get(path) == _mark(path, entry):
            return
        if sha256_file(path) != entry.sha256:
            raise damaged_error(path, "its SHA-256 is not the one that was written")
        trust_file(path, entry)
    except OSError as error:
        raise damaged_error(path, error.strerror or str(error)) from None


def trust_file(path: Path, entry: FileEntry) -> None:
    """Remember ``path`` as checked: it was just written. Raises ``OSError``."""
    _checked[path] = _mark(path, entry)


def distrust_file(path: Path) -> None:
    """Forget about ``path``: it was deleted."""
    _checked.pop(path, None)


def _mark(path: Path, entry: FileEntry) -> tuple[int, int, int, str]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino, entry.sha256


def damaged_error(path: Path, what: str) -> StoreError:
    """The sentence for a file of a store that cannot be used."""
    return StoreError(
        f"{path} is damaged: {what}. Restore it from a backup, or delete the store and build a new one with "
        "`python -m exporter episodes --store`."
    )
