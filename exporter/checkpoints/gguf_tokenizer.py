"""The tokenizer in a GGUF file's metadata, as a tokenizer.json.

Byte-level BPE is written from the metadata itself: vocabulary and merges are in the file, and ``tokenizer.ggml.pre`` names the
way text is cut before, whose rules are those of llama.cpp (llama-vocab.cpp) and of the models' own tokenizer.json files.
SentencePiece vocabularies are converted by transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime_py.errors import WorkError

Field = Callable[..., Any]

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
_GPT2 = {**_BYTES, "use_regex": True}


def _split(digits: str) -> list[dict[str, Any]]:
    """Words as Llama 3 and Qwen cut them; ``digits`` says how many of them stay together."""
    return [{"type": "Split", "pattern": {"Regex": _WORDS % digits}, "behavior": "Isolated", "invert": False}, _BYTES]


# tokenizer.ggml.pre -> what cuts the text before the merges
_CUTS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_GPT2],
    "smollm": [{"type": "Digits", "individual_digits": True}, _GPT2],
    "llama-bpe": _split("{1,3}"),
    "qwen2": _split(""),
}
_CUTS |= {"llama3": _CUTS["llama-bpe"], "llama-v3": _CUTS["llama-bpe"]}


def tokenizer_json(path: Path, field: Field) -> str:
    """The tokenizer of the GGUF file at ``path``, whose metadata ``field(key, default)`` reads; it adds no BOS by itself.

    Raises ``WorkError`` naming what of it is not supported.
    """
    model = str(field("tokenizer.ggml.model"))
    if model == "gpt2":
        return json.dumps(_byte_level_bpe(path, field), ensure_ascii=False)
    if model != "llama":
        raise WorkError(
            f"{path}: the tokenizer {model!r} is not supported. Supported are 'gpt2' (BPE) and 'llama' (SentencePiece)."
        )
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    data["post_processor"] = None  # the only thing it could add is a BOS
    return json.dumps(data, ensure_ascii=False)


def _byte_level_bpe(path: Path, field: Field) -> dict[str, Any]:
    cut = str(field("tokenizer.ggml.pre", "default"))
    if cut not in _CUTS:
        raise WorkError(
            f"{path}: the pre-tokenizer {cut!r} is not supported. Supported are {', '.join(_CUTS)}. Take the checkpoint as a "
            "Hugging Face folder, which brings its own tokenizer.json."
        )
    tokens = [str(token) for token in field("tokenizer.ggml.tokens")]
    kinds = [int(kind) for kind in field("tokenizer.ggml.token_type", [1] * len(tokens))]
    merges = [str(merge).split(" ", 1) for merge in field("tokenizer.ggml.merges")]
    if len(kinds) != len(tokens) or any(len(pair) != 2 for pair in merges):
        raise WorkError(f"{path}: the tokenizer's lists do not fit each other; the file is damaged. Copy it again.")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": token, **flags, "special": kind == _CONTROL}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if cut == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _CUTS[cut]},
        "post_processor": None,
        "decoder": _BYTES,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # Llama 3 looks a whole word up before it merges its bytes.
            "ignore_merges": _CUTS[cut] is _CUTS["llama-bpe"],
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }
