"""Text to token ids and back, from a tokenizer.json, for the language model and for the sentence encoder.

Text from users never becomes a special token: it is encoded by a second tokenizer built from the same file without its
added tokens, its post-processor and every vocabulary entry or merge that spells a special token.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from runtime_py.errors import BundleError, UsageError

I32 = NDArray[np.int32]
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class TextTokenizer:
    """Tokenizer of the language model.

    ``special_ids`` are added to those that tokenizer.json itself marks as special. Raises ``BundleError`` when the file
    is missing or damaged.
    """

    def __init__(self, path: Path, special_ids: Collection[int] = ()) -> None:
        spec, self._template = _load(path)
        self.special_ids = frozenset(special_ids) | _special_ids(spec)
        self._user = _build(path, _without_special(spec, self.special_ids))
        # Such decoders judge a run of byte tokens as a whole: one bad byte spoils the good ones before it.
        self._joins_bytes = "ByteFallback" in json.dumps(spec.get("decoder"))

    def encode(self, text: str) -> list[int]:
        """Ids of text from a user: the letters of ``<|im_end|>`` stay letters. No special token is added."""
        return list(self._user.encode(_valid(text), add_special_tokens=False).ids)

    def encode_template(self, text: str) -> list[int]:
        """Ids of a piece of the chat template: special tokens are recognised, none is added in front or behind."""
        return list(self._template.encode(_valid(text), add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        kept = [int(i) for i in ids if not (skip_special and i in self.special_ids)]
        return str(self._template.decode(kept, skip_special_tokens=False))

    def stream_decoder(self) -> StreamDecoder:
        """A decoder for tokens that arrive one by one."""
        return StreamDecoder(self)

    def is_open(self, ids: list[int], text: str) -> bool:
        """Whether ``text``, decoded from ``ids``, could still change when more tokens follow."""
        if text.endswith(_REPLACEMENT):
            return True
        return self._joins_bytes and bool(_BYTE_TOKEN.fullmatch(self._template.id_to_token(ids[-1]) or ""))


class StreamDecoder:
    """Turns tokens into text as they come; all pieces together equal ``decode`` of all tokens."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        # Tokens of the piece before are decoded again with the new ones: what a token spells may depend on a neighbour.
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that ``token`` completes, or "" while a character lacks some of its bytes."""
        if token in self._tokenizer.special_ids:
            return ""
        self._pending.append(int(token))
        return self._take(final=False)

    def flush(self) -> str:
        """What is left at the end, with U+FFFD for a character that was never completed."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        if not self._pending:
            return ""
        ids = self._context + self._pending
        text = self._tokenizer.decode(ids)
        if not final and self._tokenizer.is_open(ids, text):
            return ""
        piece = text[len(self._tokenizer.decode(self._context)) :]
        if piece:
            self._context, self._pending = self._pending, []
        return piece


class SentenceTokenizer:
    """Tokenizer of the sentence encoder: a text between ``prefix_ids`` and ``suffix_ids``, padded to ``length`` tokens.

    Raises ``BundleError`` when the file is missing or damaged, ``UsageError`` when ``length`` leaves no room for text.
    """

    def __init__(self, path: Path, prefix_ids: Sequence[int], suffix_ids: Sequence[int], pad_id: int, length: int) -> None:
        least = len(prefix_ids) + len(suffix_ids) + 1
        if length < least:
            raise UsageError(f"The sentence encoder's length is {length}; at least {least} tokens are needed. Give more.")
        spec, _ = _load(path)
        special = _special_ids(spec) | {*prefix_ids, *suffix_ids, pad_id}
        self._tokenizer = _build(path, _without_special(spec, special))
        self._unknown = _unknown_id(spec["model"])
        # Whether a piece is a run of bytes rather than of characters.
        self.of_bytes = '"ByteLevel"' in json.dumps(spec.get("pre_tokenizer"))
        self._prefix, self._suffix, self._pad_id, self._length = list(prefix_ids), list(suffix_ids), pad_id, length

    def encode(self, text: str) -> tuple[I32, int]:
        """Ids ``int32 [1, length]`` and the number of tokens before the padding; a long text loses its end."""
        room = self._length - len(self._prefix) - len(self._suffix)
        ids = self._tokenizer.encode(_valid(text), add_special_tokens=False).ids[:room]
        row = [*self._prefix, *ids, *self._suffix]
        tokens = np.full((1, self._length), self._pad_id, np.int32)
        tokens[0, : len(row)] = row
        return tokens, len(row)

    def pieces(self, text: str) -> list[tuple[int, int, bool]]:
        """Where each piece of a valid ``text`` begins and ends, in characters, and whether the vocabulary knows it.

        A character that is split lies in several pieces.
        """
        found = self._tokenizer.encode(text, add_special_tokens=False)
        whole = zip(found.ids, found.tokens, found.offsets, strict=True)
        # A mark put in front of the text claims the first character, which it does not hold.
        return [(start, end, i != self._unknown) for i, piece, (start, end) in whole if piece != "▁"]


def _load(path: Path) -> tuple[dict[str, Any], Tokenizer]:
    """The file as JSON, and the tokenizer it describes, which vouches for the JSON's form."""
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read ({error}). Copy the whole bundle again, or build it anew.") from None
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise BundleError(f"{path} is not a tokenizer: it has no model. Copy the whole bundle again, or build it anew.")
    return spec, _build(path, spec)


def _build(path: Path, spec: dict[str, Any]) -> Tokenizer:
    # Cutting, padding and adding tokens around a text are the caller's business, whatever the file asks for.
    plain = {**spec, "truncation": None, "padding": None, "post_processor": None}
    try:
        return Tokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the library raises bare Exception
        raise BundleError(f"{path} is not a usable tokenizer ({error}). Copy the bundle again.") from None


def _special_ids(spec: dict[str, Any]) -> frozenset[int]:
    return frozenset(token["id"] for token in spec.get("added_tokens") or [] if token.get("special"))


def _unknown_id(model: dict[str, Any]) -> int | None:
    """Told by number in a vocabulary with scores, by its text in the others."""
    vocabulary = model.get("vocab")
    found = vocabulary.get(model.get("unk_token")) if isinstance(vocabulary, dict) else model.get("unk_id")
    return found if isinstance(found, int) else None


def _without_special(spec: dict[str, Any], special: Collection[int]) -> dict[str, Any]:
    """The tokenizer for users' text: no added tokens, and a vocabulary that cannot spell a special one.

    Some models look a whole word up in the vocabulary before they split it, or search it for the best pieces; there
    dropping the added tokens is not enough. The unknown token stays, for text that nothing else spells.
    """
    model = dict(spec["model"])
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        unknown = model.get("unk_token")
        hidden = {piece for piece, i in vocabulary.items() if i in special and piece != unknown}
        model["vocab"] = {piece: i for piece, i in vocabulary.items() if piece not in hidden}
        if model.get("merges"):
            pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
            model["merges"] = [p for p in pairs if hidden.isdisjoint((p[0], p[1], p[0] + p[1]))]
    elif isinstance(vocabulary, list):
        # An id is a place in this list, so the entry stays, under a name that no text can contain.
        model["vocab"] = [
            [secrets.token_hex(32), score] if i in special else [piece, score] for i, (piece, score) in enumerate(vocabulary)
        ]
    return {**spec, "model": model, "added_tokens": []}


def _valid(text: str) -> str:
    """``text`` with surrogate pairs joined and lone surrogates, which no tokenizer takes, as U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
