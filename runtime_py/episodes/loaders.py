"""Read a conversation file: LoCoMo, LongMemEval, RealTalk, or the plain layout of this project.

A layout is one entry of ``LAYOUTS``: how to recognise a conversation and how to parse it.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime_py.episodes.history import History, Utterance, clean_history, clean_text
from runtime_py.errors import UsageError, WorkError

Json = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A question about a history.

    ``evidence`` names the utterances (``Utterance.id``) that hold the answer, as the source has them; ``answer`` is ""
    where the source has none (adversarial questions); ``date`` is when it was asked, "" when unknown.
    """

    text: str
    answer: str
    evidence: tuple[str, ...]
    category: str
    date: str = ""


@dataclass(frozen=True)
class LoadedHistory:
    """A history, its questions, the name of its layout, and how many utterances were dropped for having no text."""

    history: History
    questions: list[Question]
    layout: str
    dropped: int


@dataclass(frozen=True)
class Parsed:
    """What a layout yields, before cleaning."""

    speakers: list[str]
    utterances: list[Utterance]
    questions: list[Question]


@dataclass(frozen=True)
class Layout:
    """A file layout. ``recognises`` looks at one conversation; ``parse`` also gets the place named in errors."""

    name: str
    recognises: Callable[[Json], bool]
    parse: Callable[[Json, str], Parsed]


def load_history(path: Path | str, index: int = 0) -> LoadedHistory:
    """Read conversation ``index`` of a JSON file that holds one conversation or a list of them.

    Raises ``UsageError`` for an index outside the file and ``WorkError`` for a file that is missing, not JSON, of an
    unknown layout, with fields of a wrong type, or without any text.
    """
    path = Path(path)
    data = _read_json(path)
    entries = data if isinstance(data, list) else [data]
    if not entries:
        raise WorkError(f"{path} is an empty list. Give a file with at least one conversation.")
    if not 0 <= index < len(entries):
        raise UsageError(
            f"{path}: there is no conversation {index}; the file holds {len(entries)}, numbered 0 to "
            f"{len(entries) - 1}. Choose one of these."
        )
    entry = entries[index]
    where = f"{path}: [{index}]" if isinstance(data, list) else f"{path}: conversation"
    layout = next((each for each in LAYOUTS if isinstance(entry, dict) and each.recognises(entry)), None)
    if layout is None:
        found = f"fields {reprlib.repr(list(entry))}" if isinstance(entry, dict) else type(entry).__name__
        raise WorkError(
            f"{where} has an unknown layout ({found}). Known are {', '.join(each.name for each in LAYOUTS)}; "
            'write the plain one as {"speakers": ["..."], "sessions": [{"date": "...", "utterances": '
            '[{"speaker": "...", "text": "..."}]}]}.'
        )
    parsed = layout.parse(entry, where)
    try:
        history, dropped = clean_history(parsed.speakers, parsed.utterances)
    except WorkError as error:
        raise WorkError(f"{where}: {error}") from None
    return LoadedHistory(history, parsed.questions, layout.name, dropped)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise WorkError(f"{path} does not exist. Give the path of a conversation file (JSON).") from None
    except OSError as error:
        raise WorkError(f"{path} cannot be read ({error.strerror}). Give the path of a readable JSON file.") from None
    except UnicodeDecodeError as error:
        raise WorkError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}). Save it as UTF-8.") from None
    except (ValueError, RecursionError) as error:
        raise WorkError(f"{path} is not JSON ({error}). Correct the file, or give another one.") from None


def _wrong(where: str, expected: str, value: object) -> WorkError:
    return WorkError(f"{where}: {expected} is expected, found {reprlib.repr(value)}. Correct this field of the file.")


