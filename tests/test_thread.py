"""Threads: decoding into the tail, turns that follow one another there, and their way into the log."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bundle_fixtures import RecordingEngine

from runtime_py.bundle import Bundle
from runtime_py.episodes.cache import SealedCache
from runtime_py.episodes.cache_files import read_cache, read_sealed
from runtime_py.episodes.history import Utterance, clean_text
from runtime_py.episodes.matching import Centroids, route
from runtime_py.errors import Cancelled
from runtime_py.language_model import LanguageModel, Tail
from runtime_py.manifest import Template
from runtime_py.session import ASSISTANT, USER, Session
from runtime_py.tensor_files import map_tensors
from runtime_py.thread import AnswerText, Thread, decode
from runtime_py.tokenizer import TextTokenizer


@pytest.fixture(scope="module")
def engine(small_bundle: Bundle) -> RecordingEngine:
    return RecordingEngine(small_bundle.engine(threads=1))


@pytest.fixture(scope="module")
def model(small_bundle: Bundle, engine: RecordingEngine) -> LanguageModel:
    return LanguageModel(engine, small_bundle.manifest.shape, small_bundle.manifest.plan)


@pytest.fixture(scope="module")
def sealed(small_bundle: Bundle) -> SealedCache:
    cache = read_cache(small_bundle.path / "episodes" / "episode-0.safetensors")
    return SealedCache(read_sealed(small_bundle.path / "episodes" / "episode-0.sealed.safetensors")[0], cache.v, cache.n_seen)


@pytest.fixture(scope="module")
def tokenizer(small_bundle: Bundle) -> TextTokenizer:
    return small_bundle.text_tokenizer()


@pytest.fixture
def thread(model: LanguageModel, sealed: SealedCache) -> Thread:
    return Thread(0, sealed, Tail.empty(model.shape, model.plan))


@pytest.fixture
def session(small_bundle: Bundle, engine: RecordingEngine) -> Iterator[Session]:
    engine.calls.clear()
    with small_bundle.session(engine) as opened:
        yield opened


@pytest.fixture(scope="module")
def questions(small_bundle: Bundle, engine: RecordingEngine) -> list[list[str]]:
    """Beginnings of the history's utterances by the episode to which they are routed, the fullest episode first."""
    embedder = small_bundle.embedder(engine)
    centroids = Centroids.of(map_tensors(small_bundle.path / "episodes" / "centroids.safetensors")[0]["centroids"])
    found: list[list[str]] = [[] for _ in centroids.normalised]
    for utterance in small_bundle.episodes_file().utterances:
        beginning = utterance.text[:60].rsplit(" ", 1)[0]
        found[route(embedder.embed_query(beginning), centroids).episode].append(beginning)
    assert sum(len(each) > 1 for each in found) >= 2, found
    return sorted(found, key=len, reverse=True)


def never() -> bool:
    return False


QUESTION = [198, 3, 17, 400, 1000, 28, 5]


def test_greedy_tokens_are_those_of_one_long_reading(model: LanguageModel, thread: Thread) -> None:
    """Each token decoded alone equals the best one behind the same text read in chunks."""
    logits = model.read(thread.sealed, thread.tail, QUESTION)
    tokens = list(decode(model, thread, logits, frozenset(), 6, never))
    assert thread.stop_reason == "max_tokens" and thread.tail.used == len(QUESTION) + 6
    for count in range(6):
        again = Tail.empty(model.shape, model.plan)
        assert int(np.argmax(model.read(thread.sealed, again, [*QUESTION, *tokens[:count]]))) == tokens[count]


def test_reasons_to_end(model: LanguageModel, thread: Thread) -> None:
    logits = model.read(thread.sealed, thread.tail, QUESTION)
    used = thread.tail.used
    tokens = list(decode(model, thread, logits, frozenset(), 4, never))

    def again(stops: frozenset[int], limit: int, stop_after: int = 100) -> list[int]:
        thread.tail.used = used
        found: list[int] = []
        for token in decode(model, thread, logits, stops, limit, lambda: len(found) >= stop_after):
            found.append(token)
        return found

    first = tokens.index(tokens[2])
    assert again(frozenset({tokens[2]}), 4) == tokens[:first] and thread.stop_reason == "stop"
    assert thread.tail.used == used + first, "a stop token stays out of the tail: turn_end brings its own"
    assert again(frozenset({tokens[0]}), 4) == [] and thread.stop_reason == "stop"
    assert again(frozenset(), 1) == tokens[:1] and thread.stop_reason == "max_tokens"
    assert again(frozenset(), 4, stop_after=2) == tokens[:2] and thread.stop_reason == "cancelled"
    assert again(frozenset(), 4, stop_after=0) == [] and thread.stop_reason == "cancelled"
    thread.tail.used = used
    assert next(decode(model, thread, logits, frozenset(), 4, never)) == tokens[0]
    assert thread.stop_reason == "cancelled" and thread.tail.used == used + 1


