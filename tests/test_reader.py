"""Reading a history into episodes: which blocks are read, what is kept, and that nothing of it depends on interruptions."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from bundle_fixtures import RecordingEngine, same_caches
from conftest import LanguageModelFactory, PlanFactory
from store_samples import BUNDLE, damage, one

from exporter.models.decoder import Decoder
from runtime_py.bundle import Bundle
from runtime_py.episodes.cache import F32, EpisodeCache
from runtime_py.episodes.history import Utterance
from runtime_py.episodes.reader import EpisodeReader
from runtime_py.episodes.rendering import TokenStream
from runtime_py.episodes.store import Store
from runtime_py.errors import Cancelled
from runtime_py.language_model import LanguageModel

PREFIX = [1, 2]
PROMPTS = ([5, 6, 7, 8], [60, 61, 62, 63, 64, 65])
BUDGETS = (20, 24, 32)  # the smallest is no multiple of the block, 8


def encode(text: str) -> list[int]:
    """One token a word."""
    return [3 + sum(map(ord, word)) % 94 for word in text.split()]


def said(first: int, count: int) -> list[Utterance]:
    """Utterances of seven tokens each."""
    return [
        Utterance(0, "", ("Ann", "Bob")[i % 2], f"word{i} thing{i * 7} place{i * 3} {i} end{i}")
        for i in range(first, first + count)
    ]


class Desk:
    """A store with two prompts, and a recorded model that reads into it."""

    def __init__(self, model: LanguageModel, folder: Path, utterances: Sequence[Utterance]) -> None:
        self.model = LanguageModel(RecordingEngine(model.engine), model.shape, model.plan)
        self.store = Store.create(folder, BUNDLE, ["Ann", "Bob"])
        self.store.append(utterances)
        for i, prompt in enumerate(PROMPTS):
            self.store.put_prompt(i, prompt, [0])

    @property
    def engine(self) -> RecordingEngine:
        assert isinstance(self.model.engine, RecordingEngine)
        return self.model.engine

    @property
    def total(self) -> int:
        return len(PREFIX) + 6 + 7 * len(self.store.utterances())

    def reader(self, cancelled: Callable[[], bool] = lambda: False, checkpoint: bool = True) -> EpisodeReader:
        stream = TokenStream(PREFIX, encode, self.store.speakers, self.store.utterances())
        assert len(stream) == self.total
        return EpisodeReader(self.model, self.store, stream, cancelled, checkpoint=checkpoint)

    def blocks(self) -> list[tuple[int, int, int]]:
        """(n_seen, n_tokens, n_prompt) of the blocks read since the last call."""
        found = self.engine.blocks()
        self.engine.calls.clear()
        return found


DeskFactory = Callable[[int], Desk]


@pytest.fixture
def make_desk(
    tiny_decoder: Decoder, make_plan: PlanFactory, make_language_model: LanguageModelFactory, tmp_path: Path
) -> Iterator[DeskFactory]:
    """``make_desk(12)``: a history of 8 + 12 * 7 tokens, in a store of its own, before the eyes of a tiny random model."""
    with contextlib.ExitStack() as stores:

        def make(utterances: int) -> Desk:
            plan = make_plan(BUDGETS)
            folder = tmp_path / f"store-{time.monotonic_ns()}"
            desk = Desk(make_language_model(tiny_decoder, plan), folder, said(0, utterances))
            stores.enter_context(desk.store)
            return desk

        yield make


def late(total: int, prompt: Sequence[int], first: int = 20) -> list[tuple[int, int, int]]:
    return [(n, min(8, total - n), len(prompt)) for n in range(first, total, 8)]


EARLY = [(0, 8, 0), (8, 8, 0), (16, 4, 0)]


def test_blocks_before_the_first_eviction_are_read_once_for_all_episodes(make_desk: DeskFactory) -> None:
    desk = make_desk(12)
    reader = desk.reader()
    for episode in (0, 1, 0):
        reader.catch_up(episode)
    assert desk.blocks() == [*EARLY, *late(desk.total, PROMPTS[0]), *late(desk.total, PROMPTS[1])]
    assert not same_caches(desk.store.cache(0), desk.store.cache(1))


def test_an_episode_alone_is_the_same_as_one_among_others(make_desk: DeskFactory) -> None:
    among, alone = make_desk(12), make_desk(12)
    for episode in (0, 1):
        among.reader().catch_up(episode)
    found = alone.reader().catch_up(1)
    assert same_caches(found, among.store.cache(1)) and same_caches(found, alone.store.cache(1))
    assert found.n_seen == alone.total


def test_what_is_kept_is_what_the_model_keeps_block_by_block(make_desk: DeskFactory) -> None:
    desk = make_desk(9)
    found = desk.reader().catch_up(0)
    tokens = TokenStream(PREFIX, encode, desk.store.speakers, desk.store.utterances()).tokens(0, desk.total)
    cache = EpisodeCache.empty(desk.model.shape, desk.model.plan)
    for start, count, prompt in [*EARLY, *late(desk.total, PROMPTS[0])]:
        cache = desk.model.prefill(cache, tokens[start : start + count], PROMPTS[0] if prompt else [])
    assert same_caches(found, cache)


def test_appended_text_is_read_from_where_the_episode_was(make_desk: DeskFactory) -> None:
    desk = make_desk(5)
    before = desk.total
    desk.reader().catch_up(0)
    desk.blocks()
    desk.store.append(said(5, 1))
    desk.reader().catch_up(0)
    assert desk.blocks() == [(before, 7, len(PROMPTS[0]))]
    desk.store.append(said(6, 3))
    desk.reader().catch_up(0)
    assert desk.blocks() == late(desk.total, PROMPTS[0], before + 7)
    desk.reader().catch_up(1)
    assert desk.blocks() == late(desk.total, PROMPTS[1])
    desk.reader().catch_up(1)
    assert desk.blocks() == []


def test_a_history_shorter_than_the_smallest_budget_is_kept_whole(make_desk: DeskFactory) -> None:
    desk = make_desk(1)  # 15 tokens
    caches = [desk.reader().catch_up(episode) for episode in (0, 1)]
    assert desk.blocks() == [(0, 8, 0), (8, 7, 0)]
    assert same_caches(caches[0], caches[1])
    for src, budget in zip(caches[0].src, BUDGETS, strict=True):
        assert np.array_equal(src, [[-1] * (budget - 15) + list(range(15))] * len(src))


def test_a_short_history_that_grows_is_still_read_once_up_to_the_first_eviction(make_desk: DeskFactory) -> None:
    desk = make_desk(1)
    for episode in (0, 1):
        desk.reader().sealed(episode)
    desk.blocks()
    desk.store.append(said(1, 2))
    for episode in (0, 1):
        desk.reader().sealed(episode)
    assert desk.blocks() == [(15, 5, 0), *late(desk.total, PROMPTS[0]), *late(desk.total, PROMPTS[1])]
    whole = make_desk(3)
    expected = whole.reader().catch_up(1)
    found = desk.store.cache(1)
    assert found is not None
    for a, b in zip([*found.k, *found.v], [*expected.k, *expected.v], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    assert all(np.array_equal(a, b) for a, b in zip(found.src, expected.src, strict=True))


def test_growing_by_one_token_at_a_time(make_desk: DeskFactory) -> None:
    """Every length from 1 up: a block of one token behind caches that are filling, full, and evicting."""
    desk = make_desk(0)
    cache = EpisodeCache.empty(desk.model.shape, desk.model.plan)
    tokens = encode("one two three four five six seven eight nine ten " * 4)
    for i, token in enumerate(tokens):
        cache = desk.model.prefill(cache, [token], [] if i + 1 <= min(BUDGETS) else [9])
        for src in cache.src:
            kept = src[src >= 0].reshape(len(src), -1)
            assert kept.shape[1] == min(i + 1, src.shape[1])
            assert (np.diff(kept, axis=1) > 0).all() and kept.max() <= i and (kept[:, 0] == 0).all()
            assert (src[:, : src.shape[1] - kept.shape[1]] == -1).all()


def rotated(keys: F32, positions: np.ndarray, inv_freq: Sequence[float]) -> np.ndarray:
    """Rotation as a complex product, in float64."""
    half = keys.shape[-1] // 2
    pairs = keys[..., :half] + 1j * keys[..., half:].astype(np.float64)
    turned = pairs * np.exp(1j * positions[:, None] * np.asarray(inv_freq, np.float64))
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize("utterances", [1, 2, 3, 12])
def test_sealed_keys_are_the_keys_at_their_compacted_positions(make_desk: DeskFactory, utterances: int) -> None:
    desk = make_desk(utterances)
    sealed = desk.reader().sealed(1)
    cache = desk.store.cache(1)
    assert cache is not None and sealed.n_seen == desk.total
    first = min(max(BUDGETS), desk.total)
    for keys, v, k, values, rows in zip(sealed.k, sealed.v, cache.k, cache.v, BUDGETS, strict=True):
        positions = np.maximum(first - rows + np.arange(rows), 0)
        np.testing.assert_allclose(keys, rotated(k, positions, desk.model.shape.inv_freq), rtol=0, atol=1e-5)
        assert isinstance(keys, np.memmap) and isinstance(v, np.memmap) and not keys.flags.writeable
        assert v.tobytes() == values.tobytes()


def test_sealing_again_reads_and_writes_nothing(make_desk: DeskFactory) -> None:
    desk = make_desk(6)
    desk.reader().sealed(0)
    desk.blocks()
    before = {path: path.stat().st_mtime_ns for path in desk.store.folder.iterdir()}
    desk.reader().sealed(0)
    assert desk.blocks() == []
    assert before == {path: path.stat().st_mtime_ns for path in desk.store.folder.iterdir()}


@pytest.mark.parametrize("ruin", [damage, Path.unlink, lambda path: path.write_bytes(b"")], ids=["a byte", "missing", "empty"])
def test_ruined_sealed_keys_are_made_again_without_reading(make_desk: DeskFactory, ruin: Callable[[Path], object]) -> None:
    desk = make_desk(6)
    expected = [np.array(k) for k in desk.reader().sealed(0).k]
    desk.blocks()
    ruin(one(desk.store.folder, "episode-0-*.sealed.safetensors"))
    assert desk.store.sealed(0) is None
    found = desk.reader().sealed(0)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found.k, expected, strict=True))
    assert desk.blocks() == []


@pytest.mark.parametrize("ruin", [damage, Path.unlink, lambda path: path.write_bytes(b"")], ids=["a byte", "missing", "empty"])
def test_a_ruined_cache_is_read_again_from_the_log(make_desk: DeskFactory, ruin: Callable[[Path], object]) -> None:
    desk, whole = make_desk(6), make_desk(6)
    desk.reader().sealed(0)
    desk.blocks()
    (path,) = (p for p in desk.store.folder.glob("episode-0-*") if ".sealed." not in p.name)
    ruin(path)
    sealed = desk.reader().sealed(0)
    assert desk.blocks() == late(desk.total, PROMPTS[0])
    expected = whole.reader().sealed(0)
    assert same_caches(desk.store.cache(0), whole.store.cache(0))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(sealed.k, expected.k, strict=True))


def test_a_ruined_shared_cache_is_read_again(make_desk: DeskFactory) -> None:
    desk, whole = make_desk(6), make_desk(6)
    desk.reader().catch_up(0)
    desk.blocks()
    damage(one(desk.store.folder, "shared-*"))
    desk.reader().catch_up(1)
    assert desk.blocks() == [*EARLY, *late(desk.total, PROMPTS[1])]
    whole.reader().catch_up(1)
    assert same_caches(desk.store.cache(1), whole.store.cache(1))


def test_a_cache_of_other_shapes_or_another_log_is_read_again(make_desk: DeskFactory) -> None:
    desk, whole, longer = make_desk(6), make_desk(6), make_desk(7)
    expected = whole.reader().catch_up(0)
    beyond = longer.reader().catch_up(0)
    narrow = EpisodeCache([k[:, 1:] for k in expected.k], [v[:, 1:] for v in expected.v], [s[:, 1:] for s in expected.src], 55)
    for wrong in (beyond, narrow):
        desk.store.put_episode(0, wrong)
        assert same_caches(desk.reader().catch_up(0), expected)


def test_cancelling_keeps_every_finished_block(make_desk: DeskFactory) -> None:
    desk, whole = make_desk(12), make_desk(12)
    expected = whole.reader().catch_up(0)
    read: list[tuple[int, int, int]] = []
    for stop_after in (5, 1, 4, 100):
        reader = desk.reader(cancelled=lambda stop=stop_after: len(desk.engine.blocks()) >= stop)  # type: ignore[misc]
        with contextlib.suppress(Cancelled):
            reader.catch_up(0)
        read += desk.blocks()
        assert desk.store.episodes()[0].n_seen == sum(read[-1][:2])
    assert read == [*EARLY, *late(desk.total, PROMPTS[0])]
    assert same_caches(desk.store.cache(0), expected)


def test_cancelled_before_anything_is_read(make_desk: DeskFactory) -> None:
    desk = make_desk(3)
    with pytest.raises(Cancelled, match="the blocks read so far are kept"):
        desk.reader(cancelled=lambda: True).sealed(0)
    assert desk.blocks() == [] and desk.store.cache(0) is None


def test_without_checkpoints_only_the_end_is_stored(make_desk: DeskFactory) -> None:
    desk, whole = make_desk(12), make_desk(12)
    reader = desk.reader(cancelled=lambda: len(desk.engine.blocks()) >= 6, checkpoint=False)
    with pytest.raises(Cancelled):
        reader.catch_up(0)
    assert desk.store.cache(0) is None
    desk.blocks()
    desk.reader(checkpoint=False).catch_up(0)
    assert desk.blocks() == late(desk.total, PROMPTS[0])
    assert same_caches(desk.store.cache(0), whole.reader().catch_up(0))


def test_progress_is_told_after_every_block(make_desk: DeskFactory) -> None:
    desk = make_desk(4)
    steps: list[tuple[int, int, int]] = []
    stream = TokenStream(PREFIX, encode, desk.store.speakers, desk.store.utterances())
    EpisodeReader(desk.model, desk.store, stream, progress=lambda *step: steps.append(step)).catch_up(1)
    assert steps == [(-1, 8, 20), (-1, 16, 20), (-1, 20, 20), (1, 28, 36), (1, 36, 36)]


CHILD = """
import sys
from pathlib import Path
from runtime_py.bundle import Bundle

