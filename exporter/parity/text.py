"""Checks of what is not a graph of the language model: embedder, routing, tokenizers, template."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from exporter.checkpoints.base import Checkpoint
from exporter.parity.checks import FLOAT_LIMIT, ROUNDED_VECTOR, ROUNDED_WHY, Check, relative_difference, worst
from exporter.parity.episodes import CENTROIDS_FILE
from exporter.template import cut_template, template_texts
from runtime_py.bundle import Bundle
from runtime_py.embedder import F32
from runtime_py.engines.base import Engine
from runtime_py.episodes.matching import Centroids, route
from runtime_py.episodes.segments import make_segments
from runtime_py.errors import BundleError
from runtime_py.tensor_files import map_tensors

VECTORS_FILE = "tokenizer/vectors.json"
COSINE_DISTANCE, ROUTING_MISSES, ROUTING_MARGIN = 0.02, 0.05, 0.05


@dataclass(frozen=True)
class Texts:
    """Texts of a bundle's history to embed: first its segments, then its questions (utterances with a question mark)."""

    all: list[str]
    n_segments: int

    @staticmethod
    def of(bundle: Bundle) -> Texts:
        """The texts of the history the bundle was built with."""
        utterances = bundle.episodes_file().utterances
        segments = [s.text for s in make_segments(utterances)]
        return Texts(segments + [u.text for u in utterances if "?" in u.text], len(segments))

    def vectors(self, bundle: Bundle, engine: Engine) -> F32:
        """Vectors ``[n, d]`` of all texts."""
        embedder = bundle.embedder(engine)
        documents, questions = self.all[: self.n_segments], self.all[self.n_segments :]
        return np.stack([*map(embedder.embed_document, documents), *map(embedder.embed_query, questions)])


def embedder_checks(bundle: Bundle, target: str, found: F32, expected: F32, exact: F32, rounded: frozenset[str]) -> list[Check]:
    """Vectors ``[n, d]`` of the shipped embedder against its equally quantised PyTorch model's, and the float32 one's."""
    centroids = Centroids.of(map_tensors(bundle.path / CENTROIDS_FILE)[0]["centroids"])
    n = len(found)
    vector = Check(target, "embed", "vector", worst([relative_difference(found, expected)]), FLOAT_LIMIT, "float32 rounding")
    if "embed" in rounded:
        apart = 1.0 - float(np.einsum("nd,nd->n", found, expected).min())
        why = f"cosine distance to the equally quantised model, worst of {n} texts; {ROUNDED_WHY}"
        vector = Check(target, "embed", "vector", apart, ROUNDED_VECTOR, why)
    if not np.isfinite(found).all():
        return [vector]  # such a vector routes nowhere
    margins = [m for f, e in zip(found, exact, strict=True) if (m := _lost_margin(f, e, centroids)) is not None]
    distance = 1.0 - float(np.einsum("nd,nd->n", found, exact).min())
    return [
        vector,
        Check(target, "embed", "cosine_distance", distance, COSINE_DISTANCE, f"int8 to float32 model, worst of {n} texts"),
        Check(target, "embed", "routing_misses", len(margins) / n, ROUTING_MISSES, f"part of {n} texts routed elsewhere"),
        Check(target, "embed", "routing_margin", max(margins, default=0.0), ROUTING_MARGIN, "cosine margin of the misses"),
    ]


def _lost_margin(found: F32, exact: F32, centroids: Centroids) -> float | None:
    """None when both vectors route alike; else by how much the float32 model prefers its own episode."""
    chosen, wanted = route(found, centroids), route(exact, centroids)
    if chosen.episode == wanted.episode:
        return None
    return wanted.similarities[wanted.episode] - wanted.similarities[chosen.episode]


def text_checks(bundle: Bundle, checkpoint: Checkpoint) -> list[Check]:
    """Golden tokenizer vectors and the template's pieces, as the runtime reads them from the bundle."""
    tokenizer, sentences = bundle.text_tokenizer(), bundle.sentence_tokenizer()
    golden = _golden(bundle)

    def encode_sentence(text: str) -> list[int]:
        tokens, n_tokens = sentences.encode(text)
        return [int(i) for i in tokens[0, :n_tokens]]

    wrong = _differing(golden["text"], tokenizer.encode) + sum(tokenizer.decode(i) != text for text, i in golden["text"])
    wrong_sentences = _differing(golden["embedder"], encode_sentence)
    many = f"of {len(golden['text'])} texts, encoded and decoded"
    return [
        Check("bundle", "tokenizer", "text_vectors", wrong, 0, many),
        Check("bundle", "tokenizer", "embedder_vectors", wrong_sentences, 0, f"of {len(golden['embedder'])} texts"),
        _template_check(bundle, checkpoint),
    ]


def _golden(bundle: Bundle) -> dict[str, list[tuple[str, list[int]]]]:
    """Texts and ids by tokenizer. Raises ``BundleError`` when the file does not hold them."""
    path = bundle.path / VECTORS_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = {kind: [(str(v["text"]), [int(i) for i in v["ids"]]) for v in data[kind]] for kind in ("text", "embedder")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BundleError(f"{path} holds no golden vectors ({error!r}). Copy the bundle again, or build it anew.") from None
    if not all(found.values()):
        raise BundleError(f"{path} holds no golden vectors: a list is empty. Copy the bundle again, or build it anew.")
    return found


def _differing(golden: list[tuple[str, list[int]]], encode: Callable[[str], list[int]]) -> int:
    return sum(encode(text) != ids for text, ids in golden)


def _template_check(bundle: Bundle, checkpoint: Checkpoint) -> Check:
    """The pieces spell the checkpoint's own template, with the ids and the stop ids that the checkpoint gives."""
    tokenizer, template = bundle.text_tokenizer(), bundle.manifest.template
    texts, cut = template_texts(checkpoint), cut_template(checkpoint, tokenizer)
    wrong = 0
    for name, text in texts.items():
        ids = getattr(template, name)
        wrong += ids != getattr(cut, name) or tokenizer.decode(ids, skip_special=False) != text
    wrong += sorted(template.stop_ids) != sorted(cut.stop_ids)
    why = f"of {len(texts)} pieces and the stop ids that differ from the rendered template"
    return Check("bundle", "template", "pieces", wrong, 0, why)
