"""``verify``: integrity, then parity of every target with PyTorch."""

from __future__ import annotations

import argparse
from pathlib import Path

from exporter.cli.options import add_bundle, add_checkpoints, print_json
from exporter.console import Stages
from exporter.parity.checks import Check
from exporter.parity.verify import integrity_checks, load_models, verify_bundle
from runtime_py.bundle import Bundle
from runtime_py.errors import BundleError
from runtime_py.integrity import check_sums


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags."""
    add_bundle(parser)
    add_checkpoints(parser)
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")


def run(options: argparse.Namespace) -> int:
    """Print every check; returns 1 when one does not hold."""
    stages = Stages()
    checks = _checks(options.bundle, options.model, options.embedder, stages)
    passed = all(c.passed for c in checks)
    if options.json:
        print_json({"pass": passed, "checks": [c.to_json() for c in checks]})
    else:
        for c in checks:
            verdict = "PASS" if c.passed else "FAIL"
            print(f"{verdict} {c.target:>7} {c.graph:>9} {c.name:<16} {c.value:.3g} (limit {c.limit:g}): {c.why}")
        print(f"{sum(c.passed for c in checks)} of {len(checks)} checks hold")
    return 0 if passed else BundleError.exit_code


def _checks(folder: Path, model: str | None, embedder: str | None, stages: Stages) -> list[Check]:
    if not (folder / "manifest.json").exists():
        Bundle.open(folder)  # says what is missing
    with stages.stage("integrity"):
        checks = integrity_checks(check_sums(folder), folder)
    if not checks[0].passed:
        return checks
    bundle = Bundle.open(folder, check=False)
    with stages.stage("load"):
        models = load_models(bundle.manifest, model, embedder)
    with stages.stage("parity"):
        return checks + verify_bundle(bundle, models, stages.note)
