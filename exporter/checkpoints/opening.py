"""Opens a located checkpoint, whatever kind it is, and compares it with its preset."""

from __future__ import annotations

import dataclasses

from exporter.checkpoints.base import Checkpoint
from exporter.checkpoints.gguf_file import GGUFCheckpoint
from exporter.checkpoints.hf_folder import HFCheckpoint
from exporter.checkpoints.locating import Located
from exporter.checkpoints.random_weights import RandomCheckpoint
from exporter.models.config import DecoderConfig
from exporter.models.registry import DECODERS
from runtime_py.errors import WorkError

_SHAPES = ("n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden", "ffn", "vocab_size", "tied")


def open_decoder(located: Located) -> Checkpoint:
    """Raises ``WorkError`` for a checkpoint that cannot be used, or whose shapes are not those of its preset."""
    if located.path is None:
        assert located.preset is not None
        return RandomCheckpoint(located.preset)
    checkpoint: Checkpoint
    if located.path.is_dir():
        licence = DECODERS[located.preset].licence if located.preset else "see the model card"
        checkpoint = HFCheckpoint(located.path, located.model, located.revision, licence)
    else:
        checkpoint = GGUFCheckpoint(located.path, located.model)
    if located.preset is not None:
        _check_shapes(located.preset, checkpoint.config, located)
    return checkpoint


def _check_shapes(preset: str, found: DecoderConfig, located: Located) -> None:
    expected = DECODERS[preset].config
    # A GGUF file cannot tell mistral from llama, and no preset needs it to.
    pairs = {"architecture": (found.spec.gguf, expected.spec.gguf)} | {
        name: (getattr(found, name), getattr(expected, name)) for name in _SHAPES
    }
    wrong = [f"{name} {has} instead of {wanted}" for name, (has, wanted) in pairs.items() if has != wanted]
    if wrong:
        near = [name for name, each in DECODERS.items() if _shapes(each.config) == _shapes(found)]
        hint = f" It has the shapes of {near[0]}." if near else ""
        raise WorkError(
            f"{located.path} is not {preset} ({DECODERS[preset].repo_id}): {', '.join(wrong)}.{hint} "
            "Name the right checkpoint, or give the folder itself to --model."
        )


def _shapes(config: DecoderConfig) -> dict[str, object]:
    return {name: value for name, value in dataclasses.asdict(config).items() if name in _SHAPES}
