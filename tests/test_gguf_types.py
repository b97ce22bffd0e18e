"""Tensor types of GGUF files: what is read equals the format's definition (ggml-org/ggml, docs/gguf.md and ggml-quants.c)."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from exporter.checkpoints.gguf_file import GGUFCheckpoint

ROWS, WIDTH = 48, 256
NAME, READ = "blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"
U8 = NDArray[np.uint8]


def write(path: Path, data: NDArray[np.generic], kind: Kind) -> Path:
    """A file with one layer's worth of fields and the tensor ``NAME`` in this type, its bytes as they are."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "block_count": 1,
        "attention.head_count": 4,
        "embedding_length": WIDTH,
        "feed_forward_length": ROWS,
        "context_length": 512,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((4, WIDTH), np.float32))
    writer.add_tensor(NAME, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> NDArray[np.float32]:
    values: NDArray[np.float32] = GGUFCheckpoint(path, "tiny").tensor(READ).numpy()
    return values


def weights() -> NDArray[np.float32]:
    return np.random.default_rng(1).normal(0.0, 0.1, (ROWS, WIDTH)).astype(np.float32)


# Half the step of the type's codes for the largest magnitude in a group, about 0.4 here.
@pytest.mark.parametrize(
    ("kind", "error"),
    [(Kind.F32, 0.0), (Kind.F16, 2e-4), (Kind.BF16, 2e-3), (Kind.Q8_0, 2e-3), (Kind.Q4_0, 4e-2), (Kind.Q4_1, 4e-2)],
)
def test_types_that_the_library_writes_come_back(tmp_path: Path, kind: Kind, error: float) -> None:
    values = weights()
    found = read(write(tmp_path / "a.gguf", gguf.quants.quantize(values, kind), kind))
    assert found.shape == (ROWS, WIDTH) and found.dtype == np.float32
    assert np.abs(found - values).max() <= error
    assert np.corrcoef(found.ravel(), values.ravel())[0, 1] > 0.99


def halves(block: U8) -> float:
    return float(block.view(np.float16)[0])


def q4_k_block(block: U8) -> list[float]:
    """144 bytes, 256 values: d, dmin, 12 bytes of eight 6-bit scales and minima, 128 bytes of nibbles."""
    d, dmin, packed, codes = halves(block[0:2]), halves(block[2:4]), block[4:16].astype(int), block[16:144].astype(int)
    values = []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | ((packed[group - 4] >> 6) << 4)
            minimum = (packed[group + 4] >> 4) | ((packed[group] >> 6) << 4)
        for i in range(32):
            byte = codes[group // 2 * 32 + i]
            values.append(d * scale * (byte >> 4 if group % 2 else byte & 15) - dmin * minimum)
    return values


def q6_k_block(block: U8) -> list[float]:
    """210 bytes, 256 values: 128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales, d."""
    low, high, scales, d = block[:128].astype(int), block[128:192].astype(int), block[192:208].view(np.int8), halves(block[208:])
    values = []
    for i in range(256):
        half, place = divmod(i, 128)
        quarter, column = divmod(place, 32)
        nibble = low[half * 64 + quarter % 2 * 32 + column] >> (4 if quarter >= 2 else 0) & 15
        pair = high[half * 32 + column] >> (2 * quarter) & 3
        values.append(d * int(scales[i // 16]) * ((nibble | pair << 4) - 32))
    return values


@pytest.mark.parametrize(("kind", "size", "decode"), [(Kind.Q4_K, 144, q4_k_block), (Kind.Q6_K, 210, q6_k_block)])
def test_k_types_follow_their_definition(tmp_path: Path, kind: Kind, size: int, decode: object) -> None:
    generator = np.random.default_rng(2)
    blocks = generator.integers(0, 256, (ROWS, size), dtype=np.uint8)
    for place in (0, 2) if kind is Kind.Q4_K else (208,):  # the halves: any bits but NaN and infinity
        scales = generator.normal(0.0, 0.01, ROWS).astype(np.float16)
        blocks[:, place : place + 2] = scales[:, None].view(np.uint8)
    assert callable(decode)
    expected = np.array([decode(block) for block in blocks], np.float32)
    np.testing.assert_allclose(read(write(tmp_path / "k.gguf", blocks, kind)), expected, rtol=1e-5, atol=1e-6)
