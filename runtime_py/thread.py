"""A thread: questions and answers that follow one another in the tail behind one episode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime_py.episodes.cache import F32, SealedCache
from runtime_py.language_model import LanguageModel, Tail
from runtime_py.manifest import Template


@dataclass
class Thread:
    """``turns`` are the finished (question, answer) texts whose tokens lie in ``tail`` behind ``episode``'s cache."""

    episode: int
    sealed: SealedCache
    tail: Tail
    turns: list[tuple[str, str]] = field(default_factory=list)
    stop_reason: str = ""

    def opening(self, template: Template, question: Sequence[int], recalled: Sequence[int]) -> list[int]:
        """Token ids that bring the question into the tail, up to where the answer begins."""
        recall = [*template.recall_prefix, *recalled] if recalled else []
        before = template.turn_end if self.turns else []
        return [*before, *recall, *template.question_prefix, *question, *template.question_suffix]

    def has_room(self, tokens: int, capacity: int) -> bool:
        """Whether a turn of ``tokens`` may start here: the tail is not yet three quarters full and fits it."""
        return self.tail.used * 4 < capacity * 3 and self.tail.used + tokens < capacity


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
