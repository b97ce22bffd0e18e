"""The log of a store: one JSON line an utterance, only ever appended to; a new log is a new file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime_py.episodes.history import Utterance
from runtime_py.episodes.store_index import LogEntry, damaged_error, json_bytes
from runtime_py.errors import BundleError
from runtime_py.files import atomic_file, storage_error
from runtime_py.manifest import parse_dataclass

if TYPE_CHECKING:
    from hashlib import _Hash
else:
    _Hash = Any


@dataclass(frozen=True)
class Log:
    """What a log file held at one commit: its entry for the index, the utterances, and the digest to go on from."""

    entry: LogEntry
    utterances: tuple[Utterance, ...]
    digest: _Hash


def write_log(path: Path, utterances: Sequence[Utterance]) -> Log:
    """Write a log of its own file, durably. Raises ``WorkError`` when there is no space."""
    data = _encode(utterances)
    with atomic_file(path, len(data)) as file:
        file.write(data)
    digest = hashlib.sha256(data)
    return Log(LogEntry(path.name, len(data), len(utterances), digest.hexdigest()), tuple(utterances), digest)


def append_log(folder: Path, log: Log, utterances: Sequence[Utterance]) -> Log:
    """Write ``utterances`` behind the bytes that ``log`` counts, durably. Raises ``WorkError`` when there is no space.

    Whatever was behind them, from an append that never was committed, is overwritten.
    """
    data, path = _encode(utterances), folder / log.entry.file
    try:
        with path.open("r+b") as file:
            file.seek(log.entry.bytes)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise storage_error(error, path, len(data)) from None
    digest = log.digest.copy()
    digest.update(data)
    count = log.entry.utterances + len(utterances)
    entry = LogEntry(log.entry.file, log.entry.bytes + len(data), count, digest.hexdigest())
    return Log(entry, log.utterances + tuple(utterances), digest)


def read_log(path: Path, entry: LogEntry) -> Log:
    """Read the part of a log that ``entry`` counts. Raises ``StoreError`` when it is missing or has changed."""
    try:
        with path.open("rb") as file:
            data = file.read(entry.bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise damaged_error(path, str(error)) from None
    digest = hashlib.sha256(data)
    if len(data) != entry.bytes or digest.hexdigest() != entry.sha256:
        raise damaged_error(path, f"its first {entry.bytes} bytes are not those that were written")
    try:
        utterances = [parse_dataclass(Utterance, json.loads(line), str(path)) for line in data.split(b"\n")[:-1]]
    except (ValueError, RecursionError, BundleError) as error:
        raise damaged_error(path, str(error)) from None
    if len(utterances) != entry.utterances:
        raise damaged_error(path, f"it holds {len(utterances)} utterances, not {entry.utterances}")
    return Log(entry, tuple(utterances), digest)


def cut_log(path: Path, entry: LogEntry) -> None:
    """Remove what lies behind the part that ``entry`` counts: an append never committed. Raises ``OSError``."""
    if path.stat().st_size > entry.bytes:
        with path.open("r+b") as file:
            file.truncate(entry.bytes)
            os.fsync(file.fileno())


def _encode(utterances: Sequence[Utterance]) -> bytes:
    return b"".join(json_bytes(dataclasses.asdict(each)) + b"\n" for each in utterances)
