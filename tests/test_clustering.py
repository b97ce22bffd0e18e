"""From a log to episodes and back: stores that begin with a bundle, clustering anew, forgetting, new episodes, wiping."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from bundle_fixtures import RecordingEngine, copy_bundle, edit_json, same_caches
from store_samples import damage, one

from runtime_py.bundle import Bundle
from runtime_py.engines.base import Array
from runtime_py.episodes.clustering import add_episode, cluster_store, open_store
from runtime_py.episodes.history import Utterance
from runtime_py.episodes.segments import Segment
from runtime_py.episodes.store import Store
from runtime_py.errors import StoreError, UsageError
from runtime_py.integrity import write_sums
from runtime_py.session import Session
from runtime_py.tensor_files import map_tensors

SECRET = "zanzibarquux"


@pytest.fixture(scope="module")
def engine(small_bundle: Bundle) -> RecordingEngine:
    return RecordingEngine(small_bundle.engine(threads=1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def session(small_bundle: Bundle, engine: RecordingEngine, folder: Path) -> Iterator[Session]:
    engine.calls.clear()
    with small_bundle.session(engine, folder) as opened:
        yield opened


def mapped_file(array: Array) -> Path:
    """The file an array is a view of; fails for memory of its own."""
    base: object = array
    while isinstance(base, np.ndarray) and isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap) and not array.flags.writeable
    return Path(str(base.filename))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Where a store begins.


def test_a_store_that_begins_with_a_bundle_copies_no_cache(session: Session, small_bundle: Bundle, folder: Path) -> None:
    kept = ["index.json", "lock", "log-00001.jsonl"]
    assert names(folder) == kept
    assert session.utterances() == small_bundle.episodes_file().utterances
    for i, record in enumerate(small_bundle.episodes_file().episodes):
        sealed = session._reader().sealed(i)
        assert {mapped_file(k) for k in sealed.k} == {small_bundle.path / "episodes" / record.sealed}
        assert {mapped_file(v) for v in sealed.v} == {small_bundle.path / "episodes" / record.cache}
        assert sealed.n_seen == record.n_seen == len(session._stream)
    session.ask("What do they talk about?", max_new_tokens=2)
    assert names(folder) == kept
    session.append("Ann", "Something new.")
    session.catch_up()
    assert [name for name in names(folder) if name not in kept] != []
    assert {mapped_file(k).parent for k in session._reader().sealed(0).k} == {folder}


def test_the_engine_reads_sealed_caches_where_they_lie(session: Session, engine: RecordingEngine, small_bundle: Bundle) -> None:
    addresses = []
    for _ in range(3):
        engine.calls.clear()
        answer = session.ask("What do they talk about?", max_new_tokens=2)
        for graph, inputs in engine.calls:
            if graph != "embed":
                addresses.append([inputs[f"{n}_{i}"].__array_interface__["data"][0] for n in "kv" for i in range(2)])
                assert mapped_file(inputs["k_1"]).name == f"episode-{answer.episode}.sealed.safetensors"
    assert len(addresses) > 6 and all(each == addresses[0] for each in addresses)


def test_switching_the_episode_takes_no_memory(session: Session) -> None:
    status, reader = Path("/proc/self/status"), session._reader()
    if "RssAnon" not in (status.read_text() if status.exists() else ""):
        pytest.skip("memory of a process's own is read from /proc/self/status")

    def own_memory() -> int:
        return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("RssAnon"))

    first = reader.sealed(0)
    size = sum(k.nbytes + v.nbytes for k, v in zip(first.k, first.v, strict=True))
    before = own_memory()
    held = [reader.sealed(turn % 4) for turn in range(200)]
    assert all(np.isfinite(k).all() for sealed in held for k in sealed.k)
    assert own_memory() - before < 20 * size, "copies would take 200 times this size"


def test_a_store_goes_on_where_it_was(small_bundle: Bundle, engine: RecordingEngine, folder: Path) -> None:
    with small_bundle.session(engine, folder) as session:
        session.append("Ann", "Remember the lighthouse.", "2 May 2024")
        session.catch_up()
        log = session.utterances()
    with small_bundle.session(engine, folder) as session:
        engine.calls.clear()
        assert session.utterances() == log and session.utterances()[-1].text == "Remember the lighthouse."
        session.catch_up()
        assert engine.calls == []


def test_what_a_kill_between_creating_and_filling_leaves_is_filled(small_bundle: Bundle, folder: Path) -> None:
    history = small_bundle.episodes_file()
    Store.create(folder, small_bundle.id, history.speakers, small_bundle.path / "episodes").close()
    with open_store(small_bundle, folder) as store:
        assert store.utterances() == history.utterances and len(store.episodes()) == len(history.episodes)


def test_an_empty_store_of_others_is_refused_and_left_free(small_bundle: Bundle, folder: Path) -> None:
    Store.create(folder, small_bundle.id, ["Zoe"], small_bundle.path / "episodes").close()
    for _ in range(2):
        with pytest.raises(StoreError, match="holds no utterance"):
            open_store(small_bundle, folder)
    assert Store.open(folder, small_bundle.id).speakers == ("Zoe",)


def test_a_store_of_another_bundle_is_refused(small_bundle: Bundle, folder: Path) -> None:
    Store.create(folder, "b" * 64, ["Ann"]).close()
    with pytest.raises(StoreError, match=f"belongs to bundle {'b' * 64}, not to {small_bundle.id}"):
        open_store(small_bundle, folder)


@pytest.mark.parametrize("name", ["here.txt", "sub/deep.txt"])
def test_a_folder_with_other_things_is_left_alone(small_bundle: Bundle, folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("mine")
    with pytest.raises(StoreError, match="cannot become a new store"):
        small_bundle.session(store=folder)
    assert (folder / name).read_text() == "mine" and names(folder) == [name.split("/")[0]]


# Clustering.


def test_clustering_the_bundles_history_again_gives_its_episodes(session: Session, small_bundle: Bundle) -> None:
    history = small_bundle.episodes_file()
    expected = map_tensors(small_bundle.path / "episodes" / "centroids.safetensors")[0]
    segments, labels = cluster_store(session._store, session._embedder, session._tokenizer.encode, session._plan)
    assert [(s.first, s.last, s.part, label) for s, label in zip(segments, labels, strict=True)] == [
        (r.first, r.last, r.part, r.episode) for r in history.segments
    ]
    entries = session._store.episodes()
    assert [(e.prompt, e.medoids) for e in entries] == [(r.prompt, r.medoids) for r in history.episodes]
    assert all((e.cache, e.sealed, e.n_seen) == (None, None, 0) for e in entries)
    centroids = session._store.centroids()
    assert centroids is not None
    np.testing.assert_allclose(centroids, expected["centroids"], rtol=0, atol=1e-6)
    assert all(1 <= len(e.prompt) <= session._plan.prompt for e in entries)


def clustered(bundle: Bundle, engine: RecordingEngine, folder: Path, utterances: list[Utterance]) -> tuple[Store, list[Segment]]:
    store = Store.create(folder, bundle.id, ["Ann", "Bob"], bundle.path / "episodes")
    store.append(utterances)
    embedder = bundle.embedder(engine)
    segments, _ = cluster_store(store, embedder, bundle.text_tokenizer().encode, bundle.manifest.plan)
    return store, segments


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (4, 1), (5, 2), (9, 3), (12, 3)])
def test_fewer_segments_than_episodes_give_fewer_episodes(
    small_bundle: Bundle, engine: RecordingEngine, folder: Path, count: int, expected: int
) -> None:
    topics = ("the harbour and its boats", "a cake with plums", "the exam in physics")
    utterances = [Utterance(0, "1 May", ("Ann", "Bob")[i % 2], f"{i}: {topics[i // 4]}") for i in range(count)]
    store, segments = clustered(small_bundle, engine, folder, utterances)
    with store:
        assert len(segments) == len(store.episodes()) == expected
        assert sorted(m for e in store.episodes() for m in e.medoids) == list(range(expected))
    with small_bundle.session(engine, folder) as session:
        answer = session.ask("Which boats are in the harbour?", max_new_tokens=2)
        assert answer.tokens and len(answer.similarities) == expected
        assert segments[session._store.episodes()[answer.episode].medoids[0]].first == 0


def test_equal_segments_make_one_episode(small_bundle: Bundle, engine: RecordingEngine, folder: Path) -> None:
    utterances = [Utterance(i // 4, "1 May", "Ann", "The same again.") for i in range(16)]
    store, segments = clustered(small_bundle, engine, folder, utterances)
    with store:
        assert len(segments) == 4 and len(store.episodes()) == 1


def test_add_episode_takes_the_oldest_question(session: Session) -> None:
    store = session._store
    before, vector = np.array(store.centroids()), np.ones(384, np.float32)
    store.queue_episode("first", vector)
    store.queue_episode("second", vector)
    add_episode(store, vector, [4, 5], [1])
    after = store.centroids()
    assert after is not None and after.tobytes() == np.concatenate([before, vector[None]]).tobytes()
    assert [q.question for q in store.queued()] == ["second"]
    entry = store.episodes()[-1]
    assert (entry.prompt, entry.medoids, entry.n_seen, len(store.episodes())) == ([4, 5], [1], 0, 5)


@pytest.mark.parametrize("ruin", [damage, Path.unlink], ids=["a byte", "missing"])
def test_damaged_centroids_are_made_again_from_the_log(session: Session, ruin: Callable[[Path], object]) -> None:
    session.forget(0, 43)
    expected = np.array(session._store.centroids())
    session.ask("What do they talk about?", max_new_tokens=2)
    before = len(session.utterances())
    ruin(one(session.store_folder, "centroids-*"))
    assert session.ask("What do they talk about?", max_new_tokens=2).tokens
    assert len(session.utterances()) > before, "the turn of the thread that ended is in the log"
    found = session._store.centroids()
    assert found is not None and found.shape[1] == expected.shape[1] and len(found) == len(session._store.episodes())
    ruin(one(session.store_folder, "centroids-*"))
    session.catch_up()
    assert {e.n_seen for e in session._store.episodes()} == {len(session._stream)}


def test_a_log_that_was_never_clustered_is_caught_up(small_bundle: Bundle, engine: RecordingEngine, folder: Path) -> None:
    with Store.create(folder, small_bundle.id, ["Ann"], small_bundle.path / "episodes") as store:
        store.append([Utterance(0, "1 May", "Ann", "Only this.")])
    with small_bundle.session(engine, folder) as session:
        session.catch_up()
        assert [e.n_seen for e in session._store.episodes()] == [len(session._stream)]


# Forgetting.


def holding(folder: Path, text: str) -> list[str]:
    """Files below ``folder`` that hold ``text``, in any case."""
    return [path.name for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes().lower()]


def test_forgotten_text_is_nowhere_in_the_store(session: Session, folder: Path) -> None:
    session.forget(0, 47)
    session.append("Ann", f"The password is {SECRET}.", "2 May 2024")
    session.append("Bob", "I wrote it down.")
    session.ask(f"Is it {SECRET}?", max_new_tokens=2)
    session.catch_up()
    session._store.queue_episode(f"What is {SECRET}?", np.ones(384, np.float32))
    session.ask(f"Once more: {SECRET}?", max_new_tokens=2)
    assert len(holding(folder, SECRET)) == 2, "log and index: the question of the running thread and the queue"
    session.unload()
    log = session.utterances()
    for i in reversed([i for i, u in enumerate(log) if SECRET in u.text.lower()]):
        session.forget(i, i)
    assert holding(folder, SECRET) == []
    assert session._store.queued() == []
    assert [u for u in log if SECRET not in u.text.lower()] == session.utterances()
    assert session.ask("Who wrote it down?", max_new_tokens=2).tokens
    assert holding(folder, SECRET) == []
    encoded = session._tokenizer.encode(SECRET)
    for entry in session._store.episodes():
        prompt = entry.prompt
        assert not any(prompt[i : i + len(encoded)] == encoded for i in range(len(prompt)))


def test_after_forgetting_a_store_is_the_one_the_rest_would_have_made(
    session: Session, small_bundle: Bundle, engine: RecordingEngine, tmp_path: Path
) -> None:
    session.append("Ann", f"The password is {SECRET}.", "2 May 2024")
    session.forget(2, 41)
    session.forget(len(session.utterances()) - 1, len(session.utterances()) - 1)
    session.catch_up()
    base = small_bundle.path / "episodes"
    with Store.create(tmp_path / "scratch", small_bundle.id, session._store.speakers, base) as scratch:
        scratch.append(session.utterances())
    with small_bundle.session(engine, tmp_path / "scratch") as fresh:
        fresh.ask("What?", max_new_tokens=1)  # clusters what was never clustered
        fresh._thread = None  # its turn would be one more than the other store holds
        fresh._remember([], "")
        for i in range(len(fresh._store.episodes())):
            fresh._reader().sealed(i)
        mine, other = session._store, fresh._store
        assert mine.utterances() == other.utterances() and len(mine.utterances()) == 16
        pairs = list(zip(mine.episodes(), other.episodes(), strict=True))
        assert len(pairs) > 1 and all((a.prompt, a.medoids, a.n_seen) == (b.prompt, b.medoids, b.n_seen) for a, b in pairs)
        found, expected = mine.centroids(), other.centroids()
        assert found is not None and expected is not None and found.tobytes() == expected.tobytes()
        for i in range(len(pairs)):
            assert same_caches(mine.cache(i), other.cache(i))
        question = "What do the speakers talk about?"
        assert session.ask(question, max_new_tokens=6).tokens == fresh.ask(question, max_new_tokens=6).tokens


def test_what_all_episodes_share_outlives_forgetting_what_came_later(session: Session, engine: RecordingEngine) -> None:
    session.forget(0, 51)
    session.catch_up()
    shared = session._store.shared()
    assert shared is not None and shared.n_seen == 32
    engine.calls.clear()
    session.forget(len(session.utterances()) - 1, len(session.utterances()) - 1)
    session.catch_up()
    assert engine.blocks() and all(prompt for _, _, prompt in engine.blocks()), "the shared part was not read again"
    session.forget(0, 0)
    assert session._store.shared() is not None, "the prefix and the header alone are longer than the smallest budget here"
    damage(one(session.store_folder, "shared-*"))
    session.forget(0, 0)
    engine.calls.clear()
    session.catch_up()
    assert engine.blocks()[0] == (0, 32, 0)


@pytest.mark.parametrize(("first", "last"), [(-1, 0), (0, 56), (5, 4), (56, 56), (10**9, 10**9)])
def test_forgetting_outside_the_log_is_refused(session: Session, first: int, last: int) -> None:
    with pytest.raises(UsageError, match=f"Utterances {first} to {last} cannot be forgotten: the log has 0 to 55"):
        session.forget(first, last)


def test_forgetting_everything_is_left_to_wipe(session: Session, folder: Path) -> None:
    with pytest.raises(UsageError, match="Use wipe"):
        session.forget(0, 55)
    assert len(session.utterances()) == 56
    session.wipe()
    assert not folder.exists() and os.listdir(folder.parent) == []  # noqa: PTH208


# Episodes that questions ask for.


@pytest.fixture
def choosy(small_bundle: Bundle, tmp_path: Path) -> Bundle:
    """The bundle with a threshold that nothing but an episode's own question reaches."""
    folder = copy_bundle(small_bundle, tmp_path / "bundle")
    edit_json(folder / "manifest.json", lambda m: m["routing"].update(threshold=0.95))
    write_sums(folder)
    return Bundle.open(folder)


