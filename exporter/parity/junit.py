"""Checks as a JUnit report, which every CI system shows (format: the XML of Ant's junitreport, as read by Jenkins and GitLab)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as Xml

from exporter.parity.checks import Check

_CONTROLS = dict.fromkeys({*range(0x20)} - {0x09, 0x0A}, "?")  # XML has no place for them


def write_junit(path: Path, checks: Sequence[Check], bundle: str) -> None:
    """Write ``path``: one suite a target, one case a check, its number and limit in the output. Raises ``OSError``."""
    root = Xml.Element("testsuites", name=f"verify {bundle}")
    for target in dict.fromkeys(check.target for check in checks):
        own = [check for check in checks if check.target == target]
        failures = sum(not check.passed for check in own)
        suite = Xml.SubElement(root, "testsuite", name=target, tests=str(len(own)), failures=str(failures))
        for check in own:
            case = Xml.SubElement(suite, "testcase", classname=f"{bundle}.{target}", name=f"{check.graph} {check.name}")
            measured = f"{check.value:.6g} (limit {check.limit:g}): {check.why}".translate(_CONTROLS)
            if check.passed:
                Xml.SubElement(case, "system-out").text = measured
            else:
                Xml.SubElement(case, "failure", message=f"{check.value:.6g} > {check.limit:g}").text = measured
    Xml.indent(root)
    part = path.with_name(f".{path.name}.part")
    try:
        Xml.ElementTree(root).write(part, encoding="utf-8", xml_declaration=True)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
