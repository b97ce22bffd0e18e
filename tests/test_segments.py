"""Segments: four utterances within a session, long utterances split at sentences, growth of the log."""

from __future__ import annotations

import random
import re

import pytest

from runtime_py.episodes.history import Utterance, clean_text
from runtime_py.episodes.segments import (
    LONG_UTTERANCE,
    PART_CHARACTERS,
    SEGMENT_UTTERANCES,
    Segment,
    extend_segments,
    make_segments,
    split_text,
)


def random_log(draw: random.Random, count: int) -> list[Utterance]:
    words = ["tea.", "오늘은", "👩\u200d🚀", "really?!", "좋아요。", "so", "on", '(done.)"', "x" * 300]
    session, log = 0, []
    for i in range(count):
        session += draw.random() < 0.15
        size = draw.choice([1, 5, 30, 300])
        text = clean_text(" ".join(draw.choices(words, [5, 5, 5, 5, 5, 5, 5, 5, 0.2], k=size)))
        log.append(Utterance(session, f"day {session}" if session % 2 else "", draw.choice(["Ada", "벤"]), text, str(i)))
    return log


def short(session: int, text: str) -> Utterance:
    return Utterance(session, f"day {session}", "Ada", text)


def test_four_utterances_never_across_sessions() -> None:
    log = [short(0, t) for t in "abcde"] + [short(1, t) for t in "fg"]
    assert make_segments(log) == [
        Segment(0, 3, 0, '[day 0]\nAda said, "a"\nAda said, "b"\nAda said, "c"\nAda said, "d"\n'),
        Segment(4, 4, 0, '[day 0]\nAda said, "e"\n'),
        Segment(5, 6, 0, '[day 1]\nAda said, "f"\nAda said, "g"\n'),
    ]
    assert make_segments([]) == []
    assert make_segments(log, start=5) == make_segments(log)[2:]


def test_long_utterance_gets_segments_of_its_own() -> None:
    sentence = "This sentence has forty-five characters, all. "
    answer = (sentence * 60).strip()
    assert len(answer) > LONG_UTTERANCE
    log = [short(0, "a"), short(0, answer), short(0, "b"), short(0, "c")]
    segments = make_segments(log)
    assert [(s.first, s.last) for s in segments] == [(0, 0), (1, 1), (1, 1), (1, 1), (1, 1), (2, 3)]
    assert [s.part for s in segments] == [0, 0, 1, 2, 3, 0]
    for segment in segments[1:5]:
        text = re.fullmatch(r'\[day 0\]\nAda said, "(.*)"\n', segment.text)
        assert text is not None and text.group(1).endswith("all.")
    assert make_segments([short(0, "y" * LONG_UTTERANCE)])[0].text == f'[day 0]\nAda said, "{"y" * LONG_UTTERANCE}"\n'


@pytest.mark.parametrize(
    ("text", "limit", "pieces"),
    [
        ("One. Two! Three?", 9, ["One. Two!", "Three?"]),
        ("One. Two! Three?", 8, ["One.", "Two!", "Three?"]),
        ('He said "no." Then left.', 14, ['He said "no."', "Then left."]),
        ("Version 3.14 is out", 12, ["Version 3.14", "is out"]),
        ("하나。둘。셋。", 5, ["하나。둘。", "셋。"]),
        ("abcdefgh", 3, ["abc", "def", "gh"]),
        ("abc def", 3, ["abc", "def"]),
        ("short", 5, ["short"]),
        ("", 5, []),
    ],
)
def test_split_text(text: str, limit: int, pieces: list[str]) -> None:
    assert split_text(text, limit) == pieces


def test_split_text_loses_nothing_and_keeps_the_limit() -> None:
    draw = random.Random(3)
    for _ in range(200):
        text = clean_text("".join(draw.choices("ab .!?。 '\"가😀", k=draw.randrange(200))))
        limit = draw.randrange(1, 40)
        pieces = split_text(text, limit)
        assert all(0 < len(piece) <= limit for piece in pieces)
        assert "".join(pieces).replace(" ", "") == text.replace(" ", "")


def test_segments_cover_every_utterance_once_in_order() -> None:
    draw = random.Random(11)
    for _ in range(30):
        log = random_log(draw, draw.randrange(1, 60))
        segments = make_segments(log)
        covered = [i for s in segments if s.part == 0 for i in range(s.first, s.last + 1)]
        assert covered == list(range(len(log)))
        for segment in segments:
            assert segment.last - segment.first < SEGMENT_UTTERANCES
            assert log[segment.first].session == log[segment.last].session
            if len(log[segment.first].text) > LONG_UTTERANCE:
                assert segment.first == segment.last
                assert len(segment.text) <= PART_CHARACTERS + len('[day 10]\nAda said, ""\n')


def test_extending_equals_making_from_scratch() -> None:
    draw = random.Random(5)
    for _ in range(20):
        log = random_log(draw, 50)
        segments: list[Segment] = []
        size = 0
        while size < len(log):
            size = min(len(log), size + draw.randrange(0, 7))
            old = list(segments)
            segments, changed = extend_segments(old, log[:size])
            assert segments == make_segments(log[:size])
            assert changed == [i for i, s in enumerate(segments) if i >= len(old) or s != old[i]]
            assert all(i >= len(old) - 1 for i in changed)
            if old and old[-1].last - old[-1].first + 1 == SEGMENT_UTTERANCES:
                assert all(i >= len(old) for i in changed)


def test_extending_by_nothing_changes_nothing() -> None:
    log = [short(0, "a"), short(0, "b")]
    segments = make_segments(log)
    assert extend_segments(segments, log) == (segments, [])
    assert extend_segments([], []) == ([], [])
