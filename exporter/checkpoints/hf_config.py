"""The decoder's configuration from a Hugging Face config.json, as transformers writes it."""

from __future__ import annotations

import dataclasses
from typing import Any

from exporter.checkpoints.json_file import JsonObject
from exporter.models.architectures import ARCHITECTURES, refusal
from exporter.models.config import DecoderConfig, Llama3Scaling
from runtime_py.errors import WorkError


def decoder_config(file: JsonObject) -> DecoderConfig:
    """Read and check it. Raises ``WorkError`` naming the file and the feature or value that cannot be used."""
    architecture = file.data.get("model_type")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise WorkError(f"{file.path}: model_type is {architecture!r}: {refusal(architecture)}")
    heads, hidden = file.count("num_attention_heads"), file.count("hidden_size")
    context = file.count("max_position_embeddings")
    if file.data.get("quantization_config"):
        raise WorkError(f"{file.path}: the checkpoint is quantised; take the one that is not. This exporter quantises by itself.")
    _refuse_features(file, context)
    theta, scaling = _rope(file)
    head_dim = file.count("head_dim", 128 if architecture == "qwen3" else hidden // heads)  # transformers' own defaults
    return DecoderConfig(
        architecture=architecture,
        n_layers=file.count("num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=file.count("num_key_value_heads", heads),
        head_dim=head_dim,
        hidden=hidden,
        ffn=file.count("intermediate_size"),
        vocab_size=file.count("vocab_size"),
        context=context,
        rope_theta=theta,
        norm_eps=file.real("rms_norm_eps", 1e-6),
        # Only what the file says: a head that is absent without being tied is in a shard that was lost.
        tied=bool(file.data.get("tie_word_embeddings", False)),
        rope_scaling=scaling,
    )


def _refuse_features(file: JsonObject, context: int) -> None:
    data = file.data
    for feature, found in {
        # Qwen 2 has its q, k and v biases without this flag; with it, there would be one on the output as well.
        "attention biases on the output": data.get("attention_bias", False),
        "MLP biases": data.get("mlp_bias", False),
        f"activation {data.get('hidden_act')!r}": data.get("hidden_act", "silu") != "silu",
        "a sliding window": _slides(data, context),
        "partial rotary embeddings": data.get("partial_rotary_factor") not in (None, 1, 1.0),
        "soft-capped logits": data.get("attn_logit_softcapping") or data.get("final_logit_softcapping"),
        "a mixture of experts": data.get("num_local_experts") or data.get("num_experts"),
    }.items():
        if found:
            raise WorkError(
                f"{file.path}: {feature} is not supported. Supported are {', '.join(ARCHITECTURES)} with SiLU, whole rotary "
                "embeddings and full attention; `python -m exporter models` lists presets of that kind."
            )


def _slides(data: dict[str, Any], context: int) -> bool:
    """Whether some layer attends to a window shorter than the context."""
    if any(kind != "full_attention" for kind in data.get("layer_types") or []):
        return True
    window = data.get("sliding_window")
    if not data.get("use_sliding_window", True) or window is None:  # Qwen names a window that it does not use
        return False
    return not isinstance(window, int) or window < context


def _rope(file: JsonObject) -> tuple[float, Llama3Scaling | None]:
    """The base of the frequencies, and how they are stretched."""
    found = file.data.get("rope_parameters") or file.data.get("rope_scaling") or {}
    kind = found.get("rope_type", found.get("type", "default")) if isinstance(found, dict) else found
    if kind not in ("default", "llama3"):
        raise WorkError(
            f"{file.path}: RoPE scaling {kind!r} is not supported. Supported are none and 'llama3'; a model that offers "
            f"{kind!r} for longer contexts runs without it inside the context that it was trained on: remove the entry."
        )
    rope = dataclasses.replace(file, data=found)
    theta = rope.real("rope_theta", file.real("rope_theta", 10000.0))
    if kind == "default":
        return theta, None
    low, high = rope.real("low_freq_factor"), rope.real("high_freq_factor")
    if high <= low:
        raise WorkError(f"{file.path}: high_freq_factor is {high:g}; more than low_freq_factor, {low:g}, is expected.")
    return theta, Llama3Scaling(rope.real("factor"), low, high, rope.count("original_max_position_embeddings"))
