"""The command line: parse, call, turn errors into a sentence and an exit code (0 done, 1 failed, 2 wrong use)."""

from __future__ import annotations

import argparse
import importlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence

from exporter import __version__
from exporter.interrupts import handle_signals
from runtime_py.errors import EpiCacheError, UsageError, WorkError

# name -> what --help says; each is a module of this package with ``add_arguments`` and ``run``
COMMANDS = {
    "build": "build a bundle from a model, an embedder and a history, and verify it",
    "doctor": "say whether this machine is ready to export, and what to do where it is not",
    "models": "list the presets, with file sizes and phone memory",
    "verify": "check a bundle's files and compare every graph with PyTorch",
    "episodes": "read a history into a store, bring a store up to date, forget or wipe",
    "chat": "ask a bundle or a store",
    "inspect": "show what is in a bundle: budgets, files, memory, verdicts",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Raises ``SystemExit``, as argparse does, for flags it cannot parse."""
    _prepare_process()
    return _in_a_sentence(lambda: _run(list(sys.argv[1:] if arguments is None else arguments)))


def _run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m exporter", description="Mobile export toolchain for EpiCache.")
    parser.add_argument("--version", action="version", version=f"epicache-export {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        # Only the command that is asked for is imported, so that --help and errors come at once.
        if name in words:
            importlib.import_module(f"exporter.cli.{name}").add_arguments(command)
    options = parser.parse_args(words)
    code: int = importlib.import_module(f"exporter.cli.{options.command}").run(options)
    sys.stdout.flush()
    return code


def _prepare_process() -> None:
    """What the process needs before a command is imported."""
    handle_signals()
    # PyTorch's threads spin between two operators, which starves ONNX Runtime's; on two busy cores verify took three
    # times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Libraries warn of their own deprecations and optional parts; what a user must know is said by this project.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a name or a line that the terminal's encoding lacks is no reason to stop


def _in_a_sentence(command: Callable[[], int]) -> int:
    """The exit code of ``command``; an error becomes one sentence on standard error."""
    try:
        return command()
    except EpiCacheError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("Stopped. Nothing half-written was left; run the same command again to go on.", WorkError.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return WorkError.exit_code
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}. Check path, permissions and free space.", WorkError.exit_code)
    except MemoryError:
        return _fail("Not enough memory. Close other programs, or choose a smaller model.", WorkError.exit_code)


def _fail(message: str, code: int) -> int:
    kind = "wrong use" if code == UsageError.exit_code else "failed"
    print(f"{kind}: {message}", file=sys.stderr)
    return code
