"""GGUF checkpoints (format: ggml-org/ggml docs/gguf.md), dequantised tensor by tensor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from torch import Tensor

from exporter.checkpoints.base import sha256_of
from exporter.checkpoints.gguf_tokenizer import tokenizer_json
from exporter.models.architectures import ARCHITECTURES, refusal
from exporter.models.config import DecoderConfig, DivisorScaling
from runtime_py.errors import WorkError
from runtime_py.manifest import Source

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROPE_DIVISORS = "rope_freqs.weight"
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class GGUFCheckpoint:
    """One GGUF file. Raises ``WorkError`` when it is missing, damaged or of another architecture."""

    def __init__(self, path: Path, model: str) -> None:
        self.path, self.model = path, model
        if not path.is_file():
            raise WorkError(f"{path} does not exist. Name a .gguf file, a Hugging Face folder, or a preset.")
        try:
            self._reader = GGUFReader(path)
        except Exception as error:  # the reader raises whatever its numpy slices raise on a damaged file
            why = str(error) or type(error).__name__
            raise WorkError(f"{path} is no readable GGUF file ({why}); it may be cut short. Copy it again.") from error
        self._tensors = {t.name: t for t in self._reader.tensors}
        self.config = self._read_config()

    def _field(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise WorkError(f"{self.path} has no field {key!r}; it is incomplete or of another architecture.")
        return default

    def _read_config(self) -> DecoderConfig:
        name = str(self._field("general.architecture"))
        known = {each.gguf: each for each in reversed(ARCHITECTURES.values())}  # mistral files say llama
        if name not in known:
            raise WorkError(f"{self.path}: {refusal(name)}")
        if int(self._field(f"{name}.expert_count", 0)):
            raise WorkError(f"{self.path} holds a mixture of experts, which is not supported. Take a dense model.")
        if self._reader.get_field(f"{name}.attention.sliding_window") is not None:
            raise WorkError(f"{self.path} uses a sliding window, which is not supported. Take a model with full attention.")
        if "token_embd.weight" not in self._tensors:
            raise WorkError(f"{self.path} has no tensor 'token_embd.weight'; it is incomplete.")
        heads = int(self._field(f"{name}.attention.head_count"))
        hidden = int(self._field(f"{name}.embedding_length"))
        head_dim = int(self._field(f"{name}.attention.key_length", hidden // heads))
        return DecoderConfig(
            architecture=known[name].name,
            n_layers=int(self._field(f"{name}.block_count")),
            n_heads=heads,
            n_kv_heads=int(self._field(f"{name}.attention.head_count_kv", heads)),
            head_dim=head_dim,
            hidden=hidden,
            ffn=int(self._field(f"{name}.feed_forward_length")),
            vocab_size=int(self._tensors["token_embd.weight"].shape[1]),
            context=int(self._field(f"{name}.context_length")),
            rope_theta=float(self._field(f"{name}.rope.freq_base", 10000.0)),
            norm_eps=float(self._field(f"{name}.attention.layer_norm_rms_epsilon")),
            tied="output.weight" not in self._tensors,
            rope_scaling=self._rope_scaling(name, head_dim),
        )

    def _rope_scaling(self, name: str, head_dim: int) -> DivisorScaling | None:
        """Llama 3.1's stretched RoPE lies in the file as one divisor a frequency; other stretches are refused."""
        kind = str(self._field(f"{name}.rope.scaling.type", "none"))
        if int(self._field(f"{name}.rope.dimension_count", head_dim)) != head_dim:
            raise WorkError(f"{self.path} uses partial rotary embeddings, which are not supported.")
        if kind not in ("none", "") and float(self._field(f"{name}.rope.scaling.factor", 1.0)) != 1.0:
            raise WorkError(f"{self.path}: RoPE scaling {kind!r} is not supported; supported are none and Llama 3's.")
        if _ROPE_DIVISORS not in self._tensors:
            return None
        divisors = self._dequantized(_ROPE_DIVISORS).reshape(-1)
        if divisors.shape != (head_dim // 2,) or not (divisors > 0).all():
            raise WorkError(f"{self.path}: {_ROPE_DIVISORS} is no list of {head_dim // 2} positive numbers; it is damaged.")
        return DivisorScaling(tuple(float(d) for d in divisors))

    def tensor(self, name: str) -> Tensor:
        """See ``Checkpoint.tensor``. Llama GGUF files interleave the halves of q and k rows; this undoes it."""
        if _gguf_name(name) not in self._tensors:
            raise WorkError(f"{self.path} has no tensor {_gguf_name(name)!r} ({name}); it is incomplete.")
        values = self._dequantized(_gguf_name(name))
        if self.config.spec.interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = self.config.n_heads if "q_proj" in name else self.config.n_kv_heads
            values = _unpermute(values, heads)
        return torch.from_numpy(np.ascontiguousarray(values))

    def _dequantized(self, name: str) -> np.ndarray:
        """Values float32 of a tensor of the file, in row-major order."""
        found = self._tensors[name]
        try:
            values = np.array(dequantize(found.data, found.tensor_type), dtype=np.float32)
        except Exception as error:
            raise WorkError(f"{self.path}: tensor {name!r} cannot be dequantised ({error}).") from error
        return values.reshape(tuple(int(n) for n in reversed(found.shape)))

    def tokenizer_json(self) -> str:
        return tokenizer_json(self.path, self._field)

    def chat_template(self) -> str:
        return str(self._field("tokenizer.chat_template"))

    def special_tokens(self) -> dict[str, str]:
        tokens = self._field("tokenizer.ggml.tokens")
        ids = {kind: self._reader.get_field(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")}
        return {f"{kind}_token": str(tokens[int(f.contents())]) for kind, f in ids.items() if f is not None}

    def stop_ids(self) -> list[int]:
        """End of text, of a turn and of a message, as far as the file names them."""
        ids = {int(self._field("tokenizer.ggml.eos_token_id"))}
        fields = (self._reader.get_field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eot", "eom"))
        return sorted(ids | {int(found.contents()) for found in fields if found is not None})

    def source(self) -> Source:
        name = str(self._field("general.name", self.path.stem))
        licence = str(self._field("general.license", "unknown"))
        return Source(self.model, name, "gguf", self.path.name, sha256_of([self.path]), licence)


def _gguf_name(name: str) -> str:
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name):
        return f"blk.{match[1]}.{_NAMES.get(match[2], match[2])}.{match[3]}"
    stem = name.removesuffix(".weight")
    return f"{_TOP_NAMES.get(stem, stem)}.weight"


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """``[heads * D, in]`` from interleaved pairs (2i, 2i+1) to the half-split layout (i, i + D/2)."""
    dim = rows.shape[0] // heads
    return rows.reshape(heads, dim // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)
