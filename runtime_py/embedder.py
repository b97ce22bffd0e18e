"""Texts to unit vectors with the bundle's sentence encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from runtime_py.engines.base import Engine
from runtime_py.tokenizer import SentenceTokenizer

F32 = NDArray[np.float32]


class Embedder:
    """``embed`` through an engine, with the prompts that the encoder was trained with in front of texts.

    Vectors are L2-normalised, ``[d]``; what exceeds the encoder's length is left out.
    """

    def __init__(self, engine: Engine, tokenizer: SentenceTokenizer, query_prompt: str = "", document_prompt: str = "") -> None:
        self._engine, self.tokenizer = engine, tokenizer
        self._query_prompt, self._document_prompt = query_prompt, document_prompt

    def embed_query(self, text: str) -> F32:
        """The vector of a question, to be compared with those of documents and centroids."""
        return self._embed(self._query_prompt + text)

    def embed_document(self, text: str) -> F32:
        """The vector of a text that is searched: a segment of the history."""
        return self._embed(self._document_prompt + text)

    def embed_documents(self, texts: Sequence[str], progress: Callable[[int, int], None] | None = None) -> F32:
        """Vectors ``[n, d]``; ``progress(done, total)`` after each."""
        vectors = []
        for i, text in enumerate(texts):
            vectors.append(self.embed_document(text))
            if progress:
                progress(i + 1, len(texts))
        return np.stack(vectors)

    def _embed(self, text: str) -> F32:
        tokens, n_tokens = self.tokenizer.encode(text)
        outputs = self._engine.run("embed", {"tokens": tokens, "n_tokens": np.array([n_tokens], np.int32)})
        return outputs["vector"].astype(np.float32, copy=False)
