"""GGUF files of other shapes than the default model's: written here tensor by tensor, as llama.cpp's converter does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
import pytest
import torch
from conftest import LlamaSaver
from numpy.typing import NDArray

from exporter.checkpoints.gguf_file import GGUFCheckpoint
from exporter.checkpoints.hf_folder import HFCheckpoint
from exporter.checkpoints.tiny_folder import write_tiny_checkpoint
from exporter.models.architectures import ARCHITECTURES
from exporter.models.decoder import checkpoint_names, load_decoder
from exporter.models.dense import dense_logits
from runtime_py.errors import WorkError

PARTS = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """``model.layers.1.self_attn.q_proj.weight`` -> ``blk.1.attn_q.weight``."""
    words = name.split(".")
    part = PARTS.get(words[-2], "output_norm")
    return f"blk.{words[2]}.{part}.{words[-1]}" if "layers" in words else f"{part}.weight"


def interleaved(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows i and i + D/2 of every head side by side, as llama.cpp stores q and k."""
    dim = len(rows) // heads
    order = [head * dim + i + half * dim // 2 for head in range(heads) for i in range(dim // 2) for half in (0, 1)]
    return rows[order]


def write_gguf(
    path: Path,
    source: HFCheckpoint,
    without: str = "",
    fields: Mapping[str, int] = MappingProxyType({}),
    tensors: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
    architecture: str = "llama",
    dtype: type[np.floating] = np.float16,
) -> Path:
    """The weights of ``source`` as ``dtype``, vectors in float32; leaves out one field or tensor, adds others."""
    config = source.config
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        f"{architecture}.block_count": config.n_layers,
        f"{architecture}.attention.head_count": config.n_heads,
        f"{architecture}.attention.head_count_kv": config.n_kv_heads,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.embedding_length": config.hidden,
        f"{architecture}.feed_forward_length": config.ffn,
        f"{architecture}.context_length": config.context,
        "tokenizer.ggml.eos_token_id": 2,
    }
    for key, value in {**numbers, **fields}.items():
        if key != without:
            writer.add_uint32(key, value)
    if config.rope_theta != 10000.0:
        writer.add_float32(f"{architecture}.rope.freq_base", config.rope_theta)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.norm_eps)
    for name in checkpoint_names(config).values():
        values = source.tensor(name).numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = interleaved(values, config.n_heads if "q_proj" in name else config.n_kv_heads)
        if gguf_name(name) != without:
            writer.add_tensor(gguf_name(name), values if values.ndim == 1 else values.astype(dtype))
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def source(request: pytest.FixtureRequest, save_llama: LlamaSaver, tmp_path_factory: pytest.TempPathFactory) -> HFCheckpoint:
    folder = save_llama(tmp_path_factory.mktemp("llama"), dtype=torch.float16, tie_word_embeddings=request.param)
    return HFCheckpoint(folder, "tiny")


def test_the_same_weights_give_the_same_logits_from_both_formats(tmp_path: Path, source: HFCheckpoint) -> None:
    found = GGUFCheckpoint(write_gguf(tmp_path / "tiny.gguf", source), "tiny")
    assert (found.config.tied, found.config.n_kv_heads, found.config.head_dim) == (source.config.tied, 2, 8)
    assert found.config.rope_theta == 10000.0  # llama.cpp's value where the file has none
    tokens = torch.randint(0, 97, (30,), generator=torch.Generator().manual_seed(2))
    ours, theirs = (dense_logits(load_decoder(c.config, c.tensor), tokens) for c in (found, source))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "key", ["llama.block_count", "llama.attention.head_count", "llama.embedding_length", "llama.context_length"]
)
def test_a_missing_field_is_named_with_its_file(tmp_path: Path, source: HFCheckpoint, key: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", source, without=key)
    with pytest.raises(WorkError, match=f"has no field '{key}'") as caught:
        GGUFCheckpoint(path, "tiny")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_k.weight", "output_norm.weight"])
def test_a_missing_tensor_is_named_with_its_file(tmp_path: Path, source: HFCheckpoint, name: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", source, without=name)
    with pytest.raises(WorkError, match=f"has no tensor '{name}'") as caught:
        found = GGUFCheckpoint(path, "tiny")
        load_decoder(found.config, found.tensor)
    assert str(path) in str(caught.value)


def test_other_architectures_are_refused_with_the_nearest(tmp_path: Path, source: HFCheckpoint) -> None:
    with pytest.raises(WorkError, match=r"'gemma' has a scaled embedding .* the nearest preset is qwen2\.5-1\.5b"):
        GGUFCheckpoint(write_gguf(tmp_path / "gemma.gguf", source, architecture="gemma"), "tiny")


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("llama.rope.dimension_count", 4, "partial rotary embeddings"),
        ("llama.attention.sliding_window", 64, "a sliding window"),
        ("llama.expert_count", 8, "a mixture of experts"),
    ],
)
def test_features_that_are_not_supported_are_named(
    tmp_path: Path, source: HFCheckpoint, field: str, value: int, found: str
) -> None:
    with pytest.raises(WorkError, match=found):
        GGUFCheckpoint(write_gguf(tmp_path / "other.gguf", source, fields={field: value}), "tiny")


@pytest.mark.parametrize("divisors", [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0]])
def test_damaged_rope_divisors_are_refused(tmp_path: Path, source: HFCheckpoint, divisors: list[float]) -> None:
    tensors = {"rope_freqs.weight": np.array(divisors, np.float32)}
    with pytest.raises(WorkError, match=r"rope_freqs\.weight is no list of 4 positive numbers"):
        GGUFCheckpoint(write_gguf(tmp_path / "scaled.gguf", source, tensors=tensors), "tiny")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_gives_the_same_logits_from_both_formats(tmp_path: Path, architecture: str) -> None:
    folder = write_tiny_checkpoint(architecture, tmp_path / "hf", vocab_size=97)
    source = HFCheckpoint(folder, "tiny")
    tensors: dict[str, NDArray[np.float32]] = {}
    if source.config.rope_scaling is not None:  # llama.cpp stores the divisors themselves
        plain = dataclasses.replace(source.config, rope_scaling=None)
        tensors["rope_freqs.weight"] = np.divide(plain.inv_freq(), source.config.inv_freq()).astype(np.float32)
    name = ARCHITECTURES[architecture].gguf
    path = write_gguf(tmp_path / "tiny.gguf", source, tensors=tensors, architecture=name, dtype=np.float32)
    found = GGUFCheckpoint(path, "tiny")
    assert found.config.spec.qkv_bias == source.config.spec.qkv_bias and found.config.head_dim == source.config.head_dim
    tokens = torch.randint(0, 97, (700,), generator=torch.Generator().manual_seed(2))
    ours, theirs = (dense_logits(load_decoder(c.config, c.tensor), tokens) for c in (found, source))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5)  # the divisors round once more


def test_the_end_of_a_turn_stops_an_answer_as_the_end_of_text_does(tmp_path: Path, source: HFCheckpoint) -> None:
    assert GGUFCheckpoint(write_gguf(tmp_path / "a.gguf", source), "tiny").stop_ids() == [2]
    path = write_gguf(tmp_path / "b.gguf", source, fields={"tokenizer.ggml.eot_token_id": 5})
    assert GGUFCheckpoint(path, "tiny").stop_ids() == [2, 5]


def test_a_file_without_a_template_says_so(tmp_path: Path, source: HFCheckpoint) -> None:
    with pytest.raises(WorkError, match=r"no field 'tokenizer\.chat_template'"):
        GGUFCheckpoint(write_gguf(tmp_path / "tiny.gguf", source), "tiny").chat_template()
