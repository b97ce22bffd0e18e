"""Signals and full disks: a destination is whole or absent, and nothing is left beside it that the next run keeps."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import ROOT, Ran, Tiny, finish, names, save_history, start

from exporter.cli.main import main
from runtime_py.bundle import Bundle
from runtime_py.episodes.store import Store
from runtime_py.integrity import check_sums

pytest_plugins = ["tiny_fixtures"]

STOPPED = "failed: Stopped. Nothing half-written was left; run the same command again to go on.\n"


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    """Read standard error up to ``line``."""
    assert process.stderr is not None
    seen = []
    for each in process.stderr:
        seen.append(each)
        if each.strip() == line:
            return
    pytest.fail(f"{line} was never printed:\n{''.join(seen)}")


def wait_until(holds: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Poll while the process runs."""
    deadline = time.monotonic() + 60
    while not holds():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


def interrupt(process: subprocess.Popen[str], number: int) -> Ran:
    process.send_signal(number)
    return finish(process)


def build_until(tiny: Tiny, folder: Path, stage: str) -> subprocess.Popen[str]:
    """A build that is inside ``stage``."""
    process = start(*tiny.build(folder / "out"))
    wait_for(process, f"[{stage}]")
    if stage == "episodes":
        wait_until(lambda: list(folder.glob(".out.building-*/store-*/store/index.json")), process)
    else:
        time.sleep(0.3)
    return process


@pytest.mark.parametrize(
    "stages",
    [["episodes"], pytest.param(["load", "lower", "episodes", "verify"], marks=pytest.mark.slow)],
    ids=["episodes", "every stage"],
)
def test_a_killed_build_leaves_nothing_that_the_next_one_keeps(tiny: Tiny, tmp_path: Path, stages: list[str]) -> None:
    for stage in stages:
        assert interrupt(build_until(tiny, tmp_path, stage), signal.SIGKILL).code == -signal.SIGKILL
        assert not (tmp_path / "out").exists()
        assert len(names(tmp_path)) == 1  # the folder of this kill, no longer that of the one before
    assert main(tiny.build(tmp_path / "out")) == 0
    assert names(tmp_path) == {"out"}
    assert check_sums(tmp_path / "out") == []


SIGNALS = [
    pytest.param("episodes", signal.SIGINT, id="episodes-SIGINT"),
    *(
        pytest.param(stage, number, id=f"{stage}-{number.name}", marks=pytest.mark.slow)
        for stage in ("load", "lower", "episodes", "verify")
        for number in (signal.SIGINT, signal.SIGTERM)
        if (stage, number) != ("episodes", signal.SIGINT)
    ),
]


@pytest.mark.parametrize(("stage", "number"), SIGNALS)
def test_an_interrupted_build_cleans_up_at_once(tiny: Tiny, tmp_path: Path, stage: str, number: int) -> None:
    ran = interrupt(build_until(tiny, tmp_path, stage), number)
    assert ran.code == 1
    assert ran.err.endswith(STOPPED)
    assert "Traceback" not in ran.err
    assert names(tmp_path) == set()


@pytest.mark.slow
def test_a_second_build_does_not_touch_a_running_one(tiny: Tiny, tmp_path: Path) -> None:
    first = build_until(tiny, tmp_path, "lower")
    try:
        (building,) = names(tmp_path)
        refused = finish(start(*tiny.build(tmp_path / "out", budget=100)))
        assert refused.code == 2
        assert names(tmp_path) == {building}
    finally:
        assert interrupt(first, signal.SIGINT).code == 1