def test_the_end_of_the_tail_ends_an_answer(model: LanguageModel, thread: Thread) -> None:
    capacity = model.plan.tail
    opening = [20 + i % 50 for i in range(capacity - 3)]
    logits = model.read(thread.sealed, thread.tail, opening)
    tokens = list(decode(model, thread, logits, frozenset(), capacity, never))
    assert (len(tokens), thread.stop_reason, thread.tail.used) == (4, "length", capacity)
    # The last one needs no row of its own; behind a full tail it is the only one.
    tokens = list(decode(model, thread, logits, frozenset(), capacity, never))
    assert (len(tokens), thread.stop_reason) == (1, "length")


def test_the_lowest_of_equal_logits_wins(model: LanguageModel, thread: Thread) -> None:
    logits = np.zeros(model.shape.vocab_size, np.float32)
    logits[[700, 30, 4000]] = 1.0
    assert next(decode(model, thread, logits, frozenset(), 1, never)) == 30


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_a_question_is_read_in_chunks_of_the_query_graph(
    model: LanguageModel, engine: RecordingEngine, thread: Thread, length: int
) -> None:
    engine.calls.clear()
    tokens = [10 + i for i in range(length)]
    logits = model.read(thread.sealed, thread.tail, tokens)
    sizes = [min(16, length - start) for start in range(0, length, 16)]
    assert [(graph, int(i["n_tokens"][0]), int(i["n_tail"][0])) for graph, i in engine.calls] == [
        ("decode" if size == 1 else "query", size, 16 * n) for n, size in enumerate(sizes)
    ]
    one_by_one = Tail.empty(model.shape, model.plan)
    for token in tokens:
        expected = model.read(thread.sealed, one_by_one, [token])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))


def test_reading_stops_between_two_chunks(model: LanguageModel, engine: RecordingEngine, thread: Thread) -> None:
    engine.calls.clear()
    with pytest.raises(Cancelled):
        model.read(thread.sealed, thread.tail, [7] * 60, lambda: len(engine.calls) >= 2)
    assert len(engine.calls) == 2 and thread.tail.used == 32


TEMPLATE = Template([1], [2, 3], [4], [5, 6], [7], [8])


def test_what_opens_a_turn(thread: Thread) -> None:
    assert thread.opening(TEMPLATE, [90, 91], []) == [2, 3, 90, 91, 4]
    assert thread.opening(TEMPLATE, [90], [80, 81]) == [7, 80, 81, 2, 3, 90, 4]
    thread.turns.append(("", ""))
    assert thread.opening(TEMPLATE, [90], [80]) == [5, 6, 7, 80, 2, 3, 90, 4]


@pytest.mark.parametrize(("used", "tokens", "room"), [(0, 144, True), (0, 145, False), (100, 44, True), (100, 45, False)])
def test_a_turn_leaves_a_quarter_of_the_tail_for_its_answer(thread: Thread, used: int, tokens: int, room: bool) -> None:
    thread.tail.used = used
    assert thread.has_room(tokens, 192) is room


@pytest.mark.parametrize(
    "text", ["plain words", "  around \n", "two\n\nparagraphs  with   gaps ", "🙂🙃 emoji", "한국어 문장", "", " \n ", "a"]
)
def test_pieces_of_an_answer_join_to_its_text(tokenizer: TextTokenizer, text: str) -> None:
    answer = AnswerText(tokenizer.stream_decoder())
    pieces = [answer.push(token) for token in tokenizer.encode(text)]
    pieces.append(answer.flush())
    assert "".join(pieces) == answer.text == text.strip()


def test_a_character_that_is_never_completed_is_replaced(tokenizer: TextTokenizer) -> None:
    answer = AnswerText(tokenizer.stream_decoder())
    pieces = [answer.push(token) for token in tokenizer.encode("a🙃")[:-1]]
    assert "".join(pieces) == "a" and answer.flush() == "\ufffd" and answer.text == "a\ufffd"


# Turns of a session.


def own(session: Session, history: list[Utterance]) -> list[tuple[str, str]]:
    """(speaker, text) of what the log holds behind ``history``."""
    log = session.utterances()
    assert log[: len(history)] == history
    return [(u.speaker, u.text) for u in log[len(history) :]]


def openings(engine: RecordingEngine) -> list[int]:
    """n_tail at the first token of every question and answer token read since the last call."""
    found = [int(inputs["n_tail"][0]) for graph, inputs in engine.calls if graph in ("query", "decode")]
    engine.calls.clear()
    return found


