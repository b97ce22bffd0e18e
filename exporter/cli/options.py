"""Argument types and options that several commands share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from exporter.parity.checks import Check
from exporter.plan import parse_count
from runtime_py.bundle import Bundle
from runtime_py.engines import ENGINES
from runtime_py.engines.base import Engine
from runtime_py.engines.requirements import check_threads
from runtime_py.errors import BundleError, EpiCacheError

T = TypeVar("T")


def checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """``parse`` as an argparse type: its sentence is what the user reads."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except EpiCacheError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


count = checked(parse_count)


def add_bundle(parser: argparse.ArgumentParser) -> None:
    """The bundle, and where its checkpoints are when PyTorch is needed."""
    parser.add_argument("bundle", type=Path, help="folder of a bundle")


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    """Where PyTorch finds the weights; presets are found by themselves."""
    where = "the bundle's model: GGUF file or Hugging Face folder (default: the preset, or the Hugging Face cache)"
    parser.add_argument("--model", "--checkpoint", dest="model", help=where)
    parser.add_argument("--embedder", help="the bundle's sentence encoder: folder (default: the preset)")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Which engine runs the graphs."""
    parser.add_argument("--engine", choices=(*ENGINES, "torch"), help="default: the bundle's first target")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of the engine (default: 0, it chooses)")
    add_checkpoints(parser)


def default_engine(bundle: Bundle) -> str:
    """The engine of the bundle's first target. Raises ``BundleError`` when it has none."""
    if not bundle.manifest.targets:
        raise BundleError(f"{bundle.path} has no target to run. Build it again.")
    return next(iter(bundle.manifest.targets))


def open_chosen_engine(bundle: Bundle, options: argparse.Namespace) -> Engine:
    """The engine that ``options`` name; PyTorch reads the checkpoint itself."""
    if options.engine != "torch":
        return bundle.engine(options.engine or default_engine(bundle), options.threads)
    check_threads(options.threads)
    import torch

    from exporter.parity.verify import load_models

    if options.threads > 0:
        torch.set_num_threads(options.threads)
    return load_models(bundle.manifest, options.model, options.embedder).engine(bundle.manifest)


def trial_notice(trial: Sequence[str]) -> str:
    """The line that marks a trial in every output."""
    return f"TRIAL ({'; '.join(trial)}): sizes, memory and speed are real, answers mean nothing"


def print_checks(checks: Sequence[Check]) -> None:
    """One line a check on standard output, and how many hold."""
    for c in checks:
        verdict = "PASS" if c.passed else "FAIL"
        print(f"{verdict} {c.target:>10} {c.graph:>9} {c.name:<16} {c.value:.3g} (limit {c.limit:g}): {c.why}")
    print(f"{sum(c.passed for c in checks)} of {len(checks)} checks hold")


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=1, ensure_ascii=False))
