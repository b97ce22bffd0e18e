"""The embedder inside a bundle against sentence-transformers: 50 varied sentences, and where the sample's texts are routed."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.checkpoints.encoder_folder import EncoderFolder
from runtime_py.bundle import Bundle
from runtime_py.embedder import Embedder
from runtime_py.episodes.kmeans import fit_kmeans
from runtime_py.episodes.loaders import load_history
from runtime_py.episodes.matching import Centroids, route
from runtime_py.episodes.segments import make_segments

SUBJECTS = ("The kiln", "My grandfather", "Our train to Trieste", "A greyhound named Gravy", "The neighbour's sycamore")
PREDICATES = (
    "broke down again on Friday.",
    "cost exactly 1,140 pounds, VAT included!",
    "가 정말 좋아요 😀, as we say.",
    "is - so I was told - older than the house; nobody knows why.",
    "was late. Three hours late. In the rain.",
    "needs some explaining, I'd say: who, what, when & why.",
    "learned to climb stairs, one piece of cheddar at a time, in the second week of June.",
    "WON'T FIT INTO THE VAN?!",
    "reminds me of https://example.org/a?b=c and of def f(x): return x",
    "matters more to me than the money, the time and the trouble it has been since the winter before last.",
)


@pytest.fixture(scope="module")
def shipped(small_bundle: Bundle) -> Embedder:
    """The int8 ONNX embedder as a phone runs it."""
    return small_bundle.embedder(small_bundle.engine("onnx"))


@pytest.fixture(scope="module")
def original(minilm: EncoderFolder, small_bundle: Bundle) -> Any:
    """The float32 model in sentence-transformers itself, reading as many tokens as the small bundle does."""
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    model = library.SentenceTransformer(str(minilm.folder), device="cpu")
    model.max_seq_length = small_bundle.manifest.embedder.length
    return model


def test_fifty_sentences_are_near_sentence_transformers(shipped: Embedder, original: Any) -> None:
    sentences = [f"{subject} {predicate}" for subject in SUBJECTS for predicate in PREDICATES]
    assert len(set(sentences)) == 50
    expected = original.encode(sentences, normalize_embeddings=True)
    cosines = np.einsum("nd,nd->n", shipped.embed_documents(sentences), expected)
    assert cosines.min() >= 0.98, cosines.min()


def test_the_samples_segments_and_questions_go_to_the_same_episodes(shipped: Embedder, original: Any) -> None:
    loaded = load_history(Path(str(files("calibration").joinpath("sample_conversation.json"))))
    segments = [s.text for s in make_segments(loaded.history.utterances)]
    texts = segments + [q.text for q in loaded.questions]
    found = shipped.embed_documents(texts)
    expected = original.encode(texts, normalize_embeddings=True)
    centroids = Centroids.of(fit_kmeans(found[: len(segments)], 4).centroids)
    margins = []
    for ours, theirs in zip(found, expected, strict=True):
        chosen, wanted = route(ours, centroids), route(theirs, centroids)
        if chosen.episode != wanted.episode:
            margins.append(wanted.similarities[wanted.episode] - wanted.similarities[chosen.episode])
    assert len(margins) <= 0.05 * len(texts), margins
    assert max(margins, default=0.0) < 0.05
