"""Tiny random checkpoints, written by transformers itself: every architecture can be tried without its real weights.

``python -m exporter.checkpoints.tiny_folder ARCH DIR``; the tokenizer and chat template are SmolLM2's.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exporter.models.architectures import ARCHITECTURES
from exporter.models.registry import DECODERS, packaged_path
from runtime_py.errors import EpiCacheError, UsageError

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,  # large enough for attention to be far from uniform
}
# What is particular to each: stretched RoPE, a head of another width than hidden / heads, tied and untied heads.
_OWN: dict[str, dict[str, Any]] = {
    "llama": {
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    },
    "mistral": {"tie_word_embeddings": False, "sliding_window": None, "head_dim": 16},
    "qwen2": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    "qwen3": {
        "tie_word_embeddings": False,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}


def write_tiny_checkpoint(architecture: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a random checkpoint of two layers into ``folder``, which must be new or empty; ``changes`` go to its config.

    Raises ``UsageError`` for an unknown architecture or a folder with something in it.
    """
    if architecture not in ARCHITECTURES:
        raise UsageError(f"Unknown architecture {architecture!r}: allowed are {', '.join(ARCHITECTURES)}.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists already and is not an empty folder. Name another one.")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    preset = packaged_path(DECODERS["smollm2-135m"].packaged)
    tokenizer: Any = AutoTokenizer.from_pretrained(preset.parent, gguf_file=preset.name, local_files_only=True)
    ids = {"vocab_size": len(tokenizer), "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(architecture, **(_SIZES | ids | {"pad_token_id": None} | _OWN[architecture] | changes))
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases begin as ones and zeros, which would hide a mistake
                parameter.add_(torch.randn_like(parameter) * (0.2 if "norm" in name else 0.5))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, write, say what to do next; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make_tiny_checkpoint", description="Write a tiny random Hugging Face checkpoint.")
    parser.add_argument("architecture", choices=tuple(ARCHITECTURES), metavar="ARCH", help=", ".join(ARCHITECTURES))
    parser.add_argument("folder", type=Path, metavar="DIR", help="new folder")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # of optional parts that libraries miss
    warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        write_tiny_checkpoint(options.architecture, options.folder)
    except EpiCacheError as error:
        print(f"failed: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"failed: {error}. Check path, permissions and free space.", file=sys.stderr)
        return 1
    print(f"{options.folder}: a random {options.architecture} of two layers. Next:")
    print(f"  python -m exporter build --model {options.folder} --budget 256")
    return 0


if __name__ == "__main__":
    sys.exit(main())
