"""A bundle on disk: integrity, manifest, and the way to a session."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runtime_py.embedder import Embedder
from runtime_py.engines import open_engine
from runtime_py.engines.base import Engine
from runtime_py.episodes.history import Utterance, clean_text, clean_utterance
from runtime_py.errors import BundleError, WorkError
from runtime_py.integrity import bundle_id, check_sums
from runtime_py.manifest import MAX_EPISODES, Manifest, parse_dataclass
from runtime_py.tokenizer import SentenceTokenizer, TextTokenizer

if TYPE_CHECKING:
    from runtime_py.session import Session

EPISODES_FILE = "episodes/episodes.json"


@dataclass(frozen=True)
class SegmentRecord:
    """One segment of the history the bundle was built with: utterances ``first`` to ``last`` and its episode."""

    first: int
    last: int
    part: int
    episode: int


@dataclass(frozen=True)
class EpisodeRecord:
    """One episode: its files inside episodes/, tokens read, patched prompt (token ids), medoid segments."""

    cache: str
    sealed: str
    n_seen: int
    prompt: list[int]
    medoids: list[int]


@dataclass(frozen=True)
class EpisodesFile:
    """episodes/episodes.json: the history the bundle was built with, and what was made of it."""

    speakers: list[str]
    utterances: list[Utterance]
    segments: list[SegmentRecord]
    episodes: list[EpisodeRecord]


class Bundle:
    """An opened, checked bundle. It is read-only; sessions write into stores."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._text: TextTokenizer | None = None
        self._sentence: SentenceTokenizer | None = None

    @property
    def id(self) -> str:
        """The bundle's identity: the SHA-256 of its SHA256SUMS."""
        return bundle_id(self.path)

    @staticmethod
    def open(path: Path | str, check: bool = True) -> Bundle:
        """Open the bundle in folder ``path``; ``check`` compares every file with SHA256SUMS and reads episodes.json.

        Raises ``BundleError`` naming the file that is missing, changed, or of a version this runtime cannot read, and the
        field that is not what it must be.
        """
        path = Path(path)
        if not path.is_dir():
            raise BundleError(f"{path} is not a folder. Name a bundle built with `python -m exporter build`.")
        manifest_path = path / "manifest.json"
        if check and manifest_path.exists() and (problems := check_sums(path)):
            shown = " ".join(problems[:5]) + (f" And {len(problems) - 5} more." if len(problems) > 5 else "")
            raise BundleError(f"{path} is damaged: {shown} Copy the bundle again, or build it anew.")
        bundle = Bundle(path, Manifest.read(manifest_path))
        for name, target in bundle.manifest.targets.items():
            for graph, file in target.graphs.items():
                if not (path / file).exists():
                    raise BundleError(f"{manifest_path}: targets.{name}.graphs.{graph} names {file}, which is missing.")
        if check:
            bundle.episodes_file()
        return bundle

    def text_tokenizer(self) -> TextTokenizer:
        """The language model's tokenizer, built once: that takes longer than opening a session does otherwise."""
        if self._text is None:
            path = self.path / "tokenizer" / "tokenizer.json"
            self._text = TextTokenizer(path, self.manifest.template.stop_ids)
        return self._text

    def sentence_tokenizer(self) -> SentenceTokenizer:
        """The sentence encoder's tokenizer, built once."""
        if self._sentence is None:
            info = self.manifest.embedder
            path = self.path / "tokenizer" / "embedder.json"
            self._sentence = SentenceTokenizer(path, info.prefix_ids, info.suffix_ids, info.pad_id, info.length)
        return self._sentence

    def embedder(self, engine: Engine) -> Embedder:
        """The sentence encoder on ``engine``, with the bundle's tokenizer and prompts."""
        info = self.manifest.embedder
        return Embedder(engine, self.sentence_tokenizer(), info.query_prompt, info.document_prompt)

    def episodes_file(self) -> EpisodesFile:
        """The history the bundle was built with. Raises ``BundleError`` naming the field that cannot be right."""
        path = self.path / EPISODES_FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise BundleError(f"{path} cannot be read ({error}). Copy the bundle again, or build it anew.") from None
        history = parse_dataclass(EpisodesFile, data, str(path))
        if problem := _history_problem(history) or _episodes_problem(history, self.manifest):
            raise BundleError(f"{path}: {problem} Copy the bundle again, or build it anew.")
        return history

    def engine(self, name: str = "onnx", threads: int = 0) -> Engine:
        """An engine over the bundle's files; 0 threads lets the engine choose."""
        return open_engine(name, self.path, self.manifest, threads)

    def session(
        self,
        engine: str | Engine = "onnx",
        store: Path | str | None = None,
        recall: int = 0,
        threads: int = 0,
    ) -> Session:
        """Open a session. Without ``store`` it lives in a temporary folder and is forgotten when closed.

        A store that does not exist yet begins with the history of the bundle. ``recall`` is the number of segments of the
        log that are read again before each question.
        """
        from runtime_py.session import Session

        opened = self.engine(engine, threads) if isinstance(engine, str) else engine
        return Session.open(self, opened, Path(store) if store is not None else None, recall)


def _history_problem(history: EpisodesFile) -> str | None:
    """Utterances are as ``clean_history`` leaves them: one line each, for a line break would start a line of its own."""
    if not history.utterances:
        return "utterances is empty."
    for i, speaker in enumerate(history.speakers):
        if not speaker or clean_text(speaker) != speaker:
            return f"speakers[{i}] is {speaker!r}; one line of text is expected."
    previous = 0
    for i, utterance in enumerate(history.utterances):
        try:
            cleaned = clean_utterance(utterance)
        except WorkError as error:
            return f"utterances[{i}]: {error}"
        if cleaned != utterance:
            return f"utterances[{i}] is not one line of text with speaker and date."
        if not previous <= utterance.session < 1 << 31:
            return f"utterances[{i}].session is {utterance.session}; {previous} or more is expected."
        previous = utterance.session
    return None


def _episodes_problem(history: EpisodesFile, manifest: Manifest) -> str | None:
    count, n_segments = len(history.episodes), len(history.segments)
    if not 1 <= count <= MAX_EPISODES:
        return f"episodes has {count} entries; allowed are 1 to {MAX_EPISODES}."
    for i, segment in enumerate(history.segments):
        if not 0 <= segment.first <= segment.last < len(history.utterances) or not 0 <= segment.episode < count:
            return f"segments[{i}] names utterances or an episode that are not there."
    for i, record in enumerate(history.episodes):
        names = (f"episode-{i}.safetensors", f"episode-{i}.sealed.safetensors")
        if (record.cache, record.sealed) != names:
            return f"episodes[{i}] names {record.cache!r} and {record.sealed!r}; {names[0]} and {names[1]} are expected."
        if not 1 <= len(record.prompt) <= manifest.plan.prompt:
            return f"episodes[{i}].prompt has {len(record.prompt)} tokens; allowed are 1 to {manifest.plan.prompt}."
        if not all(0 <= token < manifest.shape.vocab_size for token in record.prompt):
            return f"episodes[{i}].prompt has a token outside the vocabulary of {manifest.shape.vocab_size}."
        if not all(0 <= medoid < n_segments for medoid in record.medoids):
            return f"episodes[{i}].medoids names a segment that is not there; there are {n_segments}."
    return None
