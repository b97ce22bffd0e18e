"""A session: ask, append, forget, wipe over one bundle, one engine and one store (design section "Session, thread, log")."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from runtime_py.embedder import F32
from runtime_py.engines.base import Engine
from runtime_py.episodes.clustering import add_episode, cluster_store, open_store
from runtime_py.episodes.history import Utterance, clean_utterance
from runtime_py.episodes.matching import Centroids, nearest_segments, route
from runtime_py.episodes.prompts import patched_prompt
from runtime_py.episodes.reader import EpisodeReader, ReadProgress
from runtime_py.episodes.rendering import TokenStream
from runtime_py.episodes.segments import Segment, extend_segments
from runtime_py.episodes.store import Store
from runtime_py.errors import Cancelled, StoreError, UsageError
from runtime_py.language_model import LanguageModel, Tail
from runtime_py.thread import AnswerText, Thread, decode

if TYPE_CHECKING:
    from runtime_py.bundle import Bundle

_Stream = Generator[str, None, "Answer"]
USER, ASSISTANT = "User", "Assistant"
_PENDING = "thread"  # settings key: finished turns that are not in the log yet, and when their thread began


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
        self._plan, self._template = manifest.plan, manifest.template
        self._tokenizer = bundle.text_tokenizer()
        self._embedder = bundle.embedder(engine)
        self._model = LanguageModel(engine, manifest.shape, manifest.plan)
        self._resources, self._closed = contextlib.ExitStack(), False
        self._cancel = threading.Event()
        self._answering: _Stream | None = None
        self._thread: Thread | None = None
        self._segments: list[Segment] = []
        self._vectors: list[F32] = []
        self._own_session, self._own_date = -1, ""  # the log's session that holds this session's turns
        self.progress: ReadProgress = lambda _episode, _done, _total: None
        self._load_stream()
        if pending := store.settings().get(_PENDING):
            self._log_turns([(str(q), str(a)) for q, a in pending["turns"]], str(pending["since"]))

    @staticmethod
    def open(bundle: Bundle, engine: Engine, store: Path | None, recall: int = 0) -> Session:
        """Open or create the store and a session over it; see ``Bundle.session``."""
        if not 0 <= recall <= 64:
            raise UsageError(f"recall {recall} is not possible: allowed are 0 to 64 segments.")
        with contextlib.ExitStack() as undo:
            if store is None:
                store = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="epicache-"))) / "store"
            session = Session(bundle, engine, undo.enter_context(open_store(bundle, store)), recall)
            session._resources = undo.pop_all()
        return session

    # Asking.

    def ask(self, question: str, on_text: Callable[[str], None] | None = None, max_new_tokens: int | None = None) -> Answer:
        """Answer ``question`` from the episode nearest to it; ``on_text`` gets the text as it grows.

        Raises ``UsageError`` for an empty question and ``WorkError`` where the store or the engine fails.
        """
        with contextlib.closing(self.stream(question, max_new_tokens)) as stream:
            while True:
                try:
                    piece = next(stream)
                except StopIteration as end:
                    if end.value is None:
                        raise UsageError("The answer was ended by another call on its session. Ask again.") from None
                    answer: Answer = end.value
                    return answer
                if on_text:
                    on_text(piece)

    def stream(self, question: str, max_new_tokens: int | None = None) -> _Stream:
        """The answer's text piece by piece; the generator's return value is the ``Answer``.

        Any other call on the session, ``cancel`` aside, ends an answer that was left half way, as ``close`` of the
        generator does; what was said until then counts as a turn.
        """
        self._ready()
        if max_new_tokens is not None and max_new_tokens < 1:
            raise UsageError(f"max_new_tokens {max_new_tokens} is not possible: at least 1 is needed.")
        cleaned = clean_utterance(Utterance(0, "", USER, question))
        if cleaned is None:
            raise UsageError("The question is empty. Ask something.")
        self._cancel.clear()
        self._answering = self._answer(cleaned.text, max_new_tokens or self._plan.tail)
        return self._answering

    def _answer(self, question: str, limit: int) -> _Stream:
        started = time.monotonic()
        unlogged, tokens, notes = self._fit(question)
        vector = self._embedder.embed_query(question)
        match = route(vector, Centroids.of(self._centroids()))
        queued = max(match.similarities) < self._bundle.manifest.routing.threshold
        if queued and question not in {each.question for each in self._store.queued()}:
            self._store.queue_episode(question, vector)
        try:
            thread, opening = self._thread_for(match.episode, tokens, self._recalled(vector))
            logits = self._read_opening(thread, opening)
        except Cancelled:
            return Answer("", match.episode, match.similarities, "cancelled", [], 0.0, 0.0, queued, notes)
        ready, first, rate = time.monotonic(), 0.0, 0.0
        text, produced = AnswerText(self._tokenizer.stream_decoder()), list[int]()
        try:
            for token in decode(self._model, thread, logits, frozenset(self._template.stop_ids), limit, self._cancel.is_set):
                first = first or time.monotonic() - started
                produced.append(token)
                if piece := text.push(token):
                    yield piece
            if piece := text.flush():
                yield piece
            rate = len(produced) / max(time.monotonic() - ready, 1e-9)
        finally:
            # Also when the caller left half way or the engine failed: these tokens are in the tail.
            thread.turns.append((unlogged, text.text))
            self._remember(thread.turns, thread.since)
        return Answer(text.text, match.episode, match.similarities, thread.stop_reason, produced, rate, first, queued, notes)

    def _fit(self, question: str) -> tuple[str, list[int], list[str]]:
        """What the log still lacks of the question, the tokens to ask, and notes; see design section "Thread"."""
        tokens, longest = self._tokenizer.encode(question), self._plan.tail // 2
        if len(tokens) <= longest:
            return question, tokens, []
        self._end_thread()  # its turns come first in the log
        self._log_spoken([(USER, question)], self._now())
        return "", tokens[-longest:], ["The question is longer than half the tail: it is in the log, and its end was asked."]

    def _read_opening(self, thread: Thread, opening: list[int]) -> F32:
        used = thread.tail.used
        try:
            return self._model.read(thread.sealed, thread.tail, opening, self._cancel.is_set)
        except BaseException:
            thread.tail.used = used  # half a question must not stay in front of the next one
            raise

    def _thread_for(self, episode: int, question: list[int], recalled: list[int]) -> tuple[Thread, list[int]]:
        """The running thread where the question fits into it, else a new one, and the tokens that open the turn in it.

        The finished turns of a thread that ends go to the log.
        """
        thread, capacity = self._thread, self._plan.tail
        if thread is not None:
            opening = thread.opening(self._template, question, recalled)
            if thread.episode == episode and thread.has_room(len(opening), capacity):
                return thread, opening
            self._end_thread()
        sealed = self._reader().sealed(episode)
        thread = self._thread = Thread(episode, sealed, Tail.empty(self._model.shape, self._plan), since=self._now())
        opening = thread.opening(self._template, question, recalled)
        if not thread.has_room(len(opening), capacity):  # a long question is worth more than what is recalled for it
            opening = thread.opening(self._template, question, [])
        return thread, opening

    def _recalled(self, vector: F32) -> list[int]:
        """Tokens of the segments nearest to the question, in order of time, R/4 in all, each cut to its share of them."""
        if not self._recall:
            return []
        self._embed_segments()
        nearest = nearest_segments(vector, np.stack(self._vectors), self._recall)
        return patched_prompt([self._segments[i].text for i in nearest], self._tokenizer.encode, max(self._plan.tail // 4, 1))

    def cancel(self) -> None:
        """Stop the answer or the reading under way, from any thread, at the next token or block."""
        self._cancel.set()

    # The log.

    def append(self, speaker: str, text: str, date: str | None = None) -> bool:
        """Add one utterance to the log; False when nothing is left of its text. Durable when it returns.

        A new ``date`` line opens a new session; None goes on in the last one.
        """
        self._ready()
        said = clean_utterance(Utterance(0, date or "", speaker, text))
        if said is None:
            return False
        self._end_thread()  # its turns were said before
        log = self._store.utterances()
        last = log[-1] if log else said
        if date is None:
            utterance = dataclasses.replace(said, session=last.session, date=last.date)
        else:
            utterance = dataclasses.replace(said, session=last.session + (said.date != last.date))
        self._store.append([utterance])
        self._stream.append(utterance)
        return True

    def forget(self, first: int, last: int) -> None:
        """Delete the utterances ``first`` to ``last`` (counted from 0, both included) and rebuild what saw them.

        Episodes are clustered anew and read the remaining log lazily. Raises ``UsageError`` for a range outside the log.
        """
        self._ready()
        self._end_thread()
        log = self._store.utterances()
        if not 0 <= first <= last < len(log):
            raise UsageError(f"Utterances {first} to {last} cannot be forgotten: the log has 0 to {len(log) - 1}.")
        remaining = [*log[:first], *log[last + 1 :]]
        if not remaining:
            raise UsageError("Nothing would be left of the log. Use wipe to delete the whole store.")
        shared = None
        with contextlib.suppress(StoreError):  # a damaged one is read anew
            shared = self._store.shared()
        untouched = shared is not None and shared.n_seen <= self._stream.start_of(first)
        with self._store.transaction():
            self._store.replace_log(remaining, keep_shared=untouched)
            self._segments, self._vectors = [], []
            cluster_store(self._store, self._embedder, self._tokenizer.encode, self._plan, keep_shared=untouched)
        self._load_stream()

    def wipe(self) -> None:
        """Delete the whole store. The session is closed afterwards."""
        self._ready()
        self._store.wipe()
        self._thread = None
        self.close()

    def catch_up(self) -> None:
        """Bring every episode up to date and build the queued ones; what a phone does in the background.

        Raises ``Cancelled`` between two blocks after ``cancel``; what was read is kept.
        """
        self._ready()
        self._cancel.clear()
        self._end_thread()
        self._centroids()
        while queued := self._store.queued():
            question = queued[0].question
            vector = queued[0].vector if queued[0].vector is not None else self._embedder.embed_query(question)
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
    def engine_name(self) -> str:
        """Name of the engine that answers."""
        return self._engine.name

    @property
    def store_folder(self) -> Path:
        """Where the store lies."""
        return self._store.folder

    def unload(self) -> None:
        """Give back memory: weights and caches are mapped again on the next question."""
        self._ready()
        self._end_thread()
        self._segments, self._vectors = [], []
        self._engine.close()

    def close(self) -> None:
        """Put the thread into the log and release the store. Closing twice does nothing."""
        if self._closed:
            return
        try:
            self._ready()
            self._end_thread()
        finally:
            self._closed = True
            self._engine.close()
            self._resources.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside.

    def _ready(self) -> None:
        """Refuse a closed session, and end an answer that its caller left half way."""
        if self._closed:
            raise StoreError(f"The session over {self._store.folder} is closed. Open a new one with Bundle.session.")
        if self._answering is not None:
            try:
                self._answering.close()
            except ValueError:
                raise UsageError("This session is still answering. Wait for the answer, or cancel it first.") from None
            self._answering = None

    def _load_stream(self) -> None:
        self._stream = TokenStream(self._template.prefix, self._tokenizer.encode, self._store.speakers, self._store.utterances())

    def _reader(self) -> EpisodeReader:
        return EpisodeReader(self._model, self._store, self._stream, self._cancel.is_set, lambda *args: self.progress(*args))

    def _centroids(self) -> F32:
        """The episodes' centroids; the log is clustered where it never was, or where they are damaged."""
        with contextlib.suppress(StoreError):
            centroids = self._store.centroids()
            if centroids is not None and len(centroids) == len(self._store.episodes()):
                return centroids
        self._end_thread()  # episodes get other numbers
        cluster_store(self._store, self._embedder, self._tokenizer.encode, self._plan)
        centroids = self._store.centroids()
        assert centroids is not None
        return centroids

    def _embed_segments(self) -> None:
        """Segment vectors follow the log: only new and changed segments are embedded."""
        segments, changed = extend_segments(self._segments, self._store.utterances())
        vectors = list(self._vectors)
        for index in changed:
            vectors[index : index + 1] = [self._embedder.embed_document(segments[index].text)]
        self._segments, self._vectors = segments, vectors

    def _remember(self, turns: list[tuple[str, str]], since: str) -> None:
        """Keep finished turns where a kill cannot lose them, until they reach the log."""
        pending = {"since": since, "turns": [list(turn) for turn in turns]} if turns else None
        self._store.set_settings({**self._store.settings(), _PENDING: pending})

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._log_turns(self._thread.turns, self._thread.since)
            self._thread = None

    def _log_turns(self, turns: list[tuple[str, str]], since: str) -> None:
        if turns:
            self._log_spoken([said for turn in turns for said in zip((USER, ASSISTANT), turn, strict=True)], since)

    def _log_spoken(self, spoken: list[tuple[str, str]], date: str) -> None:
        """Add (speaker, text) to the log, in a session of their own for every day, and drop the pending turns with it."""
        log = self._store.utterances()
        if not log or log[-1].session != self._own_session or _day(date) != _day(self._own_date):
            self._own_session, self._own_date = log[-1].session + 1 if log else 0, date
        utterances = [Utterance(self._own_session, self._own_date, speaker, text) for speaker, text in spoken]
        utterances = [u for u in map(clean_utterance, utterances) if u is not None]
        with self._store.transaction():
            self._store.append(utterances)
            self._remember([], "")
        for utterance in utterances:
            self._stream.append(utterance)

    @staticmethod
    def _now() -> str:
        now = datetime.now()
        return f"{now:%I:%M %p}".lstrip("0").lower() + f" on {now.day} {now:%B, %Y}"


def _day(date: str) -> str:
    return date.partition(" on ")[2]
