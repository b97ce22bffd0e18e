"""One writer at a time: an advisory lock on a file of the store, gone with the process that holds it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from runtime_py.errors import StoreError
from runtime_py.files import storage_error

LOCK = "lock"


class WriterLock:
    """Holds a store's lock until ``release``. Raises ``StoreError`` naming the process that has it already."""

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise storage_error(error, path) from None
        try:
            self._take(folder, path)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _take(self, folder: Path, path: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(self._descriptor, 32).decode("ascii", "replace").strip()
            raise StoreError(
                f"{folder} is in use by process {pid or 'unknown'}; one writer at a time is allowed. "
                "Wait until it ends, or close it there."
            ) from None
        except OSError as error:
            raise StoreError(f"{folder} cannot be locked ({error.strerror}). Move the store to a local disk.") from None
        # Whoever wiped the store meanwhile took the lock file with it; then this lock guards nothing.
        if not path.exists() or not os.path.samestat(os.fstat(self._descriptor), path.stat()):
            raise StoreError(f"{folder} was deleted by another process. Create a new store.")
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Let others write. Releasing twice does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
