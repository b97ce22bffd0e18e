"""The command line: wrong use, which is noticed early and changes nothing, and ``inspect``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_models import ROOT, Run, Tiny, names

import exporter.build
from runtime_py.bundle import Bundle
from runtime_py.tensor_files import map_tensors

pytest_plugins = ["tiny_fixtures"]


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong use must be noticed before weights are read."""

    def refuse(*_: object) -> None:
        pytest.fail("the weights were read")

    monkeypatch.setattr(exporter.build, "load_decoder", refuse)


WRONG_PLANS: list[tuple[dict[str, Any], list[str]]] = [
    ({"budget": 7}, ["--budget 7", "64 to 352"]),
    ({"budget": 0}, ["--budget 0", "64 to 352"]),
    ({"budget": 100_000}, ["--budget 100000", "64 to 352"]),
    ({"budget": 100}, ["Budget 100", "multiple of 8", "96 or 104"]),
    ({"budget": "abc"}, ["'abc'", "whole number", "512"]),
    ({"budget": "500k"}, ["--budget 512000", "64 to 352"]),
    ({"budget": "-8"}, ["'-8'", "whole number"]),
    ({"budget": "4.5"}, ["'4.5'", "whole number"]),
    ({"block": 31}, ["--block 31", "32 to 512"]),
    ({"block": 600}, ["--block 600", "32 to 512"]),
    ({"block": 448, "prompt": 64}, ["--block 448", "--prompt 64", "no room", "Lower them"]),
    ({"prompt": 16}, ["--prompt 16", "32 to 512"]),
    ({"tail": 8}, ["--tail 8", "64 to 512"]),
    ({"tail": 64}, ["--tail 64", "too short"]),
    ({"query": 1}, ["--query 1", "2 to 80"]),
    ({"query": 81}, ["--query 81", "2 to 80"]),
    ({"episodes": 0}, ["--episodes 0", "1 to 64"]),
    ({"episodes": 65}, ["--episodes 65", "1 to 64"]),
    ({"embed_length": 2}, ["--embed-length 2", "16 to 512"]),
    ({"alpha": -1}, ["--alpha -1.0", "0 to 16"]),
    ({"alpha": "nan"}, ["--alpha nan", "0 to 16"]),
    ({"alpha": "much"}, ["--alpha", "much"]),
    ({"layers": 0}, ["--layers 0", "1 to 2"]),
    ({"layers": 3}, ["--layers 3", "1 to 2"]),
    ({"targets": "tpu"}, ["'tpu'", "Available: ", "onnx"]),
    ({"targets": "onnx,"}, ["''", "Available: ", "onnx"]),
    ({"weights": "int2"}, ["int2", "fp32"]),
    ({"model": "smollm2-135n"}, ["'smollm2-135n'", "Did you mean 'smollm2-135m'?", ".gguf"]),
    ({"model": "no/such/folder"}, ["'no/such/folder'", "smollm2-135m", ".gguf"]),
    ({"embedder": "minilm"}, ["'minilm'", "Did you mean 'minilm-l6'?"]),
    ({"index": 3}, ["no conversation 3", "0 to 0"]),
    ({"index": -1}, ["no conversation -1", "0 to 0"]),
    ({"index": "one"}, ["--index", "one"]),
]


@pytest.mark.parametrize(
    ("changes", "words"), WRONG_PLANS, ids=[",".join(f"{k}={v}" for k, v in c.items()) for c, _ in WRONG_PLANS]
)
def test_a_wrong_plan_is_refused_before_weights_are_read(
    tiny: Tiny, run: Run, tmp_path: Path, no_weights: None, changes: dict[str, Any], words: list[str]
) -> None:
    ran = run(*tiny.build(tmp_path / "out", **changes))
    assert ran.code == 2
    assert all(word in ran.err for word in words), ran.err
    assert not names(tmp_path)


def test_unknown_flags_commands_and_no_command_are_wrong_use(run: Run) -> None:
    for words in ([], ["bild"], ["build", "--budgets", "8"], ["chat"], ["episodes", "x"], ["inspect"]):
        ran = run(*words)
        assert ran.code == 2
        assert "usage:" in ran.err


@pytest.mark.parametrize("command", ["build", "verify", "episodes", "chat", "inspect"])
def test_help_names_every_flag_and_ends_well(run: Run, command: str) -> None:
    ran = run(command, "--help")
    assert ran.code == 0
    assert "--json" in ran.out
    assert ran.err == ""


def test_help_and_version_need_no_heavy_library() -> None:
    began = time.monotonic()
    probe = "import sys; from exporter.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    probe += "assert not {'torch', 'onnxruntime', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True)
    assert "COMMAND" in done.stdout, done.stderr
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("replace", [False, True])
def test_what_is_no_bundle_is_never_replaced(tiny: Tiny, run: Run, tmp_path: Path, no_weights: None, replace: bool) -> None:
    flags = ["--replace"] if replace else []
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    (tmp_path / "file").write_bytes(b"text")
    for name in ("photos", "file"):
        ran = run(*tiny.build(tmp_path / name), *flags)
        assert ran.code == 2
        assert f"{tmp_path / name}" in ran.err
        assert "--out" in ran.err
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b"cat"
    assert (tmp_path / "file").read_bytes() == b"text"
    assert names(tmp_path) == {"photos", "file"}


