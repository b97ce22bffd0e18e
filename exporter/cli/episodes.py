"""``episodes``: stores. Read a history into one, bring one up to date, forget a part of it, or wipe it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from exporter.cli.build import read_history
from exporter.cli.options import add_bundle, add_engine, checked, open_chosen_engine, print_json, trial_notice
from exporter.console import Stages
from exporter.history import HistoryTools, fill_store
from runtime_py.bundle import Bundle
from runtime_py.engines.base import Engine
from runtime_py.episodes.store import Store
from runtime_py.episodes.store_commit import wipe_folder
from runtime_py.episodes.store_index import INDEX, read_index
from runtime_py.errors import StoreError, UsageError
from runtime_py.language_model import LanguageModel


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    if match is None:
        raise UsageError(f"{text!r} is no range of utterances. Write FIRST-LAST, counted from 0, like 12-15.")
    return int(match[1]), int(match[2] or match[1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags."""
    add_bundle(parser)
    parser.add_argument("--store", type=Path, required=True, help="folder of the store")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--history", type=Path, help="conversation to begin a new store with (LoCoMo layout and others)")
    what.add_argument("--forget", type=checked(_range), metavar="FIRST-LAST", help="delete utterances from the log")
    what.add_argument("--wipe", action="store_true", help="delete the whole store")
    parser.add_argument("--index", type=int, default=0, help="which conversation of the file (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the episodes as JSON")
    add_engine(parser)


def run(options: argparse.Namespace) -> int:
    """Do what the flags say; returns 0."""
    stages = Stages()
    bundle = Bundle.open(options.bundle)
    if options.history is None and not (options.store / INDEX).exists():
        remedy = "There is nothing to delete or to go on with" if options.wipe else "Begin one with --history FILE"
        raise StoreError(f"{options.store} is no store. {remedy}.")
    if options.wipe:
        _wipe(bundle, options.store)
        stages.line(f"{options.store} is deleted.")
        return 0
    if bundle.manifest.trial:
        stages.line(trial_notice(bundle.manifest.trial))
    engine = open_chosen_engine(bundle, options)
    with stages.stage("episodes", options.store):
        if options.history is not None:
            _read(bundle, engine, options, stages)
        else:
            _go_on(bundle, engine, options, stages)
    shown = _describe(bundle, options.store)
    if options.json:
        print_json(shown)
    else:
        for index, episode in enumerate(shown["episodes"]):
            print(f"episode {index}: {episode['n_seen']} tokens read, prompt {episode['prompt_tokens']} tokens")
    stages.line(f'Next: python -m exporter chat {options.bundle} --store {options.store} --question "..."')
    return 0


def _read(bundle: Bundle, engine: Engine, options: argparse.Namespace, stages: Stages) -> None:
    """Begin a store with a history, or go on with one whose reading was killed."""
    history = read_history(options.history, options.index, stages)
    manifest = bundle.manifest
    base = bundle.path / "episodes"
    if (options.store / INDEX).exists():
        store = Store.open(options.store, bundle.id, base)
        log, wanted = store.utterances(), list(history.utterances)
        # What was said since lies behind the history.
        if log and (log[: len(wanted)] != wanted or store.speakers != history.speakers):
            store.close()
            raise StoreError(f"{options.store} holds another history. Name another folder, or delete it with --wipe.")
    else:
        store = Store.create(options.store, bundle.id, history.speakers, base)
    tools = HistoryTools(
        LanguageModel(engine, manifest.shape, manifest.plan),
        bundle.embedder(engine),
        bundle.text_tokenizer().encode,
        manifest.template,
    )
    try:
        fill_store(store, history, tools, stages.note, _progress(stages))
    except BaseException:
        if not store.utterances():  # nothing to go on with
            store.wipe()
        raise
    finally:
        store.close()


def _wipe(bundle: Bundle, folder: Path) -> None:
    """Delete a store of this bundle; a damaged one too, for what it holds is private all the same."""
    try:
        Store.open(folder, bundle.id, bundle.path / "episodes").wipe()
    except StoreError:
        if _bundle_of(folder) not in (None, bundle.id):
            raise
        wipe_folder(folder)


def _bundle_of(folder: Path) -> str | None:
    """The bundle a store belongs to; None when its index cannot be read."""
    try:
        return read_index(folder / INDEX).bundle_id
    except StoreError:
        return None


def _go_on(bundle: Bundle, engine: Engine, options: argparse.Namespace, stages: Stages) -> None:
    with bundle.session(engine, options.store) as session:
        session.progress = _progress(stages)
        if options.forget is not None:
            session.forget(*options.forget)
        session.catch_up()


def _progress(stages: Stages) -> Any:
    return lambda episode, done, total: stages.count(
        "shared tokens" if episode < 0 else f"episode {episode}: tokens", done, total
    )


def _describe(bundle: Bundle, folder: Path) -> dict[str, Any]:
    with Store.open(folder, bundle.id, bundle.path / "episodes") as store:
        return {
            "store": str(folder),
            "utterances": len(store.utterances()),
            "queued": [q.question for q in store.queued()],
            "episodes": [{"n_seen": e.n_seen, "prompt_tokens": len(e.prompt), "medoids": e.medoids} for e in store.episodes()],
        }
