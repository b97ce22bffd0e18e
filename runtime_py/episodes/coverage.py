"""Whether a sentence encoder's vocabulary knows the script of a history: an English one reads Korean letter by letter."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from runtime_py.tokenizer import SentenceTokenizer

# Measured with the vocabulary of BERT (uncased): English 0.06, German 0.14, Turkish 0.26, Vietnamese 0.36; Chinese 0.68,
# Hindi 0.97, Korean, Japanese, Arabic, Russian, Greek and Thai 0.94 to 1.
UNKNOWN_SCRIPT = 0.5
_UNKNOWN = ("[UNK]", "<unk>")
_MARKS = "#▁Ġ"  # how vocabularies mark the inside or the beginning of a word


def unknown_share(tokenizer: SentenceTokenizer, texts: Iterable[str]) -> float:
    """Part of the tokens of letters that are unknown or a single letter; 0 for no letters at all.

    A single Chinese character is a word to the encoders that know it, and does not count.
    """
    total, poor = 0, 0
    for text in texts:
        words = "".join(c if unicodedata.category(c).startswith(("L", "M")) else " " for c in text)
        for piece in tokenizer.pieces(words)[1]:
            letters = piece.strip(_MARKS)
            total += bool(letters)
            poor += piece in _UNKNOWN or (len(letters) == 1 and not unicodedata.name(letters, "").startswith("CJK UNIFIED"))
    return poor / total if total else 0.0
