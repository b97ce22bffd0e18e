"""Texts to unit vectors with the bundle's sentence encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from runtime_py.engines.base import Engine
from runtime_py.tokenizer import SentenceTokenizer

F32 = NDArray[np.float32]


class Embedder:
    """``embed`` through an engine."""

    def __init__(self, engine: Engine, tokenizer: SentenceTokenizer) -> None:
        self._engine, self._tokenizer = engine, tokenizer

    def embed(self, text: str) -> F32:
        """The L2-normalised vector ``[d]`` of one text; what exceeds the encoder's length is left out."""
        tokens, n_tokens = self._tokenizer.encode(text)
        outputs = self._engine.run("embed", {"tokens": tokens, "n_tokens": np.array([n_tokens], np.int32)})
        return outputs["vector"].astype(np.float32, copy=False)

    def embed_all(self, texts: Sequence[str], progress: Callable[[int, int], None] | None = None) -> F32:
        """Vectors ``[n, d]``; ``progress(done, total)`` after each."""
        vectors = []
        for i, text in enumerate(texts):
            vectors.append(self.embed(text))
            if progress:
                progress(i + 1, len(texts))
        return np.stack(vectors)
