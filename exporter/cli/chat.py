"""``chat``: ask a bundle, with questions on the command line or one by one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from exporter.cli.options import add_bundle, add_engine, open_chosen_engine
from exporter.console import Stages
from runtime_py.bundle import Bundle
from runtime_py.errors import EpiCacheError
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
    """Answer; returns 0."""
    stages = Stages(quiet=options.json)
    bundle = Bundle.open(options.bundle)
    engine = open_chosen_engine(bundle, options)
    with bundle.session(engine, options.store, options.recall) as session:
        session.progress = lambda episode, done, total: stages.count(
            "reading history:" if episode < 0 else f"reading history, episode {episode}:", done, total
        )
        if options.question:
            for question in options.question:
                _show(session, question, options)
        else:
            _talk(session, options)
    return 0


def _show(session: Session, question: str, options: argparse.Namespace) -> None:
    """One question and its answer, streamed, or as JSON with the engine's name."""
    if options.json:
        answer = session.ask(question, max_new_tokens=options.max_tokens)
        print(json.dumps({"question": question, **dataclasses.asdict(answer), "engine": options.engine}, ensure_ascii=False))
        return
    print(f"> {question}")
    print(_summary(session.ask(question, lambda text: print(text, end="", flush=True), options.max_tokens)))


def _summary(answer: Answer) -> str:
    similarities = " ".join(f"{s:.2f}" for s in answer.similarities)
    notes = "".join(f"\n  note: {note}" for note in answer.notes)
    return (
        f"\n  [episode {answer.episode} of similarities {similarities}; {len(answer.tokens)} tokens, "
        f"{answer.tokens_per_s:.1f} tokens/s, ended by {answer.reason}]{notes}"
    )


def _talk(session: Session, options: argparse.Namespace) -> None:
    """Questions from standard input until it ends; Ctrl-C stops an answer, or the program at the prompt."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            continue
        try:
            _show(session, line.strip(), options)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            session.cancel()
            print("\n  [stopped]")
        except EpiCacheError as error:
            print(f"  [{error}]", file=sys.stderr)
