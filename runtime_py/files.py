"""Files and folders that appear whole or not at all, also when the process is killed at any point."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from runtime_py.errors import WorkError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)

# Names of folders this process is filling now: its own number in a leftover's name proves nothing, numbers are reused.
_building: set[str] = set()


def write_atomic(path: Path, data: bytes) -> None:
    """Make ``path`` hold ``data``, durably: afterwards, and after a kill, it is the old file or the new one.

    Raises ``WorkError`` when there is no space or no permission; the old file then stays and nothing else remains.
    """
    with atomic_file(path, len(data)) as file:
        file.write(data)


@contextmanager
def atomic_file(path: Path, needed: int | None = None) -> Iterator[BinaryIO]:
    """Like ``write_atomic``, for a body that writes piece by piece; ``needed`` is the size in bytes, for messages.

    The file takes its name when the body ends; when the body raises, nothing remains. Raises ``WorkError``.
    """
    temporary = path.with_name(f".{path.name}.writing-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        # An error about some other file is the body's own and keeps its meaning.
        names = ("None", str(temporary), str(path.parent))
        if isinstance(error, OSError) and str(error.filename) in names:
            raise storage_error(error, path, needed) from None
        raise


def sync_folder(folder: Path) -> None:
    """Make names created, renamed or removed in ``folder`` durable. Raises ``OSError``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_error(error: OSError, path: Path, needed: int | None = None) -> WorkError:
    """The sentence for a failed write to ``path``; ``needed`` bytes are compared with those free on its disk."""
    counts = _counts(path.parent, needed)
    if error.errno == errno.EFBIG:
        return WorkError(
            f"{path} cannot be written: it is larger than the file size limit of this process or file system{counts}. "
            "Raise the limit (`ulimit -f`) or choose another disk."
        )
    if error.errno in _NO_SPACE:
        return WorkError(f"{path} cannot be written: the disk or quota is full{counts}. Free some space or choose another disk.")
    if error.errno in _NOT_ALLOWED:
        return WorkError(
            f"{path} cannot be written: {path.parent} does not allow it ({error.strerror}){counts}. "
            "Choose a folder that you may write to, or change its permissions."
        )
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return WorkError(f"{path} cannot be written: {path.parent} is not an existing folder. Create it first.")
    return WorkError(f"{path} cannot be written ({error.strerror or error}). Choose another place.")


def _counts(folder: Path, needed: int | None) -> str:
    numbers = [f"{needed:,} bytes needed"] if needed is not None else []
    with contextlib.suppress(OSError):
        numbers.append(f"{shutil.disk_usage(folder).free:,} bytes free")
    return f" ({', '.join(numbers)})" if numbers else ""


@contextmanager
def writing_folder(destination: Path, replace: bool = False) -> Iterator[Path]:
    """Yield an empty hidden folder beside ``destination`` that takes its place when the body ends.

    When the body raises or is interrupted the hidden folder is removed and ``destination`` stays as it was. A folder
    already there is refused unless ``replace``; then it is exchanged in one step. What killed processes left beside the
    same destination is removed at the start. Raises ``WorkError``: already there, no space, no permission.
    """
    destination = destination.resolve()
    folder = destination.parent / f".{destination.name}.building-{os.getpid()}-{secrets.token_hex(4)}"
    _building.add(folder.name)
    try:
        with _as_work_error(destination):
            destination.parent.mkdir(parents=True, exist_ok=True)
            _clear_leftovers(destination)
            _refuse_existing(destination, replace)
            folder.mkdir()
        yield folder
        with _as_work_error(destination):
            _sync_tree(folder)
            _refuse_existing(destination, replace)
            _publish(folder, destination)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            raise storage_error(error, destination) from None
        raise
    finally:
        _building.discard(folder.name)


@contextmanager
def _as_work_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(error, path) from None


def _refuse_existing(destination: Path, replace: bool) -> None:
    if destination == destination.parent or (destination.exists() and not destination.is_dir()):
        raise WorkError(f"{destination} cannot become a folder of its own. Choose another name.")
    if destination.exists() and not replace:
        raise WorkError(f"{destination} exists already. Choose another name, or ask for it to be replaced.")


def _publish(folder: Path, destination: Path) -> None:
    """Put the finished ``folder`` at ``destination``, durably, and delete what was there."""
    if not destination.exists():
        folder.rename(destination)
        sync_folder(destination.parent)
        return
    old = folder
    if not _exchange(folder, destination):
        old = folder.with_name(f".{destination.name}.replaced-{folder.name.split('.building-')[-1]}")
        _replace_in_two_steps(folder, destination, old)
    sync_folder(destination.parent)
    shutil.rmtree(old, ignore_errors=True)


def _replace_in_two_steps(folder: Path, destination: Path, aside: Path) -> None:
    """For systems that cannot exchange; what a kill between the steps leaves is mended by ``_clear_leftovers``."""
    destination.rename(aside)
    try:
        folder.rename(destination)
    except BaseException:
        aside.rename(destination)
        raise


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step: renameat2 of Linux, renamex_np of macOS. False where neither is there or works."""
    library = ctypes.CDLL(None, use_errno=True)
    one, two = os.fsencode(first), os.fsencode(second)
    at_current_folder, exchange = -100, 2
    if hasattr(library, "renameat2"):
        return bool(library.renameat2(at_current_folder, one, at_current_folder, two, exchange) == 0)
    if hasattr(library, "renamex_np"):
        return bool(library.renamex_np(one, two, exchange) == 0)
    return False


def _clear_leftovers(destination: Path) -> None:
    """Remove what processes that no longer run left beside ``destination``."""
    pattern = re.compile(rf"\.{re.escape(destination.name)}\.(building|replaced)-(\d+)-[0-9a-f]+")
    for entry in sorted(destination.parent.iterdir()):
        match = pattern.fullmatch(entry.name)
        if not match or entry.name in _building or _runs_elsewhere(int(match[2])):
            continue
        if match[1] == "replaced" and not destination.exists():
            entry.rename(destination)
            sync_folder(destination.parent)
        else:
            shutil.rmtree(entry, ignore_errors=True)


def _runs_elsewhere(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _sync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            if path.is_symlink():
                continue
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(root))