def test_a_question_far_from_all_gets_an_episode_of_its_own(choosy: Bundle, engine: RecordingEngine, folder: Path) -> None:
    question = "Which rocket engine burns methane?"
    with choosy.session(engine, folder) as session:
        first = session.ask(question, max_new_tokens=2)
        again = session.ask(question, max_new_tokens=2)
        assert first.queued and again.queued and max(first.similarities) < 0.95 and first.tokens
        assert [q.question for q in session._store.queued()] == [question], "asked twice, built once"
        assert len(session._store.episodes()) == 4
    with choosy.session(engine, folder) as session:
        session.catch_up()
        assert session._store.queued() == []
        entry, centroids = session._store.episodes()[4], session._store.centroids()
        assert centroids is not None and centroids[4].tobytes() == session._embedder.embed_query(question).tobytes()
        own = session._tokenizer.encode(question + "\n")
        assert entry.prompt[: len(own)] == own and len(own) < len(entry.prompt) <= choosy.manifest.plan.prompt
        assert len(entry.medoids) == choosy.manifest.plan.medoids - 1
        assert {e.n_seen for e in session._store.episodes()} == {len(session._stream)}
        answer = session.ask(question, max_new_tokens=2)
        assert (answer.episode, answer.queued) == (4, False) and answer.similarities[4] == pytest.approx(1.0)
    assert Bundle.open(choosy.path).id == choosy.id