def test_a_bundle_is_replaced_only_when_asked_for(tiny: Tiny, tiny_bundle: Path, run: Run, no_weights: None) -> None:
    before = Bundle.open(tiny_bundle).id
    ran = run(*tiny.build(tiny_bundle))
    assert ran.code == 2
    assert "exists already" in ran.err
    assert "--replace" in ran.err
    assert Bundle.open(tiny_bundle).id == before


def test_a_destination_that_cannot_be_written_is_named(tiny: Tiny, run: Run, tmp_path: Path, no_weights: None) -> None:
    (tmp_path / "file").write_bytes(b"")
    ran = run(*tiny.build(tmp_path / "file" / "out"))
    assert ran.code == 1
    assert f"{tmp_path / 'file'}" in ran.err
    if os.geteuid() == 0:
        return
    (tmp_path / "locked").mkdir(mode=0o500)
    ran = run(*tiny.build(tmp_path / "locked" / "out"))
    assert ran.code == 1
    assert "does not allow it" in ran.err


BROKEN_HISTORIES: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "does not exist"),
    "not JSON": (b'{"sessions": [', "is not JSON"),
    "not UTF-8": (b'{"sessions": "\xff"}', "is not UTF-8"),
    "unknown layout": (b'{"messages": []}', "unknown layout"),
    "empty list": (b"[]", "empty list"),
    "no text": (b'{"sessions": [{"utterances": [{"speaker": "A", "text": " "}]}]}', "no utterance"),
    "no speaker": (b'{"sessions": [{"utterances": [{"text": "hello"}]}]}', "no speaker"),
    "wrong type": (b'{"sessions": [{"utterances": [{"speaker": "A", "text": 7}]}]}', "a text is expected, found 7"),
}


@pytest.mark.parametrize("kind", BROKEN_HISTORIES)
def test_a_broken_history_is_named(tiny: Tiny, run: Run, tmp_path: Path, no_weights: None, kind: str) -> None:
    content, words = BROKEN_HISTORIES[kind]
    path = tmp_path / "history.json"
    if content is not None:
        path.write_bytes(content)
    ran = run(*tiny.build(tmp_path / "out", history=path))
    assert ran.code == 1
    assert f"{path}" in ran.err
    assert words in ran.err
    assert names(tmp_path) <= {"history.json"}


def test_a_folder_is_no_history(tiny: Tiny, run: Run, tmp_path: Path, no_weights: None) -> None:
    ran = run(*tiny.build(tmp_path / "out", history=tmp_path))
    assert ran.code == 1
    assert "cannot be read" in ran.err


def test_every_command_names_a_folder_that_is_no_bundle(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "missing", tmp_path / "empty"):
        for words in (["inspect"], ["verify"], ["chat", "--question", "Who?"], ["episodes", "--store", tmp_path / "s"]):
            ran = run(words[0], folder, *words[1:])
            assert ran.code == 1
            assert f"{folder}" in ran.err
            assert "exporter build" in ran.err
    assert names(tmp_path) == {"empty"}


def test_inspect_tells_the_truth(small_bundle: Bundle, run: Run) -> None:
    shown = run("inspect", small_bundle.path, "--json").json
    plan, shape = small_bundle.manifest.plan, small_bundle.manifest.shape
    assert shown["layer_budgets_sum"] == sum(shown["layer_budgets"]) == shape.n_layers * plan.budget
    assert shown["layer_budgets"] == json.loads((small_bundle.path / "layer_budgets.json").read_text())["budgets"]
    files = {f["path"]: f["bytes"] for f in shown["files"]}
    assert files == {str(p.relative_to(small_bundle.path)): p.stat().st_size for p in small_bundle.path.rglob("*") if p.is_file()}
    episodes = small_bundle.episodes_file()
    assert [e["n_seen"] for e in shown["episodes"]] == [e.n_seen for e in episodes.episodes]
    assert sum(e["segments"] for e in shown["episodes"]) == len(episodes.segments)
    memory = shown["memory"]
    for record in episodes.episodes:
        kept = map_tensors(small_bundle.path / "episodes" / record.cache)[0]
        keys = map_tensors(small_bundle.path / "episodes" / record.sealed)[0]
        sealed = [keys[f"k_{i}"].nbytes + kept[f"v_{i}"].nbytes for i in range(shape.n_layers)]
        assert memory["sealed_cache_per_layer"] == sealed
        assert memory["sealed_cache_per_episode"] == sum(sealed)
        assert memory["episode_on_disk"] == sum(a.nbytes for a in [*kept.values(), *keys.values()])
    tail = next(s for s in small_bundle.manifest.signatures["decode"].inputs if s.name == "tail_k_0").shape
    assert memory["tail"] == 2 * shape.n_layers * 4 * tail[0] * tail[1] * tail[2]
    assert memory["full_cache_at"]["30000"] == 30_000 * memory["full_cache_per_token"]


def test_inspect_for_people_shows_budgets_and_every_file(tiny_bundle: Path, run: Run) -> None:
    ran = run("inspect", tiny_bundle)
    assert ran.code == 0
    assert "sum 128 = 2 x 64" in ran.out
    assert all(str(p.relative_to(tiny_bundle)) in ran.out for p in tiny_bundle.rglob("*") if p.is_file())
