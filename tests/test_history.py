"""Clean-up of text, the file layouts, the rendered text and the token stream."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from runtime_py.episodes.history import History, Utterance, clean_history, clean_text
from runtime_py.episodes.loaders import LoadedHistory, load_history
from runtime_py.episodes.rendering import TokenStream, date_line, header_line, is_date_line, utterance_line
from runtime_py.errors import UsageError, WorkError

LOCOMO = Path(__file__).parents[1] / ".." / "shared" / "data" / "locomo-3.json"
SAMPLE = Path(__file__).parents[1] / "calibration" / "sample_conversation.json"


def encode(text: str) -> list[int]:
    return list(text.encode())


def load(tmp_path: Path, data: Any, index: int = 0) -> LoadedHistory:
    path = tmp_path / "conversation.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return load_history(path, index)


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        ("  two\nlines\r\n\tand   a tab ", "two lines and a tab"),
        ("no\u00a0break\u3000wide\u2028line", "no break wide line"),
        ("bell\x07 and \x1b[1m and \x85\x9f", "bell and [1m and"),
        ("lone \ud83d high, \ude00 low", "lone \ufffd high, \ufffd low"),
        ("pair \ud83d\ude00", "pair 😀"),
        ("end \ud83d", "end \ufffd"),
        ("가족 👨\u200d👩\u200d👧 사진", "가족 👨\u200d👩\u200d👧 사진"),
        ("\x00\x01 \n", ""),
    ],
)
def test_clean_text(raw: str, cleaned: str) -> None:
    assert clean_text(raw) == cleaned
    assert clean_text(cleaned) == cleaned
    cleaned.encode("utf-8")


def test_clean_text_of_any_code_points_is_one_line_of_valid_unicode() -> None:
    draw = random.Random(1)
    for _ in range(200):
        raw = "".join(chr(draw.choice([draw.randrange(0x110000), draw.randrange(0x100)])) for _ in range(30))
        raw += chr(draw.randrange(0xD800, 0xE000))
        cleaned = clean_text(raw)
        assert cleaned.encode("utf-8").decode("utf-8") == cleaned
        assert len(cleaned.splitlines()) <= 1
        assert cleaned == clean_text(cleaned)


def test_clean_history_drops_empty_utterances_and_closes_up_sessions() -> None:
    raw = [
        Utterance(3, "day\none", "Ada", "hello"),
        Utterance(4, "day two", "Ben", " \n "),
        Utterance(7, "day three", " Ben ", "bye", "x"),
    ]
    history, dropped = clean_history(["Ada", "", "Ada"], raw)
    assert dropped == 1
    assert history.speakers == ("Ada", "Ben")
    assert history.utterances == (
        Utterance(0, "day one", "Ada", "hello"),
        Utterance(1, "day three", "Ben", "bye", "x"),
    )


def test_history_refuses_what_cannot_be_one() -> None:
    with pytest.raises(WorkError, match="no utterance"):
        clean_history(["Ada"], [Utterance(0, "", "Ada", "\x00")])
    with pytest.raises(WorkError, match="no speaker"):
        clean_history([], [Utterance(0, "", "", "who said this?")])
    with pytest.raises(WorkError, match="Utterance 1 belongs to session 2 but follows session 5"):
        clean_history([], [Utterance(5, "", "Ada", "a"), Utterance(2, "", "Ada", "b")])
    with pytest.raises(WorkError, match="Utterance 1 belongs to session 0 but follows session 1"):
        History(("Ada",), (Utterance(1, "", "Ada", "a"), Utterance(0, "", "Ada", "b")))


@pytest.mark.skipif(not LOCOMO.exists(), reason="../shared/data/locomo-3.json is not there")
def test_locomo_file() -> None:
    loaded = load_history(LOCOMO)
    history = loaded.history
    assert (loaded.layout, loaded.dropped, len(history.utterances)) == ("LoCoMo", 0, 419)
    assert history.speakers == ("Caroline", "Melanie")
    assert history.utterances[0].date == "1:56 pm on 8 May, 2023"
    assert history.utterances[-1].session == 18  # sessions 20 to 35 have dates only
    ids = [each.id for each in history.utterances]
    assert ids.index("D2:1") < ids.index("D10:1")  # numeric, not alphabetic order
    assert any("[shares a photo: " in each.text for each in history.utterances)
    assert len(loaded.questions) == 199
    assert loaded.questions[1].answer == "2022"
    assert loaded.questions[1].evidence == ("D1:12",)
    two = next(q for q in loaded.questions if q.evidence[:1] == ("D8:6",) and len(q.evidence) > 1)
    assert two.evidence == ("D8:6", "D9:17")
    assert sum(not q.answer for q in loaded.questions) == sum(q.category == "5" for q in loaded.questions) - 2
    with pytest.raises(UsageError, match="no conversation 3; the file holds 3, numbered 0 to 2"):
        load_history(LOCOMO, 3)


def test_sample_conversation() -> None:
    loaded = load_history(SAMPLE)
    ids = {each.id for each in loaded.history.utterances}
    assert loaded.layout == "LoCoMo"
    assert loaded.dropped == 0
    assert all(name in ids for question in loaded.questions for name in question.evidence)


def test_locomo_single_object_with_gaps(tmp_path: Path) -> None:
    conversation = {
        "speaker_a": "Ada",
        "speaker_b": "Ben",
        "session_10": [{"speaker": "Ben", "dia_id": "D10:1", "text": "", "blip_caption": "a red kite"}],
        "session_2_date_time": "2 May",
        "session_2": [
            {"speaker": "Ada", "dia_id": "D2:1", "text": "Look!", "blip_caption": "a kite"},
            {"speaker": "Ben", "dia_id": "D2:2", "text": " "},
        ],
        "session_99_date_time": "never",
    }
    loaded = load(tmp_path, {"conversation": conversation, "qa": [{"question": "Q", "adversarial_answer": "no"}]})
    assert loaded.history.utterances == (
        Utterance(0, "2 May", "Ada", "Look! [shares a photo: a kite]", "D2:1"),
        Utterance(1, "", "Ben", "[shares a photo: a red kite]", "D10:1"),
    )
    assert loaded.dropped == 1
    assert (loaded.questions[0].answer, loaded.questions[0].evidence, loaded.questions[0].category) == ("", (), "")


def test_realtalk_layout(tmp_path: Path) -> None:
    chat = {
        "name": {"speaker_1": "Kim Ji", "speaker_2": "Muh"},
        "session_1": [
            {"clean_text": "안녕 😀", "speaker": "Muh", "date_time": "29.12.2023, 00:51:12", "dia_id": "D1:1"},
            {"clean_text": "hi\nthere", "speaker": "Kim Ji", "date_time": "29.12.2023, 00:52:00", "dia_id": "D1:2"},
        ],
        "events_session_1": {"agent_a": [], "agent_b": []},
        "session_1_date_time": "29.12.2023, 00:51:12",
        "session_2": [{"clean_text": "later", "speaker": "Muh", "date_time": "30.12.2023, 08:00:00", "dia_id": "D2:1"}],
        "qa": [{"question": "When?", "answer": "then", "evidence": ["D1:2"], "category": 2}],
    }
    loaded = load(tmp_path, [chat])
    assert loaded.layout == "RealTalk"
    assert loaded.history.speakers == ("Kim Ji", "Muh")
    assert [each.text for each in loaded.history.utterances] == ["안녕 😀", "hi there", "later"]
    assert [each.date for each in loaded.history.utterances][1:] == ["29.12.2023, 00:51:12", "30.12.2023, 08:00:00"]
    assert loaded.questions[0].category == "2"


def longmemeval() -> dict[str, Any]:
    return {
        "question_id": "q1",
        "question_type": "multi-session",
        "question": "How many?",
        "answer": 3,
        "question_date": "2023/06/01 (Thu) 10:00",
        "haystack_session_ids": ["late", "early"],
        "haystack_dates": ["2023/05/30 (Tue) 23:40", "2023/05/20 (Sat) 02:21"],
        "haystack_sessions": [
            [{"role": "user", "content": "I bought two.", "has_answer": True}, {"role": "assistant", "content": "OK"}],
            [{"role": "user", "content": "I have one."}, {"role": "assistant", "content": "Good.\n\nTell me more."}],
        ],
        "answer_session_ids": ["late"],
    }


def test_longmemeval_layout(tmp_path: Path) -> None:
    loaded = load(tmp_path, [longmemeval()])
    assert loaded.layout == "LongMemEval"
    assert loaded.history.speakers == ("User", "Assistant")
    assert [each.id for each in loaded.history.utterances] == ["early:1", "early:2", "late:1", "late:2"]
    assert loaded.history.utterances[1].text == "Good. Tell me more."
    question = loaded.questions[0]
    assert (question.text, question.answer, question.category) == ("How many?", "3", "multi-session")
    assert (question.evidence, question.date) == (("late:1",), "2023/06/01 (Thu) 10:00")


def test_longmemeval_without_marks_names_the_whole_session(tmp_path: Path) -> None:
    data = longmemeval() | {"answer_session_ids": ["early"], "question_id": "q1_abs"}
    question = load(tmp_path, data).questions[0]
    assert question.evidence == ("early:1", "early:2")
    assert question.category == "abstention"


def test_plain_layout(tmp_path: Path) -> None:
    sessions = [
        {"date": "Monday", "utterances": [{"speaker": "Ada", "text": "Hi", "id": "a"}]},
        {"utterances": [{"speaker": "Cleo", "text": "Hello"}]},
    ]
    loaded = load(tmp_path, {"speakers": ["Ada", "Ben"], "sessions": sessions})
    assert loaded.layout == "plain"
    assert loaded.history.speakers == ("Ada", "Ben", "Cleo")
    assert loaded.history.utterances == (Utterance(0, "Monday", "Ada", "Hi", "a"), Utterance(1, "", "Cleo", "Hello"))


PLAIN: dict[str, Any] = {"sessions": [{"utterances": [{"speaker": "Ada", "text": "Hi"}]}]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "empty list"),
        ({"messages": []}, r"unknown layout .*'messages'.*LoCoMo, LongMemEval, RealTalk, plain"),
        (["text"], r"\[0\] has an unknown layout \(str\)"),
        ({"conversation": []}, "conversation.conversation: an object is expected"),
        ({"conversation": {"session_1": "x"}}, "session_1: a list is expected, found 'x'"),
        ({"conversation": {"session_1": ["x"]}}, r"session_1\[0\]: an object is expected"),
        ({"conversation": {"session_1": [{"speaker": "A", "text": 12}]}}, r"session_1\[0\].text: a text .* found 12"),
        ({"conversation": {}}, "no utterance"),
        (PLAIN | {"speakers": "Ada"}, "speakers: a list is expected"),
        (PLAIN | {"speakers": [1]}, r"speakers\[0\]: a text"),
        (PLAIN | {"qa": [{"question": 1}]}, r"qa\[0\].question"),
        (PLAIN | {"qa": [{"question": "q", "evidence": "D1"}]}, r"evidence: a list"),
        ({"sessions": [{"utterances": [{"text": "Hi"}]}]}, "has no speaker"),
        (longmemeval() | {"haystack_dates": ["x"]}, "1 haystack_dates for 2 haystack_sessions"),
        (longmemeval() | {"answer": True}, "answer: a text is expected, found True"),
    ],
)
def test_wrong_files_are_refused_with_the_place(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(WorkError, match=message) as caught:
        load(tmp_path, data)
    assert "conversation.json" in str(caught.value)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="does not exist"):
        load_history(tmp_path / "none.json")
    with pytest.raises(WorkError, match="cannot be read"):
        load_history(tmp_path)
    bad = tmp_path / "bad.json"
    bad.write_text("{", encoding="utf-8")
    with pytest.raises(WorkError, match="is not JSON"):
        load_history(bad)
    bad.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(WorkError, match="is not JSON"):
        load_history(bad)
    bad.write_bytes(b'{"sessions": "\xff"}')
    with pytest.raises(WorkError, match="not UTF-8"):
        load_history(bad)
    with pytest.raises(UsageError, match="no conversation -1; the file holds 1"):
        load(tmp_path, PLAIN, -1)


def test_lines() -> None:
    assert header_line(("Ada", "Ben")) == "A conversation between Ada and Ben.\n"
    assert header_line(("Ada", "Ben", "Cleo")) == "A conversation between Ada, Ben and Cleo.\n"
    assert header_line(("Ada",)) == "A conversation with Ada.\n"
    assert date_line("1:56 pm on 8 May, 2023") == "[1:56 pm on 8 May, 2023]\n"
    assert date_line("") == ""
    line = utterance_line(Utterance(0, "", "[Ada]", 'see ["this"]'))
    assert line == '[Ada] said, "see ["this"]"\n'
    assert is_date_line(date_line("[8 May]"))
    assert not is_date_line(line)


def random_utterances(draw: random.Random, count: int) -> list[Utterance]:
    session, found = 0, []
    for _ in range(count):
        session += draw.random() < 0.2
        words = draw.choices(["tea", "오늘", "👩\u200d🚀", "naïve", "[x]", '"so"', "a" * 50], k=draw.randrange(1, 40))
        date = "" if session % 3 == 2 else f"day {session}"
        found.append(Utterance(session, date, draw.choice(["Ada", "벤"]), " ".join(words)))
    return found


def test_stream_is_the_text_of_the_history() -> None:
    utterances = [Utterance(0, "d0", "Ada", "a"), Utterance(0, "d0", "Ben", "b"), Utterance(1, "d1", "Ada", "c")]
    stream = TokenStream([1000, 1001], encode, ("Ada", "Ben"), utterances)
    text = 'A conversation between Ada and Ben.\n[d0]\nAda said, "a"\nBen said, "b"\n[d1]\nAda said, "c"\n'
    assert stream.tokens(0, len(stream)) == [1000, 1001, *text.encode()]
    assert stream.start_of(0) == 2 + text.index("[d0]")
    assert stream.start_of(1) == 2 + text.index("Ben said")
    assert stream.start_of(2) == 2 + text.index("[d1]")
    assert stream.n_utterances == 3


def test_appending_equals_building_at_once_and_finds_every_utterance() -> None:
    draw = random.Random(7)
    utterances = random_utterances(draw, 60)
    whole = TokenStream([5, 6, 7], encode, ("Ada", "벤"), utterances)
    grown = TokenStream([5, 6, 7], encode, ("Ada", "벤"), utterances[:13])
    before = grown.tokens(0, len(grown))
    for utterance in utterances[13:]:
        grown.append(utterance)
    assert grown.tokens(0, len(grown)) == whole.tokens(0, len(whole))
    assert grown.tokens(0, len(before)) == before
    starts = [whole.start_of(i) for i in range(60)]
    for token in range(len(whole)):
        expected = sum(start <= token for start in starts) - 1
        assert whole.utterance_at(token) == (None if expected < 0 else expected)
    assert whole.tokens(11, 11) == []


def test_stream_refuses_ranges_outside_and_sessions_that_go_back() -> None:
    stream = TokenStream([], encode, ("Ada",), [Utterance(2, "", "Ada", "a")])
    for start, stop in [(-1, 2), (0, len(stream) + 1), (3, 2)]:
        with pytest.raises(UsageError, match="were asked for"):
            stream.tokens(start, stop)
    with pytest.raises(UsageError, match="Token"):
        stream.utterance_at(len(stream))
    with pytest.raises(UsageError, match="Utterance 1"):
        stream.start_of(1)
    with pytest.raises(WorkError, match="Utterance 1 belongs to session 1 but follows session 2"):
        stream.append(Utterance(1, "", "Ada", "b"))
    assert stream.n_utterances == 1
