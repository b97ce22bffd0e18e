"""``verify``: what it prints, and what it refuses before anything is compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tiny_models import Run, Tiny, names, save_decoder

from runtime_py.bundle import Bundle
from runtime_py.integrity import write_sums

pytest_plugins = ["tiny_fixtures"]


@pytest.fixture
def copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the tiny bundle, to be damaged."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change manifest.json and make SHA256SUMS fit it."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    change(manifest)
    path.write_text(json.dumps(manifest), encoding="utf-8")
    write_sums(folder)


def test_every_check_is_a_line_with_value_limit_and_reason(tiny: Tiny, tiny_bundle: Path, run: Run) -> None:
    before = {p: p.stat().st_mtime_ns for p in tiny_bundle.rglob("*")}
    ran = run("verify", tiny_bundle, *tiny.models())
    *lines, last = ran.out.splitlines()
    assert ran.code == 0
    assert last == f"{len(lines)} of {len(lines)} checks hold"
    assert all(line.startswith("PASS ") and "(limit " in line and "): " in line for line in lines)
    assert len({tuple(line.split()[1:4]) for line in lines}) == len(lines)
    assert {p: p.stat().st_mtime_ns for p in tiny_bundle.rglob("*")} == before  # a bundle is read-only


def test_json_says_the_same_to_machines(tiny: Tiny, tiny_bundle: Path, run: Run) -> None:
    ran = run("verify", tiny_bundle, *tiny.models(), "--json")
    shown = ran.json
    assert ran.code == 0
    assert shown["pass"] is True
    assert {"files", "tokenizer", "template", "episodes", "prefill", "query", "decode", "embed"} <= {
        c["graph"] for c in shown["checks"]
    }
    for check in shown["checks"]:
        assert set(check) >= {"target", "graph", "name", "value", "limit", "pass", "why"}
        assert check["pass"] is True
        assert check["value"] <= check["limit"]
        assert check["target"] in ("bundle", "onnx")


def test_the_manifest_holds_the_verdict_of_the_build(tiny_bundle: Path) -> None:
    target = Bundle.open(tiny_bundle).manifest.targets["onnx"]
    assert target.parity == "pass"
    assert {c["name"] for c in target.checks} >= {"kept_rows", "keys", "values", "logits", "answer_tokens", "vector"}


def test_one_changed_byte_of_any_file_is_found_and_named(tiny: Tiny, copy: Path, run: Run) -> None:
    files = sorted(p for p in copy.rglob("*") if p.is_file())
    assert len(files) >= 16
    for path in files:
        whole = path.read_bytes()
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        ran = run("verify", copy, *tiny.models())
        assert ran.code == 1
        assert ran.out.startswith("FAIL ")
        assert str(path.relative_to(copy)) in ran.out
        path.write_bytes(whole)


@pytest.mark.parametrize("change", ["missing", "added", "shorter", "link"])
def test_files_that_are_not_as_listed_are_named(tiny: Tiny, copy: Path, run: Run, change: str) -> None:
    path = copy / "onnx" / "query.onnx"
    if change == "missing":
        path.unlink()
    elif change == "added":
        path = copy / "onnx" / "extra.bin"
        path.write_bytes(b"")
    elif change == "shorter":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.rename(copy.parent / "elsewhere.onnx")
        path.symlink_to(copy.parent / "elsewhere.onnx")
    ran = run("verify", copy, *tiny.models(), "--json")
    assert ran.code == 1
    (check,) = ran.json["checks"]
    assert ran.json["pass"] is check["pass"] is False
    assert str(path.relative_to(copy)) in check["why"]


def test_a_check_that_fails_is_told_and_sets_the_exit_code(tiny: Tiny, copy: Path, run: Run) -> None:
    edit_manifest(copy, lambda m: m["template"]["stop_ids"].append(9))
    ran = run("verify", copy, *tiny.models())
    (line,) = [line for line in ran.out.splitlines() if line.startswith("FAIL")]
    assert ran.code == 1
    assert line.split()[1:4] == ["bundle", "template", "pieces"]
    assert "FAIL" not in ran.err


def test_a_junit_report_has_a_case_for_every_check(tiny: Tiny, tiny_bundle: Path, copy: Path, run: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    ran = run("verify", tiny_bundle, *tiny.models(), "--json", "--junit", report)
    root = ElementTree.parse(report).getroot()
    cases = [(suite.get("name"), case.get("name")) for suite in root for case in suite]
    assert ran.code == 0 and cases == [(c["target"], f"{c['graph']} {c['name']}") for c in ran.json["checks"]]
    assert not root.findall(".//failure") and {suite.get("failures") for suite in root} == {"0"}

    (copy / "layer_budgets.json").write_text("{}", encoding="utf-8")
    assert run("verify", copy, *tiny.models(), "--junit", report).code == 1
    failure = ElementTree.parse(report).getroot().find(".//failure")
    assert failure is not None and "layer_budgets.json has changed" in (failure.text or "")
    assert names(tmp_path) >= {"report.xml"} and not [name for name in names(tmp_path) if name.endswith(".part")]
    assert run("verify", copy, "--junit", tmp_path / "none" / "report.xml").code == 2


def test_a_manifest_of_another_version_is_refused(tiny: Tiny, copy: Path, run: Run) -> None:
    edit_manifest(copy, lambda m: m.update(schema_version=99))
    ran = run("verify", copy, *tiny.models())
    assert ran.code == 1
    assert "schema_version is 99; this runtime reads 2" in ran.err


def test_an_unknown_checkpoint_is_to_be_named(copy: Path, run: Run, tiny: Tiny) -> None:
    ran = run("verify", copy)
    assert ran.code == 1
    assert "made of 'llama', which is no preset" in ran.err
    assert "--model" in ran.err
    ran = run("verify", copy, "--model", tiny.decoder)
    assert ran.code == 1
    assert "made of 'bert', which is no preset" in ran.err
    assert "--embedder" in ran.err


def test_another_checkpoint_is_refused_by_its_digest(tiny: Tiny, copy: Path, run: Run, tmp_path: Path) -> None:
    other = save_decoder(tmp_path / "llama", seed=1)
    ran = run("verify", copy, "--model", other, "--embedder", tiny.encoder)
    assert ran.code == 1
    assert Bundle.open(copy).manifest.source.weights_sha256 in ran.err
    assert "Name the right checkpoint" in ran.err
    ran = run("verify", copy, "--model", tmp_path / "missing", "--embedder", tiny.encoder)
    assert ran.code == 2
    assert "Unknown model" in ran.err


def test_a_preset_needs_no_names(small_bundle: Bundle, run: Run) -> None:
    ran = run("verify", small_bundle.path)
    assert ran.code == 0
    assert "FAIL" not in ran.out


def test_verify_leaves_nothing_behind(
    tiny: Tiny, tiny_bundle: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run("verify", tiny_bundle, *tiny.models()).code == 0
    assert not names(tmp_path)
