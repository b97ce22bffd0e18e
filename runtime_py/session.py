"""A session: ask, append, forget, wipe over one bundle, one engine and one store (design section "Session, thread, log")."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from runtime_py.embedder import F32, Embedder
from runtime_py.engines.base import Engine
from runtime_py.episodes.clustering import add_episode, cluster_store, open_store
from runtime_py.episodes.history import Utterance, clean_utterance
from runtime_py.episodes.matching import Centroids, nearest_segments, route
from runtime_py.episodes.prompts import patched_prompt
from runtime_py.episodes.reader import EpisodeReader, ReadProgress
from runtime_py.episodes.rendering import TokenStream
from runtime_py.episodes.segments import Segment, extend_segments, make_segments
from runtime_py.episodes.store import Store
from runtime_py.errors import Cancelled, UsageError
from runtime_py.language_model import LanguageModel, Tail
from runtime_py.thread import Thread, decode

if TYPE_CHECKING:
    from runtime_py.bundle import Bundle

_Stream = Generator[str, None, "Answer"]
USER, ASSISTANT = "User", "Assistant"
_PENDING = "thread"  # settings key: finished turns that are not in the log yet


@dataclass(frozen=True)
class Answer:
    """``reason``: "stop", "length" (end of the tail), "max_tokens" or "cancelled". ``queued``: a new episode was asked for."""

    answer: str
    episode: int
    similarities: list[float]
    reason: str
    tokens: list[int]
    tokens_per_s: float
    seconds_to_first: float
    queued: bool
    notes: list[str] = field(default_factory=list)


class Session:
    """One conversation partner over a history. Methods are for one thread, except ``cancel``, which any may call."""

    def __init__(self, bundle: Bundle, engine: Engine, store: Store, recall: int) -> None:
        manifest = bundle.manifest
        self._bundle, self._engine, self._store, self._recall = bundle, engine, store, recall
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._plan, self._template = manifest.plan, manifest.template
        self._tokenizer = bundle.text_tokenizer()
        self._embedder = Embedder(engine, bundle.sentence_tokenizer())
        self._model = LanguageModel(engine, manifest.shape, manifest.plan)
        self._cancel = threading.Event()
        self._thread: Thread | None = None
        self._segments: list[Segment] = []
        self._vectors: list[F32] = []
        self._own_session, self._own_date = -1, ""  # the log's session that holds this session's turns
        self.progress: ReadProgress = lambda _episode, _done, _total: None
        self._load_stream()
        self._log_turns([(str(q), str(a)) for q, a in store.settings().get(_PENDING, [])])

    @staticmethod
    def open(bundle: Bundle, engine: Engine, store: Path | None, recall: int = 0) -> Session:
        """Open or create the store and a session over it; see ``Bundle.session``."""
        if not 0 <= recall <= 64:
            raise UsageError(f"recall {recall} is not possible: allowed are 0 to 64 segments.")
        temporary = None
        if store is None:
            temporary = tempfile.TemporaryDirectory(prefix="epicache-")
            store = Path(temporary.name) / "store"
        session = Session(bundle, engine, open_store(bundle, store), recall)
        session._temporary = temporary
        return session

    # Asking.

    def ask(self, question: str, on_text: Callable[[str], None] | None = None, max_new_tokens: int | None = None) -> Answer:
        """Answer ``question`` from the episode nearest to it; ``on_text`` gets the text as it grows.

        Raises ``UsageError`` for an empty question and ``WorkError`` where the store or the engine fails.
        """
        pieces: list[str] = []
        stream = self.stream(question, max_new_tokens)
        while True:
            try:
                piece = next(stream)
            except StopIteration as end:
                answer: Answer = end.value
                return answer
            pieces.append(piece)
            if on_text:
                on_text(piece)

    def stream(self, question: str, max_new_tokens: int | None = None) -> _Stream:
        """The answer's text piece by piece; the generator's return value is the ``Answer``."""
        if max_new_tokens is not None and max_new_tokens < 1:
            raise UsageError(f"max_new_tokens {max_new_tokens} is not possible: at least 1 is needed.")
        cleaned = clean_utterance(Utterance(0, "", USER, question))
        if cleaned is None:
            raise UsageError("The question is empty. Ask something.")
        self._cancel.clear()
        return self._answer(cleaned.text, max_new_tokens or self._plan.tail)

    def _answer(self, question: str, limit: int) -> _Stream:
        started = time.monotonic()
        notes: list[str] = []
        tokens = self._tokenizer.encode(question)
        if len(tokens) > self._plan.tail // 2:
            # Before the thread's turns reach the log this would be out of order, so they go first.
            self._end_thread()
            self.append(USER, question, self._now())
            tokens = tokens[-(self._plan.tail // 2) :]
            notes.append("The question is longer than half the tail: it is in the log, and its end was asked.")
        vector = self._embedder.embed(question)
        match = route(vector, Centroids.of(self._centroids()))
        queued = max(match.similarities) < self._bundle.manifest.routing.threshold
        if queued:
            self._store.queue_episode(question, vector)
        text = self._tokenizer.stream_decoder()
        produced: list[int] = []
        answer, first = "", 0.0
        try:
            thread = self._thread_for(match.episode, tokens)
            recalled = self._recalled(vector, thread, tokens)
            logits = self._model.read(thread.sealed, thread.tail, thread.opening(self._template, tokens, recalled))
        except Cancelled:
            return Answer("", match.episode, match.similarities, "cancelled", [], 0.0, 0.0, queued, notes)
        ready = time.monotonic()
        stops = frozenset(self._template.stop_ids)
        for token in decode(self._model, thread, logits, stops, limit, self._cancel.is_set):
            first = first or time.monotonic() - started
            produced.append(token)
            if piece := text.push(token):
                answer += piece
                yield piece
        if piece := text.flush():
            answer += piece
            yield piece
        thread.turns.append((question, answer.strip()))
        self._remember(thread.turns)
        elapsed = time.monotonic() - ready
        rate = len(produced) / elapsed if produced and elapsed > 0 else 0.0
        return Answer(answer.strip(), match.episode, match.similarities, thread.stop_reason, produced, rate, first, queued, notes)

    def _thread_for(self, episode: int, question: list[int]) -> Thread:
        """The running thread where the question fits into it, else a new one; finished turns then go to the log."""
        thread = self._thread
        if thread is not None:
            needed = len(thread.opening(self._template, question, []))
            if thread.episode != episode or not thread.has_room(needed, self._plan.tail):
                self._end_thread()
        if self._thread is None:
            sealed = self._reader().sealed(episode)
            self._thread = Thread(episode, sealed, Tail.empty(self._model.shape, self._plan))
        return self._thread

    def _recalled(self, vector: F32, thread: Thread, question: list[int]) -> list[int]:
        """Tokens of the segments nearest to the question, in order of time, at most R/4 and what the tail can hold."""
        if not self._recall:
            return []
        self._embed_segments()
        limit = self._plan.tail // 4
        chosen: list[list[int]] = []
        wanted = nearest_segments(vector, np.stack(self._vectors), self._recall)
        share = max(limit // max(len(wanted), 1), 1)
        for index in wanted:
            lines = self._segments[index].text.splitlines(keepends=True)
            chosen.append([t for line in lines for t in self._tokenizer.encode(line)][:share])
        recalled = [t for each in chosen for t in each]
        fits = thread.has_room(len(thread.opening(self._template, question, recalled)), self._plan.tail)
        return recalled if fits else []

    def cancel(self) -> None:
        """Stop the answer or the reading under way, from any thread, at the next token or block."""
        self._cancel.set()

    # The log.

    def append(self, speaker: str, text: str, date: str | None = None) -> bool:
        """Add one utterance to the log; False when nothing is left of its text. Durable when it returns.

        A new ``date`` line opens a new session; None goes on in the last one.
        """
        log = self._store.utterances()
        last = log[-1] if log else Utterance(0, date or "", speaker, "")
        new_session = bool(log) and date is not None and date != last.date
        utterance = clean_utterance(Utterance(last.session + new_session, date if date is not None else last.date, speaker, text))
        if utterance is None:
            return False
        self._end_thread()
        self._store.append([utterance])
        self._stream.append(utterance)
        return True

    def forget(self, first: int, last: int) -> None:
        """Delete the utterances ``first`` to ``last`` (counted from 0, both included) and rebuild what saw them.

        Episodes are clustered anew and read the remaining log lazily. Raises ``UsageError`` for a range outside the log.
        """
        self._end_thread()
        log = self._store.utterances()
        if not 0 <= first <= last < len(log):
            raise UsageError(f"Utterances {first} to {last} cannot be forgotten: the log has 0 to {len(log) - 1}.")
        remaining = [*log[:first], *log[last + 1 :]]
        if not remaining:
            raise UsageError("Nothing would be left of the log. Use wipe to delete the whole store.")
        shared = self._store.shared()
        untouched = shared is not None and shared.n_seen <= self._stream.start_of(first)
        with self._store.transaction():
            self._store.replace_log(remaining, keep_shared=untouched)
            self._segments, self._vectors = [], []
            cluster_store(self._store, self._embedder, self._tokenizer.encode, self._plan, keep_shared=untouched)
        self._load_stream()

    def wipe(self) -> None:
        """Delete the whole store. The session is closed afterwards."""
        self._thread = None
        self._store.wipe()
        self._engine.close()

    def catch_up(self) -> None:
        """Bring every episode up to date and build the queued ones; what a phone does in the background."""
        self._cancel.clear()
        self._end_thread()
        while queued := self._store.queued():
            question = queued[0].question
            vector = queued[0].vector if queued[0].vector is not None else self._embedder.embed(question)
            self._embed_segments()
            nearest = nearest_segments(vector, np.stack(self._vectors), self._plan.medoids - 1)
            texts = [question + "\n", *(self._segments[i].text for i in nearest)]
            prompt = patched_prompt(texts, self._tokenizer.encode, self._plan.prompt)
            add_episode(self._store, vector, prompt, nearest)
        for episode in range(len(self._store.episodes())):
            self._reader().sealed(episode)

    def utterances(self) -> list[Utterance]:
        """The log, in order; turns of the running thread are not in it yet."""
        return self._store.utterances()

    @property
    def store_folder(self) -> Path:
        """Where the store lies."""
        return self._store.folder

    def unload(self) -> None:
        """Give back memory: weights and caches are mapped again on the next question."""
        self._end_thread()
        self._engine.close()

    def close(self) -> None:
        """Put the thread into the log and release the store."""
        try:
            self._end_thread()
        finally:
            self._store.close()
            self._engine.close()
            if self._temporary is not None:
                self._temporary.cleanup()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside.

    def _load_stream(self) -> None:
        self._stream = TokenStream(self._template.prefix, self._tokenizer.encode, self._store.speakers, self._store.utterances())

    def _reader(self) -> EpisodeReader:
        return EpisodeReader(self._model, self._store, self._stream, self._cancel.is_set, lambda *args: self.progress(*args))

    def _centroids(self) -> F32:
        centroids = self._store.centroids()
        if centroids is None:
            cluster_store(self._store, self._embedder, self._tokenizer.encode, self._plan)
            centroids = self._store.centroids()
        assert centroids is not None
        return centroids

    def _embed_segments(self) -> None:
        """Segment vectors follow the log: only new and changed segments are embedded."""
        log = self._store.utterances()
        if self._segments:
            self._segments, changed = extend_segments(self._segments, log)
        else:
            self._segments = make_segments(log)
            changed = list(range(len(self._segments)))
        for index in changed:
            vector = self._embedder.embed(self._segments[index].text)
            self._vectors[index : index + 1] = [vector]

    def _remember(self, turns: list[tuple[str, str]]) -> None:
        """Keep finished turns where a kill cannot lose them, until they reach the log."""
        self._store.set_settings({**self._store.settings(), _PENDING: [list(turn) for turn in turns]})

    def _end_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._log_turns(thread.turns)

    def _log_turns(self, turns: list[tuple[str, str]]) -> None:
        if not turns:
            return
        log = self._store.utterances()
        if not log or log[-1].session != self._own_session:
            self._own_session, self._own_date = log[-1].session + 1 if log else 0, self._now()
        spoken = [
            Utterance(self._own_session, self._own_date, speaker, text)
            for turn in turns
            for speaker, text in zip((USER, ASSISTANT), turn, strict=True)
        ]
        utterances = [u for u in map(clean_utterance, spoken) if u is not None]
        with self._store.transaction():
            self._store.append(utterances)
            self._remember([])
        for utterance in utterances:
            self._stream.append(utterance)

    @staticmethod
    def _now() -> str:
        now = datetime.now()
        return f"{now:%I:%M %p}".lstrip("0").lower() + f" on {now.day} {now:%B, %Y}"
