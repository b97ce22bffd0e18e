"""The store under faults: kills at every point, full disks, damaged and lying files, two writers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from disk_faults import file_size_limit, kill_at, tree
from store_samples import BUNDLE, damage, equal, make_cache, one, reopened, said

from runtime_py import files
from runtime_py.episodes import store_index
from runtime_py.episodes.history import Utterance
from runtime_py.episodes.store import Store
from runtime_py.episodes.store_commit import wipe_folder
from runtime_py.episodes.store_index import INDEX, json_bytes
from runtime_py.errors import StoreError, WorkError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with Store.create(folder, BUNDLE, ["Ana", "Béla"]) as opened:
        yield opened


def test_an_interrupt_after_the_commit_keeps_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_episode(0, make_cache(1))
    sync, calls = files.sync_folder, 0

    def interrupted(path: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # the first is the cache file's, the second that of index.json, already replaced
            raise KeyboardInterrupt
        sync(path)

    monkeypatch.setattr(files, "sync_folder", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put_episode(0, make_cache(2))
    assert calls == 2 and equal(store.cache(0), make_cache(2))
    store.append(said(0))
    with reopened(store) as again:
        assert equal(again.cache(0), make_cache(2)) and again.utterances() == said(0)


def test_one_writer_at_a_time(store: Store, folder: Path) -> None:
    store.close()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            _held = Store.open(folder, BUNDLE)
            os.write(writer, b"x")
            signal.pause()
        os._exit(3)
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    with pytest.raises(StoreError, match=f"in use by process {pid};"):
        Store.open(folder, BUNDLE)
    with pytest.raises(StoreError, match=f"in use by process {pid};"):
        wipe_folder(folder)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with Store.open(folder, BUNDLE), pytest.raises(StoreError, match=f"in use by process {os.getpid()};"):
        Store.open(folder, BUNDLE)


def test_litter_and_uncommitted_log_are_removed_on_opening(store: Store, folder: Path) -> None:
    store.append(said(0))
    store.put_episode(0, make_cache(1))
    store.close()
    clean = tree(folder)
    for name in ("episode-0-00099.safetensors", ".index.json.writing-1-ab", "junk"):
        (folder / name).write_bytes(b"litter")
    (folder / "link").symlink_to(folder.parent)
    with (folder / "log-00001.jsonl").open("ab") as file:
        file.write(b'{"session": 0, "da')
    with Store.open(folder, BUNDLE) as again:
        assert again.utterances() == said(0)
        again.append(said(3))
        assert {name for name in tree(folder)} == set(clean)
    with Store.open(folder, BUNDLE) as again:
        assert again.utterances() == said(0, 6)


def test_damage_is_found_at_first_use_and_named(store: Store, folder: Path) -> None:
    store.append(said(0))
    store.put_episode(0, make_cache(1))
    store.put_sealed(0, make_cache(1).k)
    store.set_centroids(np.eye(2, dtype=np.float32))
    store.queue_episode("?", np.ones(3, np.float32))
    cache = one(folder, "episode-0-*[0-9].safetensors")
    for pattern in ("*.sealed.safetensors", "question-*", "centroids-*"):
        damage(one(folder, pattern))
    with reopened(store) as again:
        assert again.sealed(0) is None and again.queued()[0].vector is None
        with pytest.raises(StoreError, match=r"centroids-\d+\.safetensors is damaged"):
            again.centroids()
        assert equal(again.cache(0), make_cache(1))
        damage(cache)  # behind the back of a running process
        with pytest.raises(StoreError, match=cache.name):
            again.cache(0)
        cache.unlink()
        with pytest.raises(StoreError, match=cache.name):
            again.cache(0)
        again.reset_episode(0)
        assert again.cache(0) is None
    log = one(folder, "log-*")
    damage(log)
    with pytest.raises(StoreError, match=log.name):
        Store.open(folder, BUNDLE)
    log.unlink()
    with pytest.raises(StoreError, match=log.name):
        Store.open(folder, BUNDLE)


def test_a_checked_file_is_not_read_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_episode(0, make_cache(1))
    calls: list[Path] = []
    digest = store_index.sha256_file

    def counted(path: Path) -> str:
        calls.append(path)
        return digest(path)

    monkeypatch.setattr(store_index, "sha256_file", counted)
    for _ in range(3):
        assert store.cache(0) is not None
    assert calls == [], "a file just written needs no check"
    with reopened(store) as again:
        assert calls == []
        for _ in range(3):
            assert again.cache(0) is not None
        assert len(calls) == 1
        one(store.folder, "episode-0-*").touch()
        assert again.cache(0) is not None and len(calls) == 2


def test_any_changed_byte_of_the_index_is_found(store: Store, folder: Path) -> None:
    store.put_episode(0, make_cache(1), prompt=[1, 2])
    store.close()
    data = (folder / INDEX).read_bytes()
    for position in range(len(data)):
        for changed in (data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :], data[:position]):
            (folder / INDEX).write_bytes(changed)
            with pytest.raises(StoreError, match=r"index\.json is damaged"):
                Store.open(folder, BUNDLE)


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"speakers": 3},
        {"centroids": "../secret"},
        {"centroids": "/etc/passwd"},
        {"centroids": "index.json"},
        {"centroids": "unlisted"},
        {"log": {"file": "../log", "bytes": 0, "utterances": 0, "sha256": hashlib.sha256().hexdigest()}},
        {"log": {"file": "log-00001.jsonl", "bytes": -1, "utterances": 0, "sha256": hashlib.sha256().hexdigest()}},
        {"log": {"file": "log-00001.jsonl", "bytes": 2**70, "utterances": 0, "sha256": ""}},
        {"log": {"file": "log-00001.jsonl", "bytes": 0, "utterances": 5, "sha256": hashlib.sha256().hexdigest()}},
    ],
)
def test_an_index_that_lies_is_refused(store: Store, folder: Path, change: dict[str, object]) -> None:
    store.close()
    content = {**json.loads((folder / INDEX).read_bytes())["index"], **change}
    body = json_bytes(content)
    digest = hashlib.sha256(body).hexdigest().encode()
    (folder / INDEX).write_bytes(b'{"sha256":"%s","index":%s}\n' % (digest, body))
    with pytest.raises(StoreError):
        Store.open(folder, BUNDLE)


def test_a_damaged_store_can_be_wiped_but_nothing_else(store: Store, folder: Path, tmp_path: Path) -> None:
    store.append(said(0))
    store.close()
    damage(folder / INDEX)
    (folder / "diary.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"diary\.txt"):
        wipe_folder(folder)
    (folder / "diary.txt").unlink()
    wipe_folder(folder)
    assert not folder.exists()
    with pytest.raises(StoreError, match="not deleted"):
        wipe_folder(folder)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / INDEX).write_text("{}")
    with pytest.raises(StoreError, match="not deleted"):
        wipe_folder(tmp_path / "site")
    assert tree(tmp_path) == {"site/index.json": b"{}"}


@pytest.mark.parametrize(
    "act",
    [
        lambda s: s.append([Utterance(0, "", "Ana", "x" * 20_000)]),
        lambda s: s.replace_log([Utterance(0, "", "Ana", "x" * 20_000)]),
        lambda s: s.put_episode(1, make_cache(9, (64, 64))),
        lambda s: s.set_centroids(np.zeros((50, 100), np.float32)),
        lambda s: s.queue_episode("q" * 20_000),
        lambda s: (s.append(said(3)), s.queue_episode("q" * 20_000)),
    ],
)
def test_a_full_disk_leaves_the_old_state(store: Store, folder: Path, act: Callable[[Store], object]) -> None:
    store.append(said(0))
    store.put_episode(0, make_cache(1))
    before = tree(folder)
    with file_size_limit(8_000), pytest.raises(WorkError, match="file size limit"), store.transaction():
        act(store)
    assert tree(folder) == before and store.utterances() == said(0) and equal(store.cache(0), make_cache(1))
    act(store)
    after = store.utterances()
    with reopened(store) as again:
        assert again.utterances() == after and (folder / INDEX).read_bytes() != before[INDEX]


def test_a_full_disk_makes_no_half_store(folder: Path) -> None:
    with file_size_limit(100), pytest.raises(WorkError, match="file size limit"):
        Store.create(folder, BUNDLE, ["Ana"])
    assert list(folder.parent.iterdir()) == []
    shutil.rmtree(folder.parent)
    Store.create(folder, BUNDLE, ["Ana"]).close()


STEPS_A_GROUP = 4
Snapshot = tuple[int, tuple[tuple[int, bool], ...], int]
"""Utterances; n_seen of each episode and whether it is sealed; rows of the centroids."""


def take_step(store: Store, step: int) -> None:
    """One durable change; ``step`` counts from 0 and decides everything about it."""
    group, kind = divmod(step, STEPS_A_GROUP)
    i, first = group % 3, group * 5
    if kind == 0:
        store.append(said(first))
    elif kind == 1:
        store.put_episode(i, make_cache(step))
    elif kind == 2:
        store.put_sealed(i, make_cache(step).k)
    else:
        with store.transaction():
            store.append(said(first + 3, 2))
            store.put_episode(i, make_cache(step))
            store.set_centroids(np.ones((group + 1, 2), np.float32))


def expected(steps: int) -> Snapshot:
    """What a store holds after ``steps`` steps."""
    groups, rest = divmod(steps, STEPS_A_GROUP)
    episodes: dict[int, tuple[int, bool]] = {}
    for step in range(steps):
        group, kind = divmod(step, STEPS_A_GROUP)
        if kind:
            seen = step - 1 if kind == 2 else step
            episodes[group % 3] = (seen, kind == 2)
    return groups * 5 + (3 if rest else 0), tuple(episodes[i] for i in sorted(episodes)), groups


def snapshot(store: Store) -> Snapshot:
    """What the store holds, after checking that every file holds what its step wrote."""
    count = len(store.utterances())
    assert store.utterances() == said(0, count)
    episodes = []
    for i, entry in enumerate(store.episodes()):
        assert store.cache(i) is None if entry.cache is None else equal(store.cache(i), make_cache(entry.n_seen))
        sealed = store.sealed(i)
        assert (sealed is None) == (entry.sealed is None)
        if sealed is not None:
            assert all(map(np.array_equal, sealed, make_cache(entry.n_seen + 1).k))
        episodes.append((entry.n_seen, sealed is not None))
    centroids = store.centroids()
    return count, tuple(episodes), 0 if centroids is None else len(centroids)


def test_a_writer_killed_at_random_loses_nothing_it_reported(folder: Path) -> None:
    Store.create(folder, BUNDLE, ["Ana", "Béla"]).close()
    rng, done = random.Random(8), 0
    for _ in range(30):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                child = Store.open(folder, BUNDLE)
                for step in range(done, done + 10_000):
                    take_step(child, step)
                    os.write(writer, b".")
            os._exit(3)
        os.close(writer)
        os.read(reader, 1)  # it has started
        time.sleep(rng.random() * 0.05)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "the writer failed before it was killed"
        reported = 1
        while data := os.read(reader, 4096):
            reported += len(data)
        os.close(reader)
        store_index._checked.clear()
        with Store.open(folder, BUNDLE) as store:
            found = snapshot(store)
            assert found in (expected(done + reported), expected(done + reported + 1))
            assert set(tree(folder)) == store._commits.current.index.own_files() | {INDEX, "lock"}
        done += reported + (found != expected(done + reported))
    assert done >= 25  # each writer was killed after at least one commit


CHANGES: dict[str, Callable[[Store], object]] = {
    "append": lambda store: store.append(said(8)),
    "put_episode": lambda store: store.put_episode(0, make_cache(40)),
    "put_sealed": lambda store: store.put_sealed(0, make_cache(4).k),
    "step of several": lambda store: take_step(store, 7),
    "queue": lambda store: store.queue_episode("?", np.ones(2, np.float32)),
    "replace_log": lambda store: store.replace_log(said(0, 2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_kill_at_every_step_leaves_the_old_or_the_new(folder: Path, name: str) -> None:
    """Kill before each single change of the disk in turn: creation, renaming, syncing, deletion."""

    def contents() -> tuple[object, ...]:
        store_index._checked.clear()
        with Store.open(folder, BUNDLE) as store:
            return [each.text for each in store.utterances()], snapshot(store), len(store.queued())

    def act() -> None:
        with Store.open(folder, BUNDLE) as store:
            CHANGES[name](store)

    with Store.create(folder, BUNDLE, ["Ana", "Béla"]) as store:
        for step in range(5):
            take_step(store, step)
    saved = folder.with_name("saved")
    shutil.copytree(folder, saved)
    before = contents()
    act()
    after = contents()
    assert before != after
    seen = []
    for step in range(1, 100):
        shutil.rmtree(folder)
        shutil.copytree(saved, folder)
        finished = kill_at(step, act)
        seen.append(contents())
        assert seen[-1] in (before, after)
        if finished:
            break
        if name == "replace_log" and seen[-1] == after:
            assert not any(b"utterance 4" in data for data in tree(folder).values())
    assert finished and seen[-1] == after and seen[0] == before and len(seen) > 4
    assert seen == sorted(seen, key=lambda state: state == after), "there is one moment of commitment"


def test_a_killed_wipe_can_be_done_again(folder: Path) -> None:
    for step in range(1, 60):
        store = Store.create(folder, BUNDLE, ["Ana", "Béla"])
        for number in range(4):
            take_step(store, number)
        store.close()

        def wipe() -> None:
            Store.open(folder, BUNDLE).wipe()

        finished = kill_at(step, wipe)
        if (folder / INDEX).exists():
            wipe_folder(folder)
        if finished or not folder.exists():
            assert not folder.exists()
        else:
            assert set(tree(folder)) <= {"lock"}, "text of the conversation was left"
        if finished:
            break
    assert finished and step > 5
