"""The store: what it keeps, what it refuses, what it forgets."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from disk_faults import tree
from store_samples import BUNDLE, damage, equal, make_cache, reopened, said

from runtime_py.episodes.cache_files import write_cache, write_sealed
from runtime_py.episodes.history import Utterance
from runtime_py.episodes.store import Store
from runtime_py.episodes.store_index import INDEX
from runtime_py.errors import StoreError, UsageError, WorkError
from runtime_py.tensor_files import write_tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with Store.create(folder, BUNDLE, ["Ana", "Béla"]) as opened:
        yield opened


def test_everything_survives_reopening(store: Store) -> None:
    store.append(said(0))
    store.append(said(3, 10))
    store.append([])
    store.put_episode(0, make_cache(1), prompt=[5, 6], medoids=[0, 2])
    store.put_prompt(1, [7], [1, 3])
    store.put_episode(1, make_cache(2))
    store.put_sealed(1, make_cache(3).k)
    store.set_centroids(np.eye(2, 5, dtype=np.float32))
    store.set_shared(make_cache(4))
    store.queue_episode("What about the 한국 trip?", np.arange(5, dtype=np.float32))
    store.queue_episode("And?")
    store.set_settings({"recall": 4, "note": "ü", "list": [1.5, None]})
    with reopened(store) as again:
        assert again.bundle_id == BUNDLE and again.speakers == ("Ana", "Béla")
        assert again.utterances() == said(0, 13)
        assert [(e.prompt, e.medoids, e.n_seen) for e in again.episodes()] == [([5, 6], [0, 2], 1), ([7], [1, 3], 2)]
        assert equal(again.cache(0), make_cache(1)) and equal(again.cache(1), make_cache(2))
        sealed = again.sealed(1)
        assert sealed is not None and all(map(np.array_equal, sealed, make_cache(3).k)) and again.sealed(0) is None
        assert equal(again.shared(), make_cache(4))
        centroids = again.centroids()
        assert centroids is not None and np.array_equal(centroids, np.eye(2, 5))
        first, second = again.queued()
        assert first.question == "What about the 한국 trip?" and first.vector is not None and first.vector[4] == 4
        assert second.question == "And?" and second.vector is None
        again.unqueue_episode()
        assert [each.question for each in again.queued()] == ["And?"]
        assert again.settings() == {"recall": 4, "note": "ü", "list": [1.5, None]}


def test_caches_are_mapped_read_only(store: Store) -> None:
    store.put_episode(0, make_cache(1))
    store.put_sealed(0, make_cache(1).k)
    cache, sealed = store.cache(0), store.sealed(0)
    assert cache is not None and sealed is not None
    for array in (*cache.k, *cache.v, *cache.src, *sealed):
        assert isinstance(array, np.memmap) and not array.flags.writeable
    store.put_episode(0, make_cache(2))
    assert equal(cache, make_cache(1)), "arrays given out before stay valid"


def test_a_new_cache_makes_the_sealed_keys_stale(store: Store) -> None:
    store.put_episode(0, make_cache(1))
    store.put_sealed(0, make_cache(1).k)
    store.put_episode(0, make_cache(2))
    assert store.sealed(0) is None and equal(store.cache(0), make_cache(2))
    assert len([name for name in tree(store.folder) if name.startswith("episode")]) == 1, "replaced files are deleted"
    store.put_sealed(0, make_cache(2).k)
    store.reset_episode(0)
    assert store.cache(0) is None and store.sealed(0) is None and store.episodes()[0].n_seen == 0
    store.clear_episodes()
    assert store.episodes() == [] and store.centroids() is None


def test_names_are_never_used_again(store: Store) -> None:
    seen: set[str] = set()
    for seed in range(1, 8):
        store.put_episode(0, make_cache(seed))
        store.set_centroids(np.eye(2, dtype=np.float32))
        names = {name for name in tree(store.folder) if name.endswith(".safetensors")}
        assert len(names) == 2 and not names & seen
        seen |= names


def test_wrong_requests_are_refused(store: Store) -> None:
    for call in (lambda: store.cache(0), lambda: store.put_episode(1, make_cache(1)), lambda: store.reset_episode(-1)):
        with pytest.raises(UsageError, match="There is no episode"):
            call()
    store.put_episode(0, make_cache(1))
    with pytest.raises(UsageError, match="do not fit episode 0"):
        store.put_sealed(0, make_cache(1, (4, 5)).k)
    broken = dataclasses.replace(make_cache(1), v=make_cache(1, (4, 5)).v)
    with pytest.raises(UsageError, match="layer 1 has shapes"):
        store.put_episode(0, broken)
    for settings in ({"a": object()}, {"a": float("nan")}):
        with pytest.raises(UsageError, match="Settings"):
            store.set_settings(settings)
    store.append([Utterance(3, "", "Ana", "x")])
    with pytest.raises(WorkError, match="Utterance 1 belongs to session 2"):
        store.append([Utterance(2, "", "Ana", "y")])
    assert len(store.utterances()) == 1 and equal(store.cache(0), make_cache(1))


def test_a_transaction_commits_all_or_nothing(store: Store) -> None:
    store.append(said(0))
    store.put_episode(0, make_cache(1))
    before = tree(store.folder)
    with pytest.raises(RuntimeError), store.transaction():
        store.append(said(3))
        store.put_episode(0, make_cache(2))
        store.put_episode(1, make_cache(3))
        assert len(store.utterances()) == 6 and equal(store.cache(0), make_cache(2)), "it sees its own changes"
        raise RuntimeError
    assert tree(store.folder) == before and store.utterances() == said(0) and equal(store.cache(0), make_cache(1))
    with store.transaction():
        store.append(said(3))
        with store.transaction():
            store.put_episode(0, make_cache(2))
        store.put_episode(0, make_cache(4))
        assert (store.folder / INDEX).read_bytes() == before[INDEX], "nothing is committed before the end"
    with reopened(store) as again:
        assert again.utterances() == said(0, 6) and equal(again.cache(0), make_cache(4))


def test_other_threads_wait_for_a_transaction(store: Store) -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(len(store.utterances())))
    with store.transaction():
        store.append(said(0))
        thread.start()
        thread.join(0.1)
        assert found == []
        store.append(said(3))
    thread.join(10)
    assert found == [6]


def test_another_bundle_is_refused(store: Store, folder: Path) -> None:
    store.close()
    with pytest.raises(StoreError) as caught:
        Store.open(folder, "b" * 64)
    for words in (BUNDLE, "b" * 64, "episodes --store"):
        assert words in str(caught.value)
    Store.open(folder, BUNDLE).close()


def test_creating_needs_an_empty_place(store: Store, folder: Path, tmp_path: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(StoreError, match="cannot become a new store"):
        Store.create(folder, BUNDLE, [])
    (tmp_path / "empty").mkdir()
    Store.create(tmp_path / "empty", BUNDLE, []).close()
    with pytest.raises(StoreError, match=r"not a store.*episodes --store"):
        Store.open(tmp_path, BUNDLE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "store"]


def test_a_closed_store_refuses_everything(store: Store) -> None:
    store.close()
    store.close()
    for call in (store.utterances, lambda: store.append(said(0)), store.shared, store.wipe):
        with pytest.raises(StoreError, match="is closed"):
            call()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    found = tmp_path / "bundle" / "episodes"
    found.mkdir(parents=True)
    write_cache(found / "episode-0.safetensors", make_cache(1))
    write_sealed(found / "episode-0.sealed.safetensors", make_cache(5).k, 1)
    write_tensors(found / "centroids.safetensors", {"centroids": np.eye(3, dtype=np.float32)}, {})
    return found


def test_base_files_are_used_and_never_touched(base: Path, folder: Path) -> None:
    before = tree(base)
    with Store.create(folder, BUNDLE, [], base) as store:
        store.use_base_episode(0, "episode-0.safetensors", "episode-0.sealed.safetensors", [1], [0])
        store.use_base_centroids()
        for name in ("../x", "log-00001.jsonl", "/etc/passwd"):
            with pytest.raises(UsageError, match="not the name of a file"):
                store.use_base_centroids(name)
        with pytest.raises(StoreError, match="missing"):
            store.use_base_centroids("missing")
    with pytest.raises(StoreError, match="Open it with that bundle"):
        Store.open(folder, BUNDLE)
    store = reopened(store, base)
    assert equal(store.cache(0), make_cache(1)) and store.sealed(0) is not None and store.centroids() is not None
    assert [name for name in tree(folder) if name.endswith(".safetensors")] == []
    store.put_episode(0, make_cache(2))
    store.set_centroids(np.eye(2, dtype=np.float32))
    assert equal(store.cache(0), make_cache(2)) and tree(base) == before
    store.use_base_episode(0, "episode-0.safetensors", "episode-0.sealed.safetensors", [1], [0])
    store.replace_log(said(0))
    assert store.cache(0) is None and tree(base) == before
    store.use_base_episode(0, "episode-0.safetensors", "episode-0.sealed.safetensors", [1], [0])
    damage(base / "episode-0.sealed.safetensors")
    assert store.sealed(0) is None and store.cache(0) is not None
    damage(base / "episode-0.safetensors")
    with pytest.raises(StoreError, match=str(base)):
        store.cache(0)
    before = tree(base)
    store.wipe()
    assert tree(base) == before


def holds(folder: Path, text: str) -> bool:
    return any(text.encode() in data for data in tree(folder).values())


def test_forgotten_text_is_nowhere(store: Store, folder: Path) -> None:
    secret = Utterance(0, "", "Ana", "the code is 4711-swordfish", "D9")
    with store.transaction():
        store.append([*said(0), secret, *said(3)])
        store.put_episode(0, make_cache(1), prompt=[47114711], medoids=[0])
        store.put_episode(1, make_cache(2), prompt=[9], medoids=[1])
        store.set_shared(make_cache(3))
        store.queue_episode("What does 4711-swordfish open?", np.ones(2, np.float32))
    assert holds(folder, "4711-swordfish") and holds(folder, "47114711")
    store.replace_log(said(0, 6), keep_episodes=[1])
    assert not holds(folder, "4711-swordfish") and not holds(folder, "47114711")
    assert store.utterances() == said(0, 6) and store.queued() == [] and store.shared() is None
    assert store.cache(0) is None and store.episodes()[0].prompt == [] and equal(store.cache(1), make_cache(2))
    store.append(said(6))
    with reopened(store) as again:
        assert again.utterances() == said(0, 9) and len(list(folder.iterdir())) == 4
        again.set_shared(make_cache(3))
        again.replace_log([], keep_shared=True)
        assert again.utterances() == [] and equal(again.shared(), make_cache(3)) and again.cache(1) is None


def test_a_rolled_back_append_leaves_no_text(store: Store, folder: Path) -> None:
    with pytest.raises(RuntimeError), store.transaction():
        store.append([Utterance(0, "", "Ana", "swordfish")])
        raise RuntimeError
    assert not holds(folder, "swordfish")


def test_wipe_deletes_everything(store: Store, folder: Path) -> None:
    store.append(said(0))
    (folder / "sub").mkdir()
    with store.transaction(), pytest.raises(UsageError, match="inside a transaction"):
        store.wipe()
    store.wipe()
    assert not folder.exists()
    Store.create(folder, BUNDLE, []).close()


def test_text_that_utf8_cannot_hold_is_kept(store: Store) -> None:
    odd = [Utterance(0, "", "Ana", "half \ud83d of a pair\u2028"), Utterance(0, "", "Ana", "")]
    store.append(odd)
    with reopened(store) as again:
        assert again.utterances() == odd
