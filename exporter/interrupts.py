"""Ctrl-C and SIGTERM end a command: by an exception at once, and by a note of it where Python loses that exception."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Stopped(KeyboardInterrupt):
    """The user asked to stop.

    A class of its own, because after a plain KeyboardInterrupt has passed through code that was compiled from a string, as
    dataclasses are, Python ends the process by the signal, whatever exit code it was given.
    """


_requested = threading.Event()


def handle_signals() -> None:
    """Let SIGINT and SIGTERM raise ``Stopped`` in the main thread from now on; a signal that is ignored stays ignored."""
    _requested.clear()
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def check_stop() -> None:
    """Raise ``Stopped`` after a signal whose exception was lost: Python only prints one that is raised in a destructor."""
    if _requested.is_set():
        raise Stopped


def _stop(_signal: int, _frame: FrameType | None) -> None:
    _requested.set()
    raise Stopped
