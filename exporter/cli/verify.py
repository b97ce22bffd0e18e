"""``verify``: integrity, then parity of every target with PyTorch."""

from __future__ import annotations

import argparse
from pathlib import Path

from exporter.cli.options import add_bundle, add_checkpoints, print_checks, print_json, trial_notice
from exporter.console import Stages
from exporter.parity.checks import Check
from exporter.parity.junit import write_junit
from exporter.parity.verify import integrity_checks, load_models, verify_bundle
from runtime_py.bundle import Bundle
from runtime_py.engines import ENGINES
from runtime_py.errors import BundleError, UsageError
from runtime_py.integrity import check_sums
from runtime_py.selftest import selftest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags."""
    add_bundle(parser)
    add_checkpoints(parser)
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the checks as a JUnit report too")
    parser.add_argument("--selftest", action="store_true", help="only replay the self-test vectors; needs no checkpoint")
    parser.add_argument("--engine", choices=tuple(ENGINES), help="with --selftest: one engine (default: each target's)")


def run(options: argparse.Namespace) -> int:
    """Print every check; returns 1 when one does not hold."""
    stages = Stages()
    if options.junit is not None and not options.junit.absolute().parent.is_dir():
        raise UsageError(f"--junit {options.junit}: the folder {options.junit.parent} does not exist. Create it first.")
    checks = _selftest(options, stages) if options.selftest else _checks(options, stages)
    passed = all(c.passed for c in checks)
    if options.junit is not None:
        write_junit(options.junit, checks, options.bundle.resolve().name)
    trial = Bundle.open(options.bundle, check=False).manifest.trial if passed else []
    if trial:
        stages.line(trial_notice(trial))
    if options.json:
        print_json({"pass": passed, "trial": trial, "checks": [c.to_json() for c in checks]})
    else:
        print_checks(checks)
    return 0 if passed else BundleError.exit_code


def _selftest(options: argparse.Namespace, stages: Stages) -> list[Check]:
    """What a phone does to check itself: replay the stored vectors, compare with the stored results."""
    bundle = Bundle.open(options.bundle)
    checks = []
    for target in [options.engine] if options.engine else bundle.manifest.targets:
        with stages.stage(f"self-test {target}"):
            engine = bundle.engine(target)
            checks += [Check(target, r.graph, r.name, r.value, r.limit, "self-test vectors") for r in selftest(bundle, engine)]
            engine.close()
    return checks


def _checks(options: argparse.Namespace, stages: Stages) -> list[Check]:
    folder: Path = options.bundle
    if not (folder / "manifest.json").exists():
        Bundle.open(folder)  # says what is missing
    with stages.stage("integrity"):
        checks = integrity_checks(check_sums(folder), folder)
    if not checks[0].passed:
        return checks
    bundle = Bundle.open(folder, check=False)
    with stages.stage("load"):
        models = load_models(bundle.manifest, options.model, options.embedder)
    with stages.stage("parity"):
        return checks + verify_bundle(bundle, models, stages.note)
