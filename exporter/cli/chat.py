"""``chat``: ask a bundle, with questions on the command line or one by one."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from exporter.cli.options import add_bundle, add_engine, open_chosen_engine, trial_notice
from exporter.console import Stages
from runtime_py.bundle import Bundle
from runtime_py.errors import EpiCacheError, UsageError
from runtime_py.session import Answer, Session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags."""
    add_bundle(parser)
    parser.add_argument("--question", action="append", help="ask and end; may be repeated (default: ask one by one)")
    parser.add_argument("--store", type=Path, help="store to use and to go on with (default: none is kept)")
    parser.add_argument("--recall", type=int, default=0, help="segments read again before each question (default: 0)")
    parser.add_argument("--max-tokens", type=int, help="longest answer in tokens (default: what the tail holds)")
    parser.add_argument("--json", action="store_true", help="one JSON object an answer")
    add_engine(parser)


def run(options: argparse.Namespace) -> int:
    """Answer; returns 0, or the exit code of the first piped question that could not be answered."""
    _check(options)
    stages = Stages(quiet=options.json)
    bundle = Bundle.open(options.bundle)
    engine = open_chosen_engine(bundle, options)
    options.trial = bundle.manifest.trial
    if options.trial:
        stages.line(trial_notice(options.trial))
    with bundle.session(engine, options.store, options.recall) as session:
        session.progress = lambda episode, done, total: stages.count(
            "reading history:" if episode < 0 else f"reading history, episode {episode}:", done, total
        )
        if not options.question:
            return _talk(session, options)
        for question in options.question:
            _show(session, question, options)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse what cannot be asked before weights are read and a store is begun."""
    if any(not question.strip() for question in options.question or []):
        raise UsageError('The question is empty. Ask something, like --question "What did we decide?".')
    if options.max_tokens is not None and options.max_tokens < 1:
        raise UsageError(f"--max-tokens {options.max_tokens} is not possible: at least 1 is needed.")


def _show(session: Session, question: str, options: argparse.Namespace) -> Answer:
    """Ask one question and show its answer, streamed, or as JSON with the engine's name."""
    if options.json:
        answer = session.ask(question, max_new_tokens=options.max_tokens)
        shown = {"question": question, **dataclasses.asdict(answer), "engine": session.engine_name, "peak_rss_mb": _peak_rss()}
        shown["trial"] = options.trial
        print(json.dumps(shown, ensure_ascii=False), flush=True)
        return answer
    print(f"> {question}")
    answer = session.ask(question, lambda text: print(text, end="", flush=True), options.max_tokens)
    print(_summary(answer))
    return answer


def _peak_rss() -> float:
    """Most memory this process ever held, in MB; Linux counts it in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1e6 if sys.platform == "darwin" else 1e6 / 1024), 1)


def _summary(answer: Answer) -> str:
    similarities = " ".join(f"{s:.2f}" for s in answer.similarities)
    notes = "".join(f"\n  note: {note}" for note in answer.notes)
    return (
        f"\n  [episode {answer.episode} of similarities {similarities}; {len(answer.tokens)} tokens, "
        f"{answer.tokens_per_s:.1f} tokens/s, ended by {answer.reason}]{notes}"
    )


def _talk(session: Session, options: argparse.Namespace) -> int:
    """Questions from standard input until it ends; Ctrl-C stops an answer, or the program at the prompt.

    A person sees what failed and asks again; a pipe learns of it from the exit code.
    """
    by_hand, code = sys.stdin.isatty(), 0
    while True:
        if by_hand:
            print("> ", end="", flush=True)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            if not by_hand:
                raise
            print()  # leaving at the prompt is how such a conversation ends
            return code
        if not line:
            return code
        if not line.strip():
            continue
        try:
            if not by_hand:
                _show(session, line.strip(), options)
                continue
            with _stopping(session) as stopped:
                answer = _show(session, line.strip(), options)
            if stopped.is_set() and answer.reason != "cancelled":  # it came when there was nothing left to stop
                return code
        except EpiCacheError as error:
            print(f"  [{error}]", file=sys.stderr)
            code = code if by_hand else code or error.exit_code


@contextlib.contextmanager
def _stopping(session: Session) -> Iterator[threading.Event]:
    """Let Ctrl-C end the answer under way at its next token, so that the thread goes on behind it; twice ends the program."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        session.cancel()
        stopped.set()
        signal.signal(signal.SIGINT, before)

    stopped = threading.Event()
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
