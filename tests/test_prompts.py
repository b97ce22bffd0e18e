"""The patched prompt: equal shares, whole utterances, never over the limit, never empty."""

from __future__ import annotations

import random

import pytest

from runtime_py.episodes.history import Utterance
from runtime_py.episodes.prompts import patched_prompt
from runtime_py.episodes.segments import make_segments
from runtime_py.errors import UsageError


def encode(text: str) -> list[int]:
    return list(text.encode())


def text_of(texts: list[str], limit: int) -> str:
    return bytes(patched_prompt(texts, encode, limit)).decode()


FIRST = '[d1]\nA said, "111"\nB said, "222"\n'  # 5 + 14 + 14 bytes
SECOND = '[d2]\nA said, "333"\nB said, "444"\nA said, "555"\n'  # 5 + 3 * 14 bytes


def test_everything_fits() -> None:
    assert text_of([FIRST, SECOND], 80) == FIRST + SECOND


def test_share_of_a_shorter_segment_goes_to_the_other() -> None:
    short = '[d1]\nA said, "1"\n'  # 17 bytes
    assert text_of([short, SECOND], 64) == short + SECOND
    assert text_of([SECOND, short], 64) == SECOND + short
    assert text_of([short, SECOND], 63) == short + SECOND[:33]


def test_whole_utterances_are_dropped_from_the_end() -> None:
    assert text_of([FIRST, SECOND], 66) == FIRST + SECOND[:33]
    assert text_of([FIRST, SECOND], 65) == FIRST + SECOND[:19]
    assert text_of([FIRST, SECOND], 40) == FIRST[:19] + SECOND[:19]


def test_first_utterance_is_cut_when_it_does_not_fit() -> None:
    assert text_of([FIRST, SECOND], 24) == FIRST[:12] + SECOND[:12]
    assert text_of([FIRST, SECOND], 25) == FIRST[:13] + SECOND[:12]
    assert text_of([FIRST], 3) == FIRST[:3]
    assert text_of([FIRST, SECOND], 1) == FIRST[:1]


def test_lines_are_encoded_one_by_one() -> None:
    seen: list[str] = []

    def remember(line: str) -> list[int]:
        seen.append(line)
        return [len(seen)]

    assert patched_prompt([FIRST, 'A said, "no date"\n'], remember, 10) == [1, 2, 3, 4]
    assert seen == ["[d1]\n", 'A said, "111"\n', 'B said, "222"\n', 'A said, "no date"\n']


def test_odd_texts() -> None:
    assert patched_prompt([], encode, 5) == []
    assert patched_prompt([""], encode, 5) == []
    assert text_of(["no line end"], 20) == "no line end"
    assert text_of(["[only a date]\n"], 20) == "[only a date]\n"
    with pytest.raises(UsageError, match="0 tokens"):
        patched_prompt([FIRST], encode, 0)


def test_any_segments_under_any_limit() -> None:
    draw = random.Random(2)
    for _ in range(300):
        log = []
        for i in range(draw.randrange(1, 12)):
            words = draw.choices(["tea", "오늘은 좋아요.", "👩\u200d🚀", "so."], k=draw.choice([1, 4, 30, 400]))
            log.append(Utterance(i // 6, "1 May" if draw.random() < 0.7 else "", "벤", " ".join(words)))
        segments = make_segments(log)
        texts = [s.text for s in sorted(draw.sample(segments, min(2, len(segments))), key=lambda s: (s.first, s.part))]
        limit = draw.choice([1, 2, 31, 64, 256, 5000])
        prompt = patched_prompt(texts, encode, limit)
        assert 0 < len(prompt) <= limit
        if sum(len(encode(t)) for t in texts) <= limit:
            assert bytes(prompt) == "".join(texts).encode()
        # What is kept is the beginning of each segment, in order, and each keeps something.
        if limit >= len(texts):
            splits = [
                n
                for n in range(1, len(prompt) + (len(texts) == 1))
                if encode(texts[0])[:n] == prompt[:n] and encode(texts[-1])[: len(prompt) - n] == prompt[n:]
            ]
            assert splits or (len(texts) == 1 and encode(texts[0])[: len(prompt)] == prompt)
