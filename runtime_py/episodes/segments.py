"""Segments: what is embedded, clustered and found again. Four utterances in order, never across sessions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from runtime_py.episodes.history import Utterance
from runtime_py.episodes.rendering import date_line, utterance_line

SEGMENT_UTTERANCES = 4
# In Unicode code points. A longer utterance (an assistant's answer) gets segments of its own, each of at most
# PART_CHARACTERS, which with date and speaker fits an embedder that reads 256 tokens of English.
LONG_UTTERANCE = 1200
PART_CHARACTERS = 900
_SENTENCE_END = re.compile(r"[.!?…]+[\"')\]”’»]*\s|[。！？]+[\"”’」』）]*\s?")


@dataclass(frozen=True)
class Segment:
    """Utterances ``first`` to ``last`` (inclusive) as text with the session's date line.

    ``part`` is 0 except for the second and later pieces of one long utterance, which count 1, 2, ...
    """

    first: int
    last: int
    part: int
    text: str


def make_segments(utterances: Sequence[Utterance], start: int = 0) -> list[Segment]:
    """Cut ``utterances[start:]`` into segments; indices count from the beginning of ``utterances``."""
    segments: list[Segment] = []
    position = start
    while position < len(utterances):
        if _is_long(utterances[position]):
            segments.extend(_parts(utterances[position], position))
            position += 1
            continue
        last = position
        while last + 1 < len(utterances) and last + 1 - position < SEGMENT_UTTERANCES:
            following = utterances[last + 1]
            if following.session != utterances[position].session or _is_long(following):
                break
            last += 1
        lines = "".join(utterance_line(each) for each in utterances[position : last + 1])
        segments.append(Segment(position, last, 0, date_line(utterances[position].date) + lines))
        position = last + 1
    return segments


def extend_segments(segments: Sequence[Segment], utterances: Sequence[Utterance]) -> tuple[list[Segment], list[int]]:
    """Segments after the log has grown, and the indices of those that are new or changed.

    ``segments`` are those of the first utterances of ``utterances``, the whole log. The result equals ``make_segments``
    of the whole log; of the old segments only the last may change, while it has fewer than four utterances.
    """
    keep, start = len(segments), 0
    if segments:
        last = segments[-1]
        start = last.last + 1
        is_open = last.last - last.first + 1 < SEGMENT_UTTERANCES and not _is_long(utterances[last.first])
        if is_open:
            keep, start = keep - 1, last.first
    extended = [*segments[:keep], *make_segments(utterances, start)]
    changed = [i for i in range(keep, len(extended)) if i >= len(segments) or extended[i] != segments[i]]
    return extended, changed


def _is_long(utterance: Utterance) -> bool:
    return len(utterance.text) > LONG_UTTERANCE


def _parts(utterance: Utterance, index: int) -> Iterator[Segment]:
    for part, text in enumerate(split_text(utterance.text, PART_CHARACTERS)):
        line = utterance_line(dataclasses.replace(utterance, text=text))
        yield Segment(index, index, part, date_line(utterance.date) + line)


def split_text(text: str, limit: int) -> list[str]:
    """Cut ``text`` into pieces of at most ``limit`` code points, at sentence ends where there are any.

    A sentence that is too long by itself is cut at its last space that fits, else after ``limit`` code points. White
    space around pieces is dropped; apart from that, the pieces in a row are the text.
    """
    pieces: list[str] = []
    start = 0
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    at = 0
    while len(text) - start > limit:
        stop = start + limit
        # A piece may end in a space that is stripped, so one more character may belong to it.
        cut = 0
        while at < len(ends) and ends[at] <= stop + 1:
            if len(text[start : ends[at]].rstrip()) <= limit:
                cut = ends[at]
            at += 1
        if not cut:
            space = text.rfind(" ", start, stop + 1)
            cut = space + 1 if space > start else stop
        pieces.append(text[start:cut])
        start = cut
    pieces.append(text[start:])
    return [piece for piece in map(str.strip, pieces) if piece]
