"""A conversation as the runtime keeps it: utterances of one line each, in order, grouped by session."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime_py.errors import WorkError

# C0 controls, DEL and C1 controls: Unicode category Cc.
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], " ")


@dataclass(frozen=True)
class Utterance:
    """One turn of the conversation.

    ``session`` counts sessions from 0, ``date`` is the session's date as its source wrote it ("" when unknown) and
    ``id`` the name that the source gives this utterance ("" when it gives none).
    """

    session: int
    date: str
    speaker: str
    text: str
    id: str = ""


@dataclass(frozen=True)
class History:
    """A whole conversation: who speaks, and every utterance in order of time.

    Raises ``WorkError`` without any utterance, or when the sessions are out of order.
    """

    speakers: tuple[str, ...]
    utterances: tuple[Utterance, ...]

    def __post_init__(self) -> None:
        if not self.utterances:
            raise WorkError("The history holds no utterance with any text. Give one with at least one utterance.")
        for i, (before, after) in enumerate(zip(self.utterances, self.utterances[1:], strict=False), start=1):
            check_session_order(before.session, after.session, i)


def check_session_order(before: int, after: int, index: int) -> None:
    """Raise ``WorkError`` when utterance ``index`` belongs to an earlier session than the one before it."""
    if after < before:
        raise WorkError(
            f"Utterance {index} belongs to session {after} but follows session {before}; sessions must not go back. "
            "Put the utterances in order of time."
        )


def clean_text(text: str) -> str:
    """Make ``text`` one line that every tokenizer and file format accepts.

    Control characters and runs of white space become one space, surrogates without a partner U+FFFD; a high and a low
    surrogate in a row become the character they encode.
    """
    if not text.isascii():
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return " ".join(text.translate(_CONTROLS).split())


def clean_utterance(utterance: Utterance) -> Utterance | None:
    """The utterance with speaker, date and text cleaned, or None when no text is left.

    Raises ``WorkError`` when there is text but no speaker.
    """
    text = clean_text(utterance.text)
    if not text:
        return None
    speaker = clean_text(utterance.speaker)
    if not speaker:
        raise WorkError(f"The utterance {text[:60]!r} has no speaker. Name who said it.")
    return dataclasses.replace(utterance, date=clean_text(utterance.date), speaker=speaker, text=text)


def clean_history(speakers: Sequence[str], utterances: Iterable[Utterance]) -> tuple[History, int]:
    """Build a history from raw utterances; also returns how many were dropped for having no text.

    Sessions left without utterances close up, so that indices run from 0 without gaps. ``speakers`` come first in the
    given order; whoever else speaks follows in order of appearance. Raises ``WorkError`` when nothing is left, a
    speaker is missing, or sessions go back.
    """
    kept: list[Utterance] = []
    dropped = 0
    numbers: dict[int, int] = {}
    latest: int | None = None
    for i, raw in enumerate(utterances):
        if latest is not None:
            check_session_order(latest, raw.session, i)
        latest = raw.session
        cleaned = clean_utterance(raw)
        if cleaned is None:
            dropped += 1
            continue
        session = numbers.setdefault(raw.session, len(numbers))
        kept.append(dataclasses.replace(cleaned, session=session))
    named = dict.fromkeys(name for name in map(clean_text, speakers) if name)
    named.update(dict.fromkeys(each.speaker for each in kept))
    return History(tuple(named), tuple(kept)), dropped
