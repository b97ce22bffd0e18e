"""The patched prompt: the medoid segments' text, read behind every block to score what the episode should keep."""

from __future__ import annotations

from collections.abc import Sequence

from runtime_py.episodes.rendering import Encode, is_date_line
from runtime_py.errors import UsageError


def patched_prompt(texts: Sequence[str], encode: Encode, limit: int) -> list[int]:
    """Token ids of the medoid segments' text, at most ``limit`` of them.

    ``texts`` are the texts of the segments (``Segment.text``), in order. Every segment gets an equal share of
    ``limit``; what is left over goes to those that can use it, the first in order first. A segment longer than its room
    loses whole utterances from its end; when not even its date line and first utterance fit, these are cut to tokens.
    Only a ``limit`` below the number of segments leaves the last ones out. Raises ``UsageError`` when ``limit`` is
    below 1.
    """
    if limit < 1:
        raise UsageError(f"A prompt of {limit} tokens was asked for; at least 1 is needed. Use --prompt 32 or more.")
    segments = [units for units in (_units(text, encode) for text in texts) if units]
    if not segments:
        return []
    kept = [_fit(units, limit // len(segments)) for units in segments]
    unused = limit - sum(map(len, kept))
    for i, units in enumerate(segments):
        room = len(kept[i]) + unused
        kept[i] = _fit(units, room)
        unused = room - len(kept[i])
    return [token for tokens in kept for token in tokens]


def _units(text: str, encode: Encode) -> list[list[int]]:
    """Tokens of each utterance; a date line belongs to the utterance behind it."""
    units: list[list[int]] = []
    opening: list[int] = []
    *lines, rest = text.split("\n")
    for line in [*(line + "\n" for line in lines), *([rest] if rest else [])]:
        opening = [*opening, *encode(line)]
        if not is_date_line(line):
            units.append(opening)
            opening = []
    return [*units, opening] if opening else units


def _fit(units: list[list[int]], room: int) -> list[int]:
    """As many whole utterances from the beginning as fit into ``room`` tokens, at least a piece of the first."""
    kept: list[int] = []
    for unit in units:
        if len(kept) + len(unit) > room:
            break
        kept.extend(unit)
    return kept or units[0][:room]
