"""``episodes``: a history into a store, what was said since, and how a store forgets."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from tiny_models import ROOT, Run, names, save_history

from runtime_py.bundle import Bundle

pytest_plugins = ["tiny_fixtures"]

LOCOMO = ROOT.parent / "shared" / "data" / "locomo-3.json"


@pytest.fixture(scope="module")
def two_sessions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two sessions of a LoCoMo conversation."""
    if not LOCOMO.exists():
        pytest.skip(f"{LOCOMO} is not there: the LoCoMo conversations are not part of the repository")
    conversation = json.loads(LOCOMO.read_text(encoding="utf-8"))[0]
    talk = conversation["conversation"]
    keys = ("speaker_a", "speaker_b", "session_1", "session_1_date_time", "session_2", "session_2_date_time")
    path = tmp_path_factory.mktemp("locomo") / "two.json"
    path.write_text(json.dumps([{**conversation, "conversation": {key: talk[key] for key in keys}}]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def filled(tiny_bundle: Path, two_sessions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that has read the two sessions; copy it before changing it."""
    from exporter.cli.main import main

    folder = tmp_path_factory.mktemp("stores") / "store"
    assert main(["episodes", str(tiny_bundle), "--store", str(folder), "--history", str(two_sessions)]) == 0
    return folder


@pytest.fixture
def store(filled: Path, tmp_path: Path) -> Path:
    """A copy of the filled store."""
    return Path(shutil.copytree(filled, tmp_path / "store"))


def _log(bundle: Path, store: Path) -> list[str]:
    with Bundle.open(bundle).session(store=store) as session:
        return [u.text for u in session.utterances()]


def test_episodes_reads_a_history_that_chat_answers_from(tiny_bundle: Path, two_sessions: Path, store: Path, run: Run) -> None:
    ran = run("episodes", tiny_bundle, "--store", store, "--json")
    shown = ran.json
    assert ran.code == 0
    count = sum(len(json.loads(two_sessions.read_text())[0]["conversation"][f"session_{n}"]) for n in (1, 2))
    assert shown["utterances"] == count
    assert len(shown["episodes"]) == 2
    assert len({e["n_seen"] for e in shown["episodes"]}) == 1
    assert shown["episodes"][0]["n_seen"] > 10 * count
    answer = run("chat", tiny_bundle, "--store", store, "--question", "Who?", "--max-tokens", "2", "--json")
    assert answer.code == 0
    assert len(_log(tiny_bundle, store)) == count + 2


def test_the_same_history_again_goes_on_with_the_store(
    tiny_bundle: Path, two_sessions: Path, store: Path, run: Run, tmp_path: Path
) -> None:
    again = ["episodes", tiny_bundle, "--store", store, "--history", two_sessions, "--json"]
    first = run(*again)
    assert first.code == 0
    assert run("chat", tiny_bundle, "--store", store, "--question", "Who?", "--max-tokens", "2").code == 0
    after = run(*again)  # what was said since is read too
    assert after.code == 0
    assert after.json["utterances"] == first.json["utterances"] + 2
    assert after.json["episodes"][0]["n_seen"] > first.json["episodes"][0]["n_seen"]
    other = run("episodes", tiny_bundle, "--store", store, "--history", save_history(tmp_path / "other.json"))
    assert other.code == 1
    assert "another history" in other.err
    assert "--wipe" in other.err


def test_forget_deletes_a_range_and_its_text(tiny_bundle: Path, store: Path, run: Run) -> None:
    before = _log(tiny_bundle, store)
    ran = run("episodes", tiny_bundle, "--store", store, "--forget", "2-4", "--json")
    assert ran.code == 0
    assert _log(tiny_bundle, store) == before[:2] + before[5:]
    stored = b"".join(p.read_bytes() for p in store.iterdir())
    assert before[3].encode() not in stored
    assert before[5].encode() in stored
    assert len({e["n_seen"] for e in ran.json["episodes"]}) == 1  # read again to the end


def test_a_range_outside_the_log_is_refused(tiny_bundle: Path, store: Path, run: Run) -> None:
    before = _log(tiny_bundle, store)
    for wanted in ("4-2", f"0-{len(before)}"):
        ran = run("episodes", tiny_bundle, "--store", store, "--forget", wanted)
        assert ran.code == 2
        assert f"the log has 0 to {len(before) - 1}" in ran.err
    assert _log(tiny_bundle, store) == before


@pytest.mark.parametrize("wanted", ["two", "1-", "-3", "1-2-3", ""])
def test_a_range_that_is_none_is_refused(tiny_bundle: Path, run: Run, tmp_path: Path, wanted: str) -> None:
    ran = run("episodes", tiny_bundle, "--store", tmp_path, f"--forget={wanted}")
    assert ran.code == 2
    assert "FIRST-LAST" in ran.err


def test_wipe_deletes_the_store_and_nothing_else(tiny_bundle: Path, store: Path, run: Run) -> None:
    beside = store.with_name("beside")
    beside.write_text("stays")
    assert run("episodes", tiny_bundle, "--store", store, "--wipe").code == 0
    assert names(beside.parent) == {"beside"}
    assert Bundle.open(tiny_bundle)


@pytest.mark.parametrize("name", ["index.json", "log-*.jsonl"])
def test_a_damaged_store_is_wiped_too(tiny_bundle: Path, store: Path, run: Run, name: str) -> None:
    (path,) = store.glob(name)
    path.write_bytes(path.read_bytes()[:-9])
    assert run("episodes", tiny_bundle, "--store", store).code == 1
    assert run("episodes", tiny_bundle, "--store", store, "--wipe").code == 0
    assert not store.exists()


def test_wipe_never_deletes_a_folder_that_holds_anything_else(tiny_bundle: Path, store: Path, run: Run) -> None:
    (store / "index.json").write_text("{}")
    (store / "photo.jpg").write_bytes(b"cat")
    ran = run("episodes", tiny_bundle, "--store", store, "--wipe")
    assert ran.code == 1
    assert "photo.jpg" in ran.err
    assert (store / "photo.jpg").exists()


def test_the_store_of_another_bundle_is_refused(small_bundle: Bundle, tiny_bundle: Path, store: Path, run: Run) -> None:
    before = {p.name: p.read_bytes() for p in store.iterdir()}
    for words in (
        ["episodes", small_bundle.path, "--store", store],
        ["episodes", small_bundle.path, "--store", store, "--wipe"],
        ["chat", small_bundle.path, "--store", store, "--question", "Who?"],
    ):
        ran = run(*words)
        assert ran.code == 1
        assert f"belongs to bundle {Bundle.open(tiny_bundle).id}" in ran.err
    assert {p.name: p.read_bytes() for p in store.iterdir() if p.name != "lock"} == {
        name: data for name, data in before.items() if name != "lock"
    }


def test_a_missing_store_is_named_with_what_begins_one(tiny_bundle: Path, run: Run, tmp_path: Path) -> None:
    for flags in ([], ["--forget", "1"], ["--wipe"]):
        ran = run("episodes", tiny_bundle, "--store", tmp_path / "none", *flags)
        assert ran.code == 1
        assert f"{tmp_path / 'none'} is no store" in ran.err
        assert ("nothing to delete" if "--wipe" in flags else "--history") in ran.err
    assert not names(tmp_path)


def test_one_writer_at_a_time(tiny_bundle: Path, store: Path, run: Run) -> None:
    with Bundle.open(tiny_bundle).session(store=store):
        ran = run("chat", tiny_bundle, "--store", store, "--question", "Who?")
    assert ran.code == 1
    assert f"in use by process {os.getpid()}" in ran.err
