"""Tiny checkpoints with real tokenizers, and the command line run on them: a whole build takes seconds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exporter.models.encoder_registry import ENCODERS
from exporter.models.registry import DECODERS, packaged_path

ROOT = Path(__file__).resolve().parents[1]
# Two layers that evict several times over a history of some hundred tokens.
PLAN = {"budget": 64, "block": 32, "prompt": 32, "tail": 160, "query": 8, "embed-length": 64, "episodes": 2}


@dataclass(frozen=True)
class Tiny:
    """Folders of a random llama and of a random sentence encoder, and a short history."""

    decoder: Path
    encoder: Path
    history: Path

    def models(self) -> list[str]:
        """The flags that name both checkpoints."""
        return ["--model", str(self.decoder), "--embedder", str(self.encoder)]

    def build(self, out: Path, **changes: object) -> list[str]:
        """Arguments of a small build for one target; ``episodes=4`` replaces a flag, ``targets=None`` leaves one out."""
        flags: dict[str, object] = {**PLAN, "targets": "onnx", "history": self.history, "out": out}
        flags |= {name.replace("_", "-"): value for name, value in changes.items()}
        named = [part for name, value in flags.items() if value is not None for part in (f"--{name}", str(value))]
        models = [] if "model" in flags else ["--model", str(self.decoder)]
        return ["build", *models, *([] if "embedder" in flags else ["--embedder", str(self.encoder)]), *named]


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


Run = Callable[..., Ran]


def save_decoder(folder: Path, seed: int = 0) -> Path:
    """A random llama of two layers with the tokenizer and the chat template of the default model."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    preset = packaged_path(DECODERS["smollm2-135m"].packaged)
    tokenizer: Any = AutoTokenizer.from_pretrained(preset.parent, gguf_file=preset.name, local_files_only=True)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_encoder(folder: Path) -> Path:
    """A random sentence encoder of one layer with the tokenizer of the default one."""
    from transformers import BertConfig, BertModel

    shutil.copytree(packaged_path(ENCODERS["minilm-l6"].packaged), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=30522, initializer_range=0.3, **sizes)).save_pretrained(folder)
    return folder


def save_history(path: Path, utterances: int = 24, sessions: int = 2) -> Path:
    """A plain history of two speakers about a few topics."""
    topics = ("the boat on the lake", "bread and sourdough", "the cat at the vet", "a train to Busan")
    said = [
        {"speaker": ("Ada", "Ben")[i % 2], "text": f"Number {i}: I thought about {topics[i // 3 % len(topics)]}, did you?"}
        for i in range(utterances)
    ]
    return save_sessions(path, said, sessions)


def save_sessions(path: Path, said: list[dict[str, str]], sessions: int = 1) -> Path:
    """A plain history of these utterances, cut into ``sessions`` of equal length."""
    size = -(-len(said) // sessions)
    parts = [{"date": f"{n + 1} May 2024", "utterances": said[n * size : (n + 1) * size]} for n in range(sessions)]
    path.write_text(json.dumps({"speakers": ["Ada", "Ben"], "sessions": parts}), encoding="utf-8")
    return path


def start(*words: object, prefix: tuple[str, ...] = (), **options: Any) -> subprocess.Popen[str]:
    """A command in a process of its own, with its standard error in a pipe."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*prefix, sys.executable, "-m", "exporter", *map(str, words)]
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    return subprocess.Popen(command, **(settings | options))


def finish(process: subprocess.Popen[str], seconds: float = 300) -> Ran:
    """Wait for its end."""
    out, err = process.communicate(timeout=seconds)
    return Ran(process.returncode, out or "", err or "")


def names(folder: Path) -> set[str]:
    """Names in a folder, hidden ones too."""
    return {entry.name for entry in folder.iterdir()}
