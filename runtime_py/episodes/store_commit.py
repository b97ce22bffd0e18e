"""How a store changes: data files first, under names never used before, then index.json in one step.

A kill at any point leaves the state of the last commit; files that index.json does not name are litter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime_py.episodes.log import Log, cut_log
from runtime_py.episodes.store_index import (
    INDEX,
    FileEntry,
    StoreIndex,
    check_file,
    distrust_file,
    read_index,
    trust_file,
)
from runtime_py.episodes.store_lock import LOCK, WriterLock
from runtime_py.errors import StoreError, UsageError
from runtime_py.files import storage_error, sync_folder, write_atomic
from runtime_py.integrity import sha256_file

_OWN_NAME = re.compile(
    r"index\.json|lock|\..+\.writing-\d+-[0-9a-f]+|log-\d+\.jsonl"
    r"|(episode-\d+|shared|centroids|question)-\d+(\.sealed)?\.safetensors"
)


@dataclass(frozen=True)
class State:
    """What one commit holds; ``index.log`` is ``log.entry``."""

    index: StoreIndex
    log: Log


class Commits:
    """The state of an open store, the transaction under way, and the files of both."""

    def __init__(self, folder: Path, base: Path | None, state: State) -> None:
        self.folder, self.base = folder, base
        self.threads = threading.RLock()
        self._state = state
        self._draft: State | None = None
        self._written: set[str] = set()
        self._goal = b""
        self._closed = False

    def require_open(self) -> None:
        """Raise ``StoreError`` after ``close``."""
        if self._closed:
            raise StoreError(f"{self.folder} is closed. Open the store again.")

    def close(self) -> None:
        """Refuse all use from now on. Raises ``UsageError`` within a transaction."""
        if self._draft is not None:
            raise UsageError(f"{self.folder} cannot be closed or wiped inside a transaction. End the transaction first.")
        self._closed = True

    @property
    def current(self) -> State:
        """The committed state, or in a transaction's own thread what it has made of it; other threads wait."""
        with self.threads:
            self.require_open()
            return self._draft or self._state

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all changes of the body together, or none when it raises; one inside another joins it."""
        with self.threads:
            self.require_open()
            if self._draft is not None:
                yield
                return
            self._draft, self._written, self._goal = self._state, set(), b""
            try:
                yield
                self._commit()
            except BaseException:
                self._settle()
                raise
            finally:
                self._draft = None

    def change(self, **fields: Any) -> None:
        """Replace fields of the index, within a transaction."""
        state = self.current
        self._draft = dataclasses.replace(state, index=dataclasses.replace(state.index, **fields))

    def set_log(self, log: Log) -> None:
        """Replace the log, within a transaction."""
        self.change(log=log.entry)
        self._draft = dataclasses.replace(self.current, log=log)

    def new_path(self, stem: str, suffix: str = ".safetensors") -> Path:
        """A path in the store that no file had before; removed again unless the transaction commits it."""
        generation = self.current.index.generation + 1
        self.change(generation=generation)
        path = self.folder / data_name(stem, generation, suffix)
        self._written.add(path.name)
        return path

    def register(self, path: Path, sha256: str) -> str:
        """Enter a file just written into the file table; returns its name."""
        self._enter(path, FileEntry(sha256, path.stat().st_size))
        return path.name

    def adopt(self, name: str) -> Path:
        """Enter a file of the base folder into the file table; returns its path. Raises ``StoreError``."""
        if self.base is None:
            raise UsageError(f"{self.folder} was opened without its bundle's episodes folder. Open it with `base`.")
        path = self.base / name
        if path.parent != self.base or _OWN_NAME.fullmatch(name):
            raise UsageError(f"{name!r} is not the name of a file of the bundle's episodes folder. Give a plain name.")
        try:
            self._enter(path, FileEntry(sha256_file(path), path.stat().st_size, base=True))
        except OSError as error:
            raise StoreError(f"{path} cannot be read ({error.strerror}). Copy the bundle again.") from None
        return path

    def checked_path(self, name: str) -> Path:
        """The path of a data file, after comparing it with its checksum. Raises ``StoreError``."""
        entry = self.current.index.files[name]
        if entry.base and self.base is None:
            raise StoreError(f"{name} is in the bundle's episodes folder. Open the store with that bundle.")
        path = (self.base if entry.base and self.base else self.folder) / name
        check_file(path, entry)
        return path

    def _enter(self, path: Path, entry: FileEntry) -> None:
        trust_file(path, entry)
        self.change(files={**self.current.index.files, path.name: entry})

    def _commit(self) -> None:
        draft = self.current
        if draft is self._state:
            return
        self._draft = dataclasses.replace(draft, index=draft.index.pruned())
        self._goal = self._draft.index.encode()
        write_atomic(self.folder / INDEX, self._goal)
        self._adopt_draft()

    def _adopt_draft(self) -> None:
        before, self._state = self._state, self.current
        self._delete((before.index.own_files() | self._written) - self._state.index.own_files())

    def _settle(self) -> None:
        """After an error or an interrupt: go by what reached the disk, which may be the whole commit."""
        with contextlib.suppress(OSError, StoreError):
            if self._goal and (self.folder / INDEX).read_bytes() == self._goal:
                self._adopt_draft()
                return
        with contextlib.suppress(OSError, StoreError):
            self._delete(self._written - self._state.index.own_files())
        with contextlib.suppress(OSError):
            cut_log(self.folder / self._state.index.log.file, self._state.index.log)

    def _delete(self, names: set[str]) -> None:
        for name in sorted(names):
            path = self.folder / name
            distrust_file(path)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise StoreError(f"{path} cannot be deleted ({error.strerror}). Delete it by hand.") from None


def data_name(stem: str, generation: int, suffix: str) -> str:
    """Name of a data file, for example ``episode-0-00012.safetensors``."""
    return f"{stem}-{generation:05d}{suffix}"


def remove_litter(folder: Path, index: StoreIndex) -> None:
    """Remove what a killed writer left: bytes behind the log, files that the index does not name."""
    keep = index.own_files() | {INDEX, LOCK}
    try:
        cut_log(folder / index.log.file, index.log)
        for entry in folder.iterdir():
            if entry.name not in keep and (entry.is_symlink() or not entry.is_dir()):
                entry.unlink()
    except OSError as error:
        raise storage_error(error, folder / INDEX) from None


def delete_store(folder: Path) -> None:
    """Delete a locked store, its index last, so that a killed deletion can be done again. Raises ``StoreError``."""
    try:
        for entry in sorted(folder.iterdir(), key=lambda path: (path.name == LOCK, path.name == INDEX)):
            distrust_file(entry)
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        folder.rmdir()
        sync_folder(folder.parent)
    except OSError as error:
        raise StoreError(f"{folder} cannot be deleted ({error}). Delete it by hand.") from None


def wipe_folder(folder: Path) -> None:
    """Delete a store that cannot be opened: damaged, half deleted, or of a bundle that is gone.

    Raises ``StoreError`` when ``folder`` is not a store, holds anything else, or is in use.
    """
    folder = folder.resolve()
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    strangers = [name for name in names if not _OWN_NAME.fullmatch(name)]
    if INDEX not in names or strangers or not _is_store(folder, names):
        reason = f"it holds {strangers[0]!r}" if strangers else f"it has no {INDEX} or log of a store"
        raise StoreError(f"{folder} is not deleted: {reason}. Name the folder of a store, or delete it by hand.")
    lock = WriterLock(folder)
    try:
        delete_store(folder)
    finally:
        lock.release()


def _is_store(folder: Path, names: list[str]) -> bool:
    if any(name.startswith("log-") for name in names):
        return True
    try:
        read_index(folder / INDEX)
    except StoreError:
        return False
    return True
