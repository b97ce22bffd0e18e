"""``doctor``: is this machine ready to export? Versions, memory, disk, processor, engines and models, each with its remedy."""

from __future__ import annotations

import argparse

from exporter.cli.options import print_json
from exporter.doctor import examine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags."""
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(options: argparse.Namespace) -> int:
    """Print every finding; returns 1 when something that a build needs is missing."""
    findings = examine()
    ready = all(finding.state != "missing" for finding in findings)
    if options.json:
        print_json({"ready": ready, "findings": [vars(finding) for finding in findings]})
        return 0 if ready else 1
    for finding in findings:
        print(f"{finding.state:<8} {finding.subject:<33} {finding.found}")
        if finding.remedy:
            print(f"{'':<42} -> {finding.remedy}")
    print("ready to build" if ready else "not ready: see the lines marked missing")
    return 0 if ready else 1
