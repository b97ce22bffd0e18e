"""Ways to make the disk fail: a limit on the size of files, and a kill before any chosen change."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime_py import files


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``size`` bytes; Python ignores SIGXFSZ, so writes raise EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def kill_at(step: int, action: Callable[[], None]) -> bool:
    """Run ``action`` in a child that is killed before its ``step``-th change of the disk; whether it got to the end."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def counted(function: Callable[..., object]) -> Callable[..., object]:
            def wrapper(*arguments: object, **options: object) -> object:
                nonlocal count
                count += 1
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return wrapper

        for module, name in (
            (os, "replace"),
            (os, "rename"),
            (os, "unlink"),
            (os, "rmdir"),
            (os, "fsync"),
            (os, "mkdir"),
        ):
            setattr(module, name, counted(getattr(module, name)))
        files._exchange = counted(files._exchange)  # type: ignore[assignment]
        try:
            action()
        except BaseException:
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFEXITED(status)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