with Bundle.open(sys.argv[1], check=False).session(store=Path(sys.argv[2]), threads=1) as session:
    session.progress = lambda *step: print(*step, flush=True)
    session.catch_up()
print("done", flush=True)
"""


def child(bundle: Bundle, store: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(bundle.path), str(store)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])


def test_a_reader_killed_between_blocks_ends_where_one_that_was_not_ends(small_bundle: Bundle, tmp_path: Path) -> None:
    with small_bundle.session(store=tmp_path / "killed", threads=1) as session:
        session.forget(0, 39)  # sixteen utterances are left, and no episode has read any
    shutil.copytree(tmp_path / "killed", tmp_path / "whole")
    read: list[str] = []
    for kill, lines in enumerate((1, 2, 3, 3, 4, 3)):
        process = child(small_bundle, tmp_path / "killed")
        assert process.stdout is not None
        with process, process.stdout:
            read += [process.stdout.readline() for _ in range(lines)]
            time.sleep(kill * 0.004)  # into the next block, or into writing the one before
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        assert "done\n" not in read
    assert all(line.split() for line in read)
    with child(small_bundle, tmp_path / "whole") as process:
        assert process.stdout is not None and process.stdout.read().endswith("done\n")
    with child(small_bundle, tmp_path / "killed") as process:
        assert process.stdout is not None and process.stdout.read().endswith("done\n")
    base = small_bundle.path / "episodes"
    with (
        Store.open(tmp_path / "killed", small_bundle.id, base) as killed,
        Store.open(tmp_path / "whole", small_bundle.id, base) as whole,
    ):
        assert killed.episodes()[0].n_seen > 500 and len(killed.episodes()) > 1
        for i, entry in enumerate(whole.episodes()):
            assert same_caches(killed.cache(i), whole.cache(i)) and entry.prompt == killed.episodes()[i].prompt
            sealed = zip(killed.sealed(i) or [], whole.sealed(i) or [], strict=True)
            assert all([a.tobytes() == b.tobytes() for a, b in sealed])
            assert killed.sealed(i) is not None
