"""Checks of what is not a graph of the language model: embedder, routing, tokenizers, template, stored episodes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from exporter.checkpoints.base import Checkpoint
from exporter.parity.checks import FLOAT_LIMIT, Check, relative_difference, worst
from exporter.template import template_texts
from runtime_py.bundle import Bundle
from runtime_py.embedder import F32, Embedder
from runtime_py.engines.base import Engine
from runtime_py.episodes.cache_files import read_cache, read_sealed
from runtime_py.episodes.matching import Centroids, route
from runtime_py.episodes.rendering import TokenStream
from runtime_py.episodes.segments import make_segments
from runtime_py.language_model import LanguageModel
from runtime_py.tensor_files import map_tensors

VECTORS_FILE = "tokenizer/vectors.json"
COSINE_DISTANCE, ROUTING_MISSES, ROUTING_MARGIN = 0.02, 0.05, 0.05


def embedder_checks(bundle: Bundle, target: str, engine: Engine, reference: Engine, full: Engine) -> list[Check]:
    """The shipped embedder against its equally quantised PyTorch model, and against the float32 one.

    Texts are the segments and the questions (utterances with a question mark) of the bundle's history.
    """
    history = bundle.episodes_file()
    texts = [s.text for s in make_segments(history.utterances)]
    texts += [u.text for u in history.utterances if "?" in u.text]
    tokenizer = bundle.sentence_tokenizer()
    found, expected, exact = (Embedder(e, tokenizer).embed_all(texts) for e in (engine, reference, full))
    centroids = Centroids.of(map_tensors(bundle.path / "episodes" / "centroids.safetensors")[0]["centroids"])
    margins = [m for f, e in zip(found, exact, strict=True) if (m := _lost_margin(f, e, centroids)) is not None]
    distance = 1.0 - float(np.einsum("nd,nd->n", found, exact).min())
    n = len(texts)
    return [
        Check(target, "embed", "vector", worst([relative_difference(found, expected)]), FLOAT_LIMIT, "float32 rounding"),
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
    golden = json.loads((bundle.path / VECTORS_FILE).read_text(encoding="utf-8"))
    wrong = sum(tokenizer.encode(v["text"]) != v["ids"] for v in golden["text"])
    wrong += sum(tokenizer.decode(v["ids"]) != v["text"] for v in golden["text"])
    wrong_sentences = 0
    for vector in golden["embedder"]:
        tokens, n_tokens = sentences.encode(vector["text"])
        wrong_sentences += tokens[0, :n_tokens].tolist() != vector["ids"]
    texts, template = template_texts(checkpoint), bundle.manifest.template
    wrong_pieces = sum(tokenizer.decode(getattr(template, n), skip_special=False) != text for n, text in texts.items())
    many = f"of {len(golden['text'])} texts, encoded and decoded"
    return [
        Check("bundle", "tokenizer", "text_vectors", wrong, 0, many),
        Check("bundle", "tokenizer", "embedder_vectors", wrong_sentences, 0, f"of {len(golden['embedder'])} texts"),
        Check(
            "bundle",
            "template",
            "pieces",
            wrong_pieces,
            0,
            f"of {len(texts)} pieces that differ from the rendered template",
        ),
    ]


def episode_checks(bundle: Bundle, model: LanguageModel) -> list[Check]:
    """The stored episodes have read the whole history, and their sealed keys are their keys, rotated."""
    history, manifest = bundle.episodes_file(), bundle.manifest
    encode = bundle.text_tokenizer().encode
    length = len(TokenStream(manifest.template.prefix, encode, history.speakers, history.utterances))
    behind, differences = 0, [0.0]
    for record in history.episodes:
        folder: Path = bundle.path / "episodes"
        cache, (keys, n_seen) = read_cache(folder / record.cache), read_sealed(folder / record.sealed)
        behind += not cache.n_seen == n_seen == record.n_seen == length
        pairs = zip(keys, model.sealed_keys(cache), strict=True)
        differences += [relative_difference(k, expected) for k, expected in pairs]
    return [
        Check("bundle", "episodes", "behind", behind, 0, f"of {len(history.episodes)} episodes, of {length} tokens"),
        Check("bundle", "episodes", "sealed_keys", worst(differences), 1e-6, "rotated again here; one bit of cos or sin"),
    ]