def _list(value: Any, where: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong(where, "a list", value)
    return value


def _object(value: Any, where: str) -> Json:
    if not isinstance(value, dict):
        raise _wrong(where, "an object", value)
    return value


def _text(value: Any, where: str) -> str:
    """A string; null counts as ""."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _wrong(where, "a text", value)
    return value


def _answer(value: Any, where: str) -> str:
    """Answers are texts, numbers or lists of them."""
    if isinstance(value, list):
        return ", ".join(_answer(each, where) for each in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return clean_text(_text(value, where))


def _with_caption(turn: Json, text: str, where: str) -> str:
    caption = _text(turn.get("blip_caption"), f"{where}.blip_caption")
    return f"{text} [shares a photo: {caption}]" if caption else text


def _numbered_sessions(source: Json) -> list[tuple[str, Any]]:
    """``session_1``, ``session_2``, ... in numeric order; dates without a session are not among them."""
    found = ((re.fullmatch(r"session_([0-9]+)", key), key) for key in source)
    numbered = sorted((int(match.group(1)), key) for match, key in found if match)
    return [(key, source[key]) for _, key in numbered]


def _session_utterances(source: Json, text_fields: tuple[str, ...], where: str) -> list[Utterance]:
    """Utterances of LoCoMo and RealTalk, whose text is the first of ``text_fields`` that is there."""
    utterances = []
    for number, (key, session) in enumerate(_numbered_sessions(source)):
        turns = [_object(turn, f"{where}.{key}[{i}]") for i, turn in enumerate(_list(session, f"{where}.{key}"))]
        date = _text(source.get(f"{key}_date_time"), f"{where}.{key}_date_time")
        if not date and turns:
            date = _text(turns[0].get("date_time"), f"{where}.{key}[0].date_time")
        for i, turn in enumerate(turns):
            place = f"{where}.{key}[{i}]"
            field = next((name for name in text_fields if name in turn), text_fields[-1])
            text = _with_caption(turn, _text(turn.get(field), f"{place}.{field}"), place)
            speaker = _text(turn.get("speaker"), f"{place}.speaker")
            utterances.append(Utterance(number, date, speaker, text, _text(turn.get("dia_id"), f"{place}.dia_id")))
    return utterances


def _qa(entry: Json, where: str) -> list[Question]:
    """Questions of LoCoMo and RealTalk. One evidence text may name several utterances ("D8:6; D9:17")."""
    questions = []
    for i, item in enumerate(_list(entry.get("qa"), f"{where}.qa")):
        place = f"{where}.qa[{i}]"
        qa = _object(item, place)
        evidence: list[str] = []
        for name in _list(qa.get("evidence"), f"{place}.evidence"):
            evidence.extend(re.split(r"[;,\s]+", _text(name, f"{place}.evidence").strip()))
        questions.append(
            Question(
                clean_text(_text(qa.get("question"), f"{place}.question")),
                _answer(qa.get("answer"), f"{place}.answer"),
                tuple(name for name in evidence if name),
                _answer(qa.get("category"), f"{place}.category"),
            )
        )
    return questions


def _parse_locomo(entry: Json, where: str) -> Parsed:
    """LoCoMo (Maharana et al., ACL 2024): ``conversation`` with numbered sessions, ``qa`` beside it."""
    source = _object(entry["conversation"], f"{where}.conversation")
    names = [_text(source.get(key), f"{where}.conversation.{key}") for key in ("speaker_a", "speaker_b")]
    utterances = _session_utterances(source, ("text", "clean_text"), f"{where}.conversation")
    return Parsed(names, utterances, _qa(entry, where))


def _parse_realtalk(entry: Json, where: str) -> Parsed:
    """RealTalk (Lee et al., 2025): numbered sessions at the top, messages with ``clean_text``."""
    source = _object(entry.get("name") or {}, f"{where}.name")
    names = [_text(source.get(key), f"{where}.name.{key}") for key in ("speaker_1", "speaker_2")]
    return Parsed(names, _session_utterances(entry, ("clean_text", "text"), where), _qa(entry, where))


_LONGMEMEVAL_DATE = re.compile(r"\d{4}/\d{2}/\d{2} \(\w{3}\) \d{2}:\d{2}")
_LONGMEMEVAL_SPEAKERS = {"user": "User", "assistant": "Assistant"}


def _parse_longmemeval(entry: Json, where: str) -> Parsed:
    """LongMemEval (Wu et al., ICLR 2025): one question and the sessions between a user and an assistant before it.

    Sessions are put in order of their dates (the oracle file has them unsorted). Utterances are named
    ``<session id>:<turn>``, turns from 1. The evidence are the turns marked ``has_answer`` in the answer's sessions,
    all turns of these where none is marked. Questions whose id ends in ``_abs`` have the category "abstention".
    """
    sessions = _list(entry["haystack_sessions"], f"{where}.haystack_sessions")
    columns = {}
    for key in ("haystack_dates", "haystack_session_ids"):
        values = [_text(each, f"{where}.{key}[{i}]") for i, each in enumerate(_list(entry.get(key), f"{where}.{key}"))]
        if values and len(values) != len(sessions):
            raise WorkError(
                f"{where}: {len(values)} {key} for {len(sessions)} haystack_sessions; one each is needed. "
                "Correct the file, or download it again."
            )
        columns[key] = values
    dates = columns["haystack_dates"] or [""] * len(sessions)
    names = columns["haystack_session_ids"] or [f"session_{i + 1}" for i in range(len(sessions))]
    order = list(range(len(sessions)))
    # This date format sorts as text; any other stays in the order of the file.
    if all(_LONGMEMEVAL_DATE.fullmatch(date) for date in dates):
        order.sort(key=dates.__getitem__)
    utterances: list[Utterance] = []
    marked: dict[str, bool] = {}
    for number, i in enumerate(order):
        place = f"{where}.haystack_sessions[{i}]"
        for j, item in enumerate(_list(sessions[i], place)):
            turn = _object(item, f"{place}[{j}]")
            role = _text(turn.get("role"), f"{place}[{j}].role")
            speaker = _LONGMEMEVAL_SPEAKERS.get(role, role)
            name = f"{names[i]}:{j + 1}"
            text = _text(turn.get("content"), f"{place}[{j}].content")
            utterances.append(Utterance(number, dates[i], speaker, text, name))
            marked[name] = turn.get("has_answer") is True
    answers = _list(entry.get("answer_session_ids"), f"{where}.answer_session_ids")
    wanted = {_text(each, f"{where}.answer_session_ids") for each in answers}
    in_sessions = [name for name in marked if name.rpartition(":")[0] in wanted]
    question = Question(
        clean_text(_text(entry.get("question"), f"{where}.question")),
        _answer(entry.get("answer"), f"{where}.answer"),
        tuple([name for name in in_sessions if marked[name]] or in_sessions),
        _longmemeval_category(entry, where),
        clean_text(_text(entry.get("question_date"), f"{where}.question_date")),
    )
    return Parsed(list(_LONGMEMEVAL_SPEAKERS.values()), utterances, [question])


def _longmemeval_category(entry: Json, where: str) -> str:
    if _text(entry.get("question_id"), f"{where}.question_id").endswith("_abs"):
        return "abstention"
    return _text(entry.get("question_type"), f"{where}.question_type")


def _parse_plain(entry: Json, where: str) -> Parsed:
    """Our own layout; ``id`` of an utterance and ``qa`` (as in LoCoMo) are optional."""
    names = [_text(each, f"{where}.speakers[{i}]") for i, each in enumerate(_list(entry.get("speakers"), f"{where}.speakers"))]
    utterances = []
    for number, item in enumerate(_list(entry["sessions"], f"{where}.sessions")):
        place = f"{where}.sessions[{number}]"
        session = _object(item, place)
        date = _text(session.get("date"), f"{place}.date")
        for j, each in enumerate(_list(session.get("utterances"), f"{place}.utterances")):
            at = f"{place}.utterances[{j}]"
            turn = _object(each, at)
            speaker, text, name = (_text(turn.get(key), f"{at}.{key}") for key in ("speaker", "text", "id"))
            utterances.append(Utterance(number, date, speaker, _with_caption(turn, text, at), name))
    return Parsed(names, utterances, _qa(entry, where))


# The first that recognises a conversation reads it.
LAYOUTS = [
    Layout("LoCoMo", lambda entry: "conversation" in entry, _parse_locomo),
    Layout("LongMemEval", lambda entry: "haystack_sessions" in entry, _parse_longmemeval),
    Layout("RealTalk", lambda entry: bool(_numbered_sessions(entry)), _parse_realtalk),
    Layout("plain", lambda entry: "sessions" in entry, _parse_plain),
]
