"""Where a model's weights are: a preset's package, the Hugging Face cache or hub, a folder, a GGUF file, or nowhere (random).

Nothing here imports PyTorch, so that a model that is not there is reported at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from exporter.checkpoints.hub import find_snapshot
from exporter.checkpoints.hub_model import REPO_ID, HubModel
from exporter.models.registry import DECODERS, packaged_path, preset_of
from runtime_py.errors import UsageError, WorkError

WEIGHTS_SOURCES = ("checkpoint", "random")


@dataclass(frozen=True)
class ModelRequest:
    """What a user asks for. ``model``: preset, repository, folder or .gguf file; ``checkpoint``: where its weights are."""

    model: str
    checkpoint: Path | None = None
    revision: str | None = None
    offline: bool = False
    weights_source: str = "checkpoint"


@dataclass(frozen=True)
class Located:
    """A checkpoint that exists. ``path`` is a folder or a GGUF file, None for random weights; ``revision`` a commit or ""."""

    model: str
    preset: str | None
    path: Path | None
    revision: str = ""


def locate_decoder(request: ModelRequest, note: Callable[[str], None] = lambda _: None) -> Located:
    """Find the weights, downloading them where needed and allowed.

    Raises ``UsageError`` for an unknown name or flags that exclude each other, ``WorkError`` with the remedy for weights
    that are not there.
    """
    preset = preset_of(request.model)
    name = DECODERS[preset].repo_id if preset else request.model
    if request.weights_source == "random":
        return _random(request, preset)
    if request.checkpoint is not None:
        return Located(name if preset else request.checkpoint.resolve().name, preset, _existing(request.checkpoint))
    path = Path(request.model).expanduser()
    if preset is None and (path.exists() or not REPO_ID.fullmatch(request.model)):
        if not path.exists():
            raise UsageError(_unknown(request.model))
        _refuse_revision(request, f"{path} is a path")
        return Located(path.resolve().name, None, path)
    packaged = DECODERS[preset].packaged if preset else None
    if packaged is not None and request.revision is None:
        return Located(name, preset, packaged_path(packaged))
    hub = HubModel(name, DECODERS[preset].licence, DECODERS[preset].gated, True) if preset else HubModel(name, "see its page")
    found = find_snapshot(hub, request.revision, request.offline, note)
    return Located(name, preset, found.folder, found.revision)


def _existing(path: Path) -> Path:
    if not path.exists():
        raise WorkError(f"{path} does not exist. Name a .gguf file or a Hugging Face folder with --checkpoint.")
    return path


def _refuse_revision(request: ModelRequest, why: str) -> None:
    if request.revision is not None:
        raise UsageError(f"--revision {request.revision} needs a model of the Hugging Face hub; {why}.")


def _random(request: ModelRequest, preset: str | None) -> Located:
    if preset is None:
        raise UsageError(
            f"--weights-source random needs a preset, whose shapes are known; {request.model!r} is none. "
            f"Presets: {', '.join(DECODERS)}."
        )
    if request.checkpoint is not None:
        raise UsageError("--checkpoint and --weights-source random exclude each other. Leave one of them out.")
    _refuse_revision(request, "random weights have none")
    return Located(DECODERS[preset].repo_id, preset, None)


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), DECODERS, 1, 0.3)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"Unknown model {name!r}: it is no preset and no file or folder of that name exists.{hint} "
        f"Presets: {', '.join(DECODERS)}. Or name a repository like org/name, a folder with config.json and .safetensors "
        "files, or a .gguf file."
    )