@pytest.fixture(scope="module")
def long_history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 300 blocks for the tiny bundle."""
    return save_history(tmp_path_factory.mktemp("long") / "long.json", utterances=400, sessions=8)


def read_until(bundle: Path, store: Path, history: Path) -> subprocess.Popen[str]:
    """``episodes`` that has stored some blocks of the second episode."""
    process = start("episodes", bundle, "--store", store, "--history", history)

    def begun() -> bool:
        index = store / "index.json"
        episodes = json.loads(index.read_bytes())["index"]["episodes"] if index.exists() else []
        return len(episodes) == 2 and episodes[1]["n_seen"] > 0

    wait_until(begun, process)
    return process


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_reading_goes_on_where_it_was_killed(tiny_bundle: Path, long_history: Path, tmp_path: Path, number: int) -> None:
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    ran = interrupt(read_until(tiny_bundle, stopped, long_history), number)
    assert ran.code == (1 if number == signal.SIGINT else -signal.SIGKILL)
    assert number == signal.SIGKILL or ran.err.endswith(STOPPED)
    bundle = Bundle.open(tiny_bundle)
    with Store.open(stopped, bundle.id, tiny_bundle / "episodes") as store:
        seen = [e.n_seen for e in store.episodes()]
    assert 0 < seen[1] < seen[0]  # it did not have to begin again
    for folder in (stopped, whole):
        assert main(["episodes", str(tiny_bundle), "--store", str(folder), "--history", str(long_history)]) == 0
    with (
        Store.open(stopped, bundle.id, tiny_bundle / "episodes") as first,
        Store.open(whole, bundle.id, tiny_bundle / "episodes") as second,
    ):
        for episode in range(2):
            one, other = first.cache(episode), second.cache(episode)
            assert one is not None and other is not None
            assert one.n_seen == other.n_seen
            pairs = zip([*one.k, *one.v, *one.src], [*other.k, *other.v, *other.src], strict=True)
            assert all((a == b).all() for a, b in pairs)
    assert not [name for name in names(stopped) if name.startswith(".")]


# Sets the limit on the size of files when a stage begins, then runs the command line.
FULL = """
import contextlib, resource, sys
import exporter.cli.build as build
from exporter.cli.main import main
from exporter.console import Stages
stage, limit = sys.argv[1], int(sys.argv[2])
class Full(Stages):
    @contextlib.contextmanager
    def stage(self, name, size_of=None):
        if name == stage:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with super().stage(name, size_of) as inside:
            yield inside
build.Stages = Full
sys.exit(main(sys.argv[3:]))
"""


DISKS = [
    ("lower", 4_000_000),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (("load", 1000), ("episodes", 5000), ("verify", 100))),
]


@pytest.mark.parametrize(("stage", "limit"), DISKS)
def test_a_full_disk_ends_a_build_with_a_sentence(tiny: Tiny, tmp_path: Path, stage: str, limit: int) -> None:
    command = [sys.executable, "-c", FULL, stage, str(limit), *tiny.build(tmp_path / "out")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("failed: ")
    assert "cannot be written" in ran.stderr.splitlines()[-1]
    assert "limit" in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr
    assert "ignored" not in ran.stderr
    assert names(tmp_path) == set()


def limited(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_disk_too_full_for_the_log_leaves_no_store(tiny_bundle: Path, long_history: Path, tmp_path: Path) -> None:
    words = ["episodes", tiny_bundle, "--store", tmp_path / "store", "--history", long_history]
    ran = finish(start(*words, preexec_fn=limited(10_000)))
    assert ran.code == 1
    assert "cannot be written" in ran.err.splitlines()[-1]
    assert "Traceback" not in ran.err
    assert names(tmp_path) == set()


def test_a_disk_too_full_for_an_episode_keeps_the_log_and_goes_on_later(tiny_bundle: Path, tiny: Tiny, tmp_path: Path) -> None:
    words = ["episodes", tiny_bundle, "--store", tmp_path / "store", "--history", tiny.history, "--json"]
    ran = finish(start(*words, preexec_fn=limited(9_000)))
    assert ran.code == 1
    assert "cannot be written" in ran.err.splitlines()[-1]
    assert "Traceback" not in ran.err
    assert names(tmp_path) == {"store"}
    assert not [name for name in names(tmp_path / "store") if name.startswith(".")]
    again = finish(start(*words))
    assert again.code == 0
    assert [e["n_seen"] > 500 for e in json.loads(again.out)["episodes"]] == [True, True]


LOST = """
import os, signal, sys
from exporter.console import Stages
from exporter.interrupts import handle_signals
handle_signals()
class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass
late = Late()
del late
print("lost", flush=True)
try:
    Stages().note("more work")
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_a_ctrl_c_that_falls_into_a_destructor_is_not_lost() -> None:
    ran = subprocess.run([sys.executable, "-c", LOST], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout == "lost\n", ran.stderr  # Python has dropped the exception
    assert "more work" not in ran.stderr
    assert ran.returncode == 7
