"""The sentence encoder gives sentence-transformers' vectors, whatever the length of the text and the padding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exporter.checkpoints.embedders import load_sentence_encoder, open_encoder
from exporter.checkpoints.encoder_folder import EncoderFolder
from exporter.graphs.embed import EmbedGraph
from exporter.models.encoder import Encoder
from runtime_py.errors import WorkError
from runtime_py.tokenizer import SentenceTokenizer

LENGTH = 256
TEXTS = [
    "When did Ada move to Lisbon?",
    "a",
    "",
    '[7 May 2023]\nAda said, "I went to a support group yesterday and it was so powerful."\n',
    "오늘은 친구들과 한강에서 자전거를 탔어요.",
    "We made it!! 🎉👩‍🚀 See you at 10:30 🚲🇰🇷",
    "naïve café — “quotes”, 100% €5; C++ & C#",
    "supercalifragilisticexpialidocious " * 3,
    "The tide was going out. " * 200,  # far longer than 256 tokens
    "x" * 500,
]


@pytest.fixture(scope="module")
def tokenizer(minilm: EncoderFolder) -> SentenceTokenizer:
    return SentenceTokenizer(minilm.folder / "tokenizer.json", [101], [102], 0, LENGTH)


def embed(graph: EmbedGraph, ids: np.ndarray, count: int) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(graph(torch.from_numpy(ids), torch.tensor([count], dtype=torch.int32)).numpy())


def test_vectors_equal_sentence_transformers(minilm: EncoderFolder, encoder: Encoder, tokenizer: SentenceTokenizer) -> None:
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(str(minilm.folder), device="cpu").encode(TEXTS, normalize_embeddings=True)
    counts = []
    for text, theirs in zip(TEXTS, expected, strict=True):
        ids, count = tokenizer.encode(text)
        ours = embed(EmbedGraph(encoder, LENGTH), ids, count)
        assert float(ours @ theirs) > 0.99999, text[:40]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
        assert float(np.linalg.norm(ours)) == pytest.approx(1.0, abs=1e-6)
        counts.append(count)
    assert max(counts) == LENGTH and min(counts) == 2


def test_padding_has_no_influence(encoder: Encoder, tokenizer: SentenceTokenizer) -> None:
    draw = np.random.default_rng(3)
    ids, count = tokenizer.encode(TEXTS[3])
    expected = embed(EmbedGraph(encoder, LENGTH), ids, count)
    noisy = ids.copy()
    noisy[0, count:] = draw.integers(0, 30522, LENGTH - count)
    np.testing.assert_array_equal(embed(EmbedGraph(encoder, LENGTH), noisy, count), expected)
    for length in (count, count + 1, 64):
        np.testing.assert_allclose(embed(EmbedGraph(encoder, length), ids[:, :length], count), expected, rtol=0, atol=1e-6)


def edited_copy(minilm: EncoderFolder, folder: Path, file: str, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The encoder's folder with one JSON file changed."""
    shutil.copytree(minilm.folder, folder, copy_function=lambda source, target: Path(target).symlink_to(source))
    path = folder / file
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.unlink()
    path.write_text(json.dumps(data), encoding="utf-8")
    return folder


KEYS = [
    "model_type",
    "hidden_act",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "type_vocab_size",
    "layer_norm_eps",
]


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_config_key_is_named_with_its_file(minilm: EncoderFolder, tmp_path: Path, key: str) -> None:
    folder = edited_copy(minilm, tmp_path / "copy", "config.json", lambda data: data.pop(key))
    with pytest.raises(WorkError, match=f"{key} is None") as caught:
        open_encoder(str(folder))
    assert str(folder / "config.json") in str(caught.value)


@pytest.mark.parametrize(("key", "value", "known"), [("model_type", "mpnet", "bert"), ("hidden_act", "relu", "gelu")])
def test_another_architecture_or_activation_is_refused(
    minilm: EncoderFolder, tmp_path: Path, key: str, value: str, known: str
) -> None:
    folder = edited_copy(minilm, tmp_path / "copy", "config.json", lambda data: data.update({key: value}))
    with pytest.raises(WorkError, match=f"{key} is '{value}'; supported is '{known}'"):
        open_encoder(str(folder))


@pytest.mark.parametrize(
    ("pooling", "found"),
    [
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}, "'max'"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}, r"'mean\+max'"),
        ({"pooling_mode": "weightedmean", "pooling_mode_mean_tokens": False}, "'weightedmean'"),
    ],
)
def test_other_pooling_is_refused(minilm: EncoderFolder, tmp_path: Path, pooling: dict[str, Any], found: str) -> None:
    folder = edited_copy(minilm, tmp_path / "copy", "1_Pooling/config.json", lambda data: data.update(pooling))
    with pytest.raises(WorkError, match=f"the pooling is {found}; supported for this model is 'mean' or 'cls'") as caught:
        open_encoder(str(folder))
    assert str(folder / "1_Pooling" / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    "pooling",
    [
        {"embedding_dimension": 384, "pooling_mode": "mean", "include_prompt": True},
        {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True, "include_prompt": True},
    ],
)
def test_both_layouts_of_the_pooling_file_are_read(minilm: EncoderFolder, tmp_path: Path, pooling: dict[str, Any]) -> None:
    def replace(data: dict[str, Any]) -> None:
        data.clear()
        data.update(pooling)

    folder = edited_copy(minilm, tmp_path / "copy", "1_Pooling/config.json", replace)
    assert open_encoder(str(folder)).config == minilm.config


def test_weights_of_another_shape_are_named(minilm: EncoderFolder, tmp_path: Path) -> None:
    folder = edited_copy(minilm, tmp_path / "copy", "config.json", lambda data: data.update(max_position_embeddings=128))
    found = open_encoder(str(folder))
    with pytest.raises(WorkError, match=r"position_embeddings\.weight has the shape \[512, 384\]; .* it is \[128, 384\]"):
        load_sentence_encoder(found)


def test_a_folder_without_tokenizer_names_it(minilm: EncoderFolder, tmp_path: Path) -> None:
    folder = edited_copy(minilm, tmp_path / "copy", "config.json", lambda data: None)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(WorkError, match=r"no readable tokenizer\.json") as caught:
        open_encoder(str(folder)).tokenizer_json()
    assert str(folder) in str(caught.value)
