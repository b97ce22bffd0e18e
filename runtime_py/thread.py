"""A thread: questions and answers that follow one another in the tail behind one episode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime_py.episodes.cache import F32, SealedCache
from runtime_py.language_model import LanguageModel, Tail
from runtime_py.manifest import Template
from runtime_py.tokenizer import StreamDecoder


@dataclass
class Thread:
    """``turns`` are the finished (question, answer) texts whose tokens lie in ``tail`` behind ``episode``'s cache.

    A question that is in the log already is "" there. ``since`` is the date line's text of when the thread began.
    """

    episode: int
    sealed: SealedCache
    tail: Tail
    turns: list[tuple[str, str]] = field(default_factory=list)
    stop_reason: str = ""
    since: str = ""

    def opening(self, template: Template, question: Sequence[int], recalled: Sequence[int]) -> list[int]:
        """Token ids that bring the question into the tail, up to where the answer begins."""
        recall = [*template.recall_prefix, *recalled] if recalled else []
        before = template.turn_end if self.turns else []
        return [*before, *recall, *template.question_prefix, *question, *template.question_suffix]

    def has_room(self, tokens: int, capacity: int) -> bool:
        """Whether a turn that opens with ``tokens`` may start here: a quarter of the tail stays free for the answer."""
        return (self.tail.used + tokens) * 4 <= capacity * 3


class AnswerText:
    """The text of an answer as its tokens come, without white space around it: all pieces in a row are ``text``."""

    def __init__(self, decoder: StreamDecoder) -> None:
        self._decoder, self._raw, self.text = decoder, "", ""

    def push(self, token: int) -> str:
        """What ``token`` adds to the text, which may be nothing yet."""
        return self._show(self._decoder.push(token))

    def flush(self) -> str:
        """What is left at the end."""
        return self._show(self._decoder.flush())

    def _show(self, piece: str) -> str:
        self._raw += piece
        # White space at the end is held back until something follows it.
        known, self.text = len(self.text), self._raw.strip()
        return self.text[known:]


def decode(
    model: LanguageModel,
    thread: Thread,
    logits: F32,
    stop_ids: frozenset[int],
    limit: int,
    cancelled: Callable[[], bool],
) -> Iterator[int]:
    """Greedy tokens behind ``logits [vocab]``, the lowest id among equals, each read into the tail before the next.

    Ends with ``thread.stop_reason``: "stop" (a stop id), "length" (the tail is full), "max_tokens" (``limit`` reached) or
    "cancelled".
    """
    thread.stop_reason = "cancelled"
    for count in range(1, limit + 1):
        if cancelled():
            return
        token = int(np.argmax(logits))
        if token in stop_ids:
            thread.stop_reason = "stop"
            return
        room = thread.tail.used < model.plan.tail
        if room:
            logits = model.read(thread.sealed, thread.tail, [token])
        thread.stop_reason = "cancelled" if room else "length"
        if count == limit and room:
            thread.stop_reason = "max_tokens"
        yield token
        if not room:
            return
