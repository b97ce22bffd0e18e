"""Whether a sentence encoder's vocabulary knows the script of a history: an English one reads Korean letter by letter."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from runtime_py.tokenizer import SentenceTokenizer

# Measured on a few sentences a language. BERT (uncased): 15 languages in Latin letters 0.04 to 0.18; Chinese 0.55 to 0.73,
# 11 languages in other scripts 0.85 to 1. The vocabularies of multilingual-e5-small and Qwen 3: 0 to 0.12 in all of them,
# but Japanese under the former, whose kana often stand alone: 0.02 to 0.3, and 0.7 in slang.
UNKNOWN_SCRIPT = 0.5
_WHOLE = ("CJK UNIFIED", "HANGUL SYLLABLE")  # one such character is as good as a word to the encoders that know it


def unknown_share(tokenizer: SentenceTokenizer, texts: Iterable[str]) -> float:
    """Part of the letters of ``texts`` that are unknown or stand alone in their piece; 0 for no letters at all.

    The share of unknown pieces says little: BERT knows the parts of Korean letters, and nothing that is made of them. A
    Chinese character or a Korean syllable may stand alone; its parts may not, nor may the bytes of any letter.
    """
    total, poor = 0, 0
    for text in texts:
        letters, apart = _count(tokenizer, unicodedata.normalize("NFC", text))
        total, poor = total + letters, poor + apart
    return poor / total if total else 0.0


def _count(tokenizer: SentenceTokenizer, text: str) -> tuple[int, int]:
    """Letters of one text, and those of them that the vocabulary does not hold together."""
    is_letter = [unicodedata.category(c)[0] in "LM" for c in text]
    pieces, company, known = [0] * len(text), [0] * len(text), [True] * len(text)
    for start, end, is_known in tokenizer.pieces(text):
        letters = sum(is_letter[start:end])
        for i in range(start, end):
            pieces[i] += 1
            company[i] = max(company[i], letters)
            known[i] = known[i] and is_known
    # An accent that the tokenizer drops is in no piece and does not count.
    seen = [i for i, letter in enumerate(is_letter) if letter and pieces[i]]
    return len(seen), sum(not known[i] or (company[i] == 1 and _is_apart(text[i], pieces[i], tokenizer.of_bytes)) for i in seen)


def _is_apart(letter: str, pieces: int, of_bytes: bool) -> bool:
    """Whether a letter that shares no piece with another has been taken to the smallest parts there are."""
    if of_bytes:
        return pieces >= len(letter.encode())
    return pieces > 1 or not unicodedata.name(letter, "").startswith(_WHOLE)
