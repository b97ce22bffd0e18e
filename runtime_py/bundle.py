"""A bundle on disk: integrity, manifest, and the way to a session."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runtime_py.engines import open_engine
from runtime_py.engines.base import Engine
from runtime_py.episodes.history import Utterance
from runtime_py.errors import BundleError
from runtime_py.integrity import bundle_id, check_sums
from runtime_py.manifest import Manifest, parse_dataclass
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

    @property
    def id(self) -> str:
        """The bundle's identity: the SHA-256 of its SHA256SUMS."""
        return bundle_id(self.path)

    @staticmethod
    def open(path: Path | str, check: bool = True) -> Bundle:
        """Open the bundle in folder ``path``; ``check`` compares every file with SHA256SUMS.

        Raises ``BundleError`` naming the file that is missing, changed, or of a version this runtime cannot read.
        """
        path = Path(path)
        if not path.is_dir():
            raise BundleError(f"{path} is not a folder. Name a bundle built with `python -m exporter build`.")
        manifest_path = path / "manifest.json"
        if check and manifest_path.exists() and (problems := check_sums(path)):
            shown = " ".join(problems[:5]) + (f" And {len(problems) - 5} more." if len(problems) > 5 else "")
            raise BundleError(f"{path} is damaged: {shown} Copy the bundle again, or build it anew.")
        return Bundle(path, Manifest.read(manifest_path))

    def text_tokenizer(self) -> TextTokenizer:
        """The language model's tokenizer."""
        return TextTokenizer(self.path / "tokenizer" / "tokenizer.json", self.manifest.template.stop_ids)

    def sentence_tokenizer(self) -> SentenceTokenizer:
        """The sentence encoder's tokenizer."""
        info = self.manifest.embedder
        path = self.path / "tokenizer" / "embedder.json"
        return SentenceTokenizer(path, info.cls_id, info.sep_id, info.pad_id, info.length)

    def episodes_file(self) -> EpisodesFile:
        """The history the bundle was built with. Raises ``BundleError`` when the file is damaged."""
        path = self.path / EPISODES_FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise BundleError(f"{path} cannot be read ({error}). Copy the bundle again, or build it anew.") from None
        return parse_dataclass(EpisodesFile, data, str(path))

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