def test_a_thread_goes_on_in_the_tail(
    session: Session, engine: RecordingEngine, small_bundle: Bundle, tokenizer: TextTokenizer, questions: list[list[str]]
) -> None:
    template, history = small_bundle.manifest.template, session.utterances()
    first = session.ask(questions[0][0], max_new_tokens=4)
    used = openings(engine)[-1] + 1
    second = session.ask(questions[0][0], max_new_tokens=4)
    read = [(int(i["n_tail"][0]), i["tokens"][0, : int(i["n_tokens"][0])].tolist()) for g, i in engine.calls if g != "embed"]
    assert first.episode == second.episode and read[0][0] == used
    asked = [token for _, tokens in read for token in tokens][: -len(second.tokens)]
    encoded = tokenizer.encode(clean_text(questions[0][0]))
    assert asked == [*template.turn_end, *template.question_prefix, *encoded, *template.question_suffix]
    assert own(session, history) == [], "a running thread is not in the log"
    assert not engine.blocks()


def test_another_episode_ends_the_thread_and_reads_its_turns(
    session: Session, engine: RecordingEngine, questions: list[list[str]]
) -> None:
    history = session.utterances()
    turns = [(q, session.ask(q, max_new_tokens=3)) for q in questions[0][:2]]
    assert turns[0][1].episode == turns[1][1].episode
    before = len(session._stream)
    engine.calls.clear()
    other = session.ask(questions[1][0], max_new_tokens=3)
    assert other.episode != turns[0][1].episode
    expected = [said for q, a in turns for said in ((USER, clean_text(q)), (ASSISTANT, clean_text(a.answer))) if said[1]]
    assert own(session, history) == expected
    read = engine.blocks()
    assert read[0][0] == before and sum(n for _, n, _ in read) == len(session._stream) - before
    assert openings(engine)[0] == 0


def test_a_conversation_of_thirty_turns_never_hits_a_wall(
    session: Session, engine: RecordingEngine, small_bundle: Bundle, questions: list[list[str]]
) -> None:
    history, tail = session.utterances(), small_bundle.manifest.plan.tail
    expected: list[tuple[str, str]] = []
    threads = 0
    for i in range(30):
        question = f"{questions[0][i % len(questions[0])]} Turn {i}."
        answer = session.ask(question, max_new_tokens=12)
        assert answer.reason in ("max_tokens", "stop") and (answer.tokens or answer.reason == "stop"), (i, answer)
        expected += [(USER, question), *([(ASSISTANT, clean_text(answer.answer))] if answer.answer else [])]
        places = openings(engine)
        assert max(places) < tail
        threads += places[0] == 0
    assert 5 <= threads < 30, threads
    session.unload()
    assert own(session, history) == expected
    assert {u.session for u in session.utterances()[len(history) :]} == {history[-1].session + 1}


def test_every_day_has_a_session_of_its_own(
    session: Session, questions: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    last = session.utterances()[-1].session
    days = ["9:00 am on 1 May, 2024", "9:05 am on 1 May, 2024", "0:01 am on 2 May, 2024"]
    for day in days:
        monkeypatch.setattr(session, "_now", lambda day=day: day)
        session.ask(questions[0][0], max_new_tokens=1)
        session.unload()
    added = [(u.session, u.date) for u in session.utterances() if u.session > last and u.speaker == USER]
    assert added == [(last + 1, days[0]), (last + 1, days[0]), (last + 2, days[2])]


def test_the_time_of_a_turn_is_written_as_dates_are(session: Session) -> None:
    assert clean_text(session._now()) == session._now()
    clock, _, day = session._now().partition(" on ")
    assert clock.endswith((" am", " pm")) and not clock.startswith("0") and len(day.split()) == 3


CHILD = """
import sys, time
from pathlib import Path
from runtime_py.bundle import Bundle

session = Bundle.open(sys.argv[1], check=False).session(store=Path(sys.argv[2]), threads=1)
for question in sys.argv[3:-1]:
    print(session.ask(question, max_new_tokens=3).answer.encode().hex(), flush=True)
session.ask(sys.argv[-1], on_text=lambda piece: (print("piece", flush=True), time.sleep(60)), max_new_tokens=8)
"""


def test_finished_turns_outlive_a_kill_and_reach_the_log_once(
    small_bundle: Bundle, engine: RecordingEngine, questions: list[list[str]], tmp_path: Path
) -> None:
    asked = [questions[0][0], questions[0][1], "Unfinished?"]
    command = [sys.executable, "-c", CHILD, str(small_bundle.path), str(tmp_path / "store"), *asked]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
        assert process.stdout is not None
        answers = [bytes.fromhex(process.stdout.readline()).decode() for _ in asked[:-1]]
        assert process.stdout.readline() == "piece\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    history = small_bundle.episodes_file().utterances
    pairs = zip(asked, answers, strict=False)
    expected = [said for q, a in pairs for said in ((USER, clean_text(q)), (ASSISTANT, clean_text(a))) if said[1]]
    for _ in range(3):
        with small_bundle.session(engine, tmp_path / "store") as session:
            assert own(session, history) == expected
    with small_bundle.session(engine, tmp_path / "store") as session:
        session.ask(asked[0], max_new_tokens=1)
    with small_bundle.session(engine, tmp_path / "store") as session:
        assert own(session, history)[: len(expected) + 1] == [*expected, (USER, clean_text(asked[0]))]
