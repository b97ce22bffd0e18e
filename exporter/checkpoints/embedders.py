"""Opens and loads a sentence encoder, whatever it is named by."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from exporter.checkpoints.encoder_folder import EncoderFolder
from exporter.checkpoints.hub import find_snapshot
from exporter.checkpoints.hub_model import REPO_ID, HubModel
from exporter.models.config import EncoderConfig
from exporter.models.decoder_encoder import SentenceEncoder, load_decoder_encoder
from exporter.models.encoder import load_encoder
from exporter.models.encoder_registry import ENCODERS
from exporter.models.registry import packaged_path
from runtime_py.errors import UsageError


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
    if preset is None and not REPO_ID.fullmatch(name):
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
