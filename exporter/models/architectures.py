"""Decoder architectures: what sets one apart from plain Llama. A new one is one line here."""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """``name`` is Hugging Face's ``model_type``, ``gguf`` is GGUF's ``general.architecture``.

    ``qkv_bias``: biases on the q, k and v projections. ``qk_norm``: RMSNorm over each head's queries and keys before RoPE.
    ``interleaved``: llama.cpp stores the halves of q and k rows of this architecture interleaved.
    """

    name: str
    gguf: str
    qkv_bias: bool = False
    qk_norm: bool = False
    interleaved: bool = False


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("llama", "llama", interleaved=True),
        Architecture("mistral", "llama", interleaved=True),
        Architecture("qwen2", "qwen2", qkv_bias=True),
        Architecture("qwen3", "qwen3", qk_norm=True),
    )
}

_EXPERTS, _IMAGES, _MIXED = "a mixture of experts", "images or sound beside text", "layers that are no attention"
# What the types that people try most have that these graphs do not, and the nearest preset to take instead.
_KNOWN = {
    "mixtral": (_EXPERTS, "llama3.1-8b"),
    "qwen2_moe": (_EXPERTS, "qwen2.5-7b"),
    "qwen3_moe": (_EXPERTS, "qwen3-8b"),
    "deepseek_v3": (_EXPERTS, "qwen3-8b"),
    "gpt_oss": (_EXPERTS, "qwen3-8b"),
    "llama4": (_EXPERTS, "llama3.1-8b"),
    "granitemoe": (_EXPERTS, "qwen2.5-3b"),
    "mllama": (_IMAGES, "llama3.2-3b"),
    "llava": (_IMAGES, "llama3.1-8b"),
    "qwen2_vl": (_IMAGES, "qwen2.5-3b"),
    "qwen2_5_vl": (_IMAGES, "qwen2.5-3b"),
    "qwen3_vl": (_IMAGES, "qwen3-4b"),
    "smolvlm": (_IMAGES, "smollm2-1.7b"),
    "idefics3": (_IMAGES, "smollm2-1.7b"),
    "gemma3": (_IMAGES, "qwen3-4b"),
    "gemma3n": (_IMAGES, "qwen3-4b"),
    "gemma": ("a scaled embedding and shifted norms", "qwen2.5-1.5b"),
    "gemma2": ("soft-capped logits and a sliding window", "qwen2.5-1.5b"),
    "gemma3_text": ("a sliding window in most layers", "qwen3-1.7b"),
    "phi": ("partial rotary embeddings", "qwen2.5-1.5b"),
    "phi3": ("fused projections", "llama3.2-3b"),
    "stablelm": ("partial rotary embeddings", "qwen2.5-1.5b"),
    "glm4": ("partial rotary embeddings", "qwen3-8b"),
    "gpt_neox": ("partial rotary embeddings", "qwen2.5-1.5b"),
    "gpt2": ("learned positions", "smollm2-135m"),
    "smollm3": ("layers without RoPE", "qwen3-1.7b"),
    "cohere": ("parallel layers", "llama3.1-8b"),
    "olmo2": ("norms behind the layers", "llama3.2-1b"),
    "mamba": (_MIXED, "qwen3-1.7b"),
    "lfm2": (_MIXED, "qwen3-1.7b"),
    "qwen3_next": (_MIXED, "qwen3-8b"),
    "qwen3_5": (_MIXED, "qwen3-4b"),
}


def refusal(name: object) -> str:
    """The sentence for an architecture that is none of ``ARCHITECTURES``: why, where known, and the nearest that works."""
    supported = ", ".join(ARCHITECTURES)
    word = str(name).lower().removesuffix("forcausallm").replace("-", "_")
    for known in (word, word.removesuffix("_text"), word.replace("moe", "_moe")):
        if known in _KNOWN:
            why, nearest = _KNOWN[known]
            return f"{name!r} has {why}, which is not supported. Supported are {supported}; the nearest preset is {nearest}."
    near = difflib.get_close_matches(word, ARCHITECTURES, 1, 0.5)
    hint = f"; the nearest is {near[0]}" if near else ""
    return f"the architecture {name!r} is not supported. Supported are {supported}{hint}."
