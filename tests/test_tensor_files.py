"""Tensor files: what we write the library reads, what we map is not copied, and no header can hurt."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from runtime_py.errors import BundleError, UsageError, WorkError
from runtime_py.tensor_files import ALIGNMENT, Array, map_tensors, write_tensors

DTYPES = ("<f8", "<f4", "<f2", "i1", "u1", "<i4", "<i8")


@pytest.fixture
def tensors() -> dict[str, Array]:
    rng = np.random.default_rng(5)
    found: dict[str, Array] = {f"t_{code[-2:]}": rng.integers(0, 100, (3, 5)).astype(code) for code in DTYPES}
    found["k_0"] = rng.standard_normal((2, 8, 16), np.float32)
    found["empty"] = np.zeros((0, 7), np.float32)
    found["scalar"] = np.array(3, np.int32)
    found["odd"] = np.arange(5, dtype=np.uint8)
    found["transposed"] = rng.standard_normal((6, 4)).T
    found["big endian"] = np.arange(4, dtype=">i4")
    return found


def equal(first: Array, second: Array) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype.newbyteorder("<") and np.array_equal(first, second)


def test_the_library_reads_what_we_write(tmp_path: Path, tensors: dict[str, Array]) -> None:
    path = tmp_path / "a.safetensors"
    digest = write_tensors(path, tensors, {"n_seen": "12", "ü": "한국"})
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    loaded = safetensors.numpy.load_file(path)
    assert set(loaded) == set(tensors) and all(equal(loaded[name], tensors[name]) for name in tensors)
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() == {"n_seen": "12", "ü": "한국"}


def test_mapping_copies_nothing_and_is_aligned(tmp_path: Path, tensors: dict[str, Array]) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, tensors, {"x": "y"})
    mapped, metadata = map_tensors(path)
    assert metadata == {"x": "y"} and set(mapped) == set(tensors)
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert start % ALIGNMENT == 0
    roots = set()
    for name, view in mapped.items():
        assert equal(view, tensors[name]), name
        assert view.flags.c_contiguous and view.flags.aligned and not view.flags.writeable
        if view.size:  # numpy gives an empty slice of a mapping as a plain array
            assert isinstance(view, np.memmap)
            roots.add(id(view._mmap))  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
    assert len(roots) == 1, "one mapping for the whole file"
    assert mapped["k_0"].ctypes.data % ALIGNMENT == 0


def test_every_cache_tensor_is_aligned_for_engines(tmp_path: Path) -> None:
    tensors: dict[str, Array] = {}
    for layer, rows in enumerate((8, 24, 72)):
        tensors[f"k_{layer}"] = np.zeros((3, rows, 64), np.float32)
        tensors[f"v_{layer}"] = np.zeros((3, rows, 64), np.float32)
        tensors[f"src_{layer}"] = np.zeros((3, rows), np.int32)
    write_tensors(tmp_path / "a", tensors, {})
    mapped, _ = map_tensors(tmp_path / "a")
    assert all(view.ctypes.data % ALIGNMENT == 0 for name, view in mapped.items() if not name.startswith("src"))


def test_files_of_the_library_and_empty_files_are_read(tmp_path: Path, tensors: dict[str, Array]) -> None:
    path = tmp_path / "a.safetensors"
    native = {name: np.ascontiguousarray(t, t.dtype.newbyteorder("<")).reshape(t.shape) for name, t in tensors.items()}
    safetensors.numpy.save_file(native, path, {"a": "b"})
    mapped, metadata = map_tensors(path)
    assert metadata == {"a": "b"} and all(equal(mapped[name], tensors[name]) for name in tensors)
    write_tensors(path, {}, {})
    assert map_tensors(path) == ({}, {}) and safetensors.numpy.load_file(path) == {}


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    for array in (np.zeros(2, np.complex64), np.zeros(2, bool), np.array(["a"])):
        with pytest.raises(UsageError, match="'x'"):
            write_tensors(tmp_path / "a", {"x": array}, {})
    with pytest.raises(UsageError, match="__metadata__"):
        write_tensors(tmp_path / "a", {"__metadata__": np.zeros(2)}, {})
    with pytest.raises(WorkError, match="not an existing folder"):
        write_tensors(tmp_path / "no" / "a", {"x": np.zeros(2)}, {})
    assert list(tmp_path.iterdir()) == []


def save(path: Path, header: Any, data: bytes = bytes(16), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD_HEADERS: dict[str, tuple[Any, str]] = {
    "unknown dtype": ({"x": entry("BF16")}, "'x'.*BF16"),
    "dtype of another type": ({"x": entry(["F32"])}, "'x'"),
    "negative dimension": ({"x": entry(shape=[-4])}, "'x'.*shape"),
    "two negative dimensions": ({"x": entry(shape=[-2, -2])}, "'x'.*shape"),
    "float dimension": ({"x": entry(shape=[4.0])}, "'x'.*shape"),
    "true as a dimension": ({"x": entry("U8", [True], [0, 1])}, "'x'.*shape"),
    "huge dimensions": ({"x": entry(shape=[2**62, 4])}, "'x'"),
    "huge dimensions and a zero": ({"x": entry(shape=[0, 2**40, 2**40, 2**40], offsets=[0, 0])}, "'x'|tensors end"),
    "many dimensions": ({"x": entry(shape=[1] * 100)}, "'x'"),
    "endless number": (b'{"x":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,16]}}', "not JSON"),
    "shape and bytes differ": ({"x": entry(shape=[5])}, "'x'.*does not take 16 bytes"),
    "end outside": ({"x": entry(shape=[8], offsets=[0, 32])}, "'x'.*data_offsets"),
    "negative offset": ({"x": entry(offsets=[-16, 0])}, "'x'.*data_offsets"),
    "offsets turned round": ({"x": entry(offsets=[16, 0])}, "'x'.*data_offsets"),
    "three offsets": ({"x": entry(offsets=[0, 16, 16])}, "'x'.*data_offsets"),
    "overlap": ({"x": entry(), "y": entry(shape=[2], offsets=[8, 16])}, "'y'.*overlaps"),
    "same place twice": ({"x": entry(), "y": entry()}, "overlaps"),
    "gap": ({"x": entry(shape=[1], offsets=[0, 4]), "y": entry(shape=[2], offsets=[8, 16])}, "'y'.*gap"),
    "bytes nobody owns": ({"x": entry(shape=[2], offsets=[0, 8])}, "end at byte 8 of 16"),
    "misaligned": ({"x": entry("U8", [1], [0, 1]), "y": entry(shape=[3], offsets=[1, 13])}, "tensors end|aligned"),
    "missing field": ({"x": {"dtype": "F32", "shape": [4]}}, "'x'"),
    "extra field": ({"x": {**entry(), "more": 1}}, "'x'"),
    "entry is a list": ({"x": [1]}, "'x'"),
    "not an object": ([1, 2], "list"),
    "not JSON": (b"{", "not JSON"),
    "not UTF-8": (b'{"\xff": 1}', "not JSON"),
    "deep nesting": (b"[" * 200_000, "not JSON"),
    "duplicate tensor": (
        b'{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
        "'x' twice",
    ),
    "duplicate field": (b'{"x":{"dtype":"F32","dtype":"I32","shape":[4],"data_offsets":[0,16]}}', "'dtype' twice"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "x": entry()}, "__metadata__"),
    "metadata is a list": ({"__metadata__": [], "x": entry()}, "__metadata__"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_headers_are_refused_by_name(tmp_path: Path, name: str) -> None:
    header, words = BAD_HEADERS[name]
    path = save(tmp_path / "bad.safetensors", header)
    with pytest.raises(BundleError, match=words) as caught:
        map_tensors(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 500


def test_misaligned_data_are_refused(tmp_path: Path) -> None:
    header = {"x": entry("U8", [1], [0, 1]), "y": entry(shape=[3], offsets=[1, 13])}
    with pytest.raises(BundleError, match=r"'y'.*aligned"):
        map_tensors(save(tmp_path / "a", header, bytes(13)))


@pytest.mark.parametrize("length", [17, 2**31, 2**63, 2**64 - 1])
def test_absurd_header_lengths_are_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(BundleError, match=f"header of {length} bytes"):
        map_tensors(save(tmp_path / "a", b"", length=length))


def test_missing_and_cut_files_are_refused(tmp_path: Path, tensors: dict[str, Array]) -> None:
    with pytest.raises(BundleError, match="missing"):
        map_tensors(tmp_path / "missing")
    with pytest.raises(BundleError, match="cannot be read"):
        map_tensors(tmp_path)
    path = tmp_path / "a"
    write_tensors(path, tensors, {})
    data = path.read_bytes()
    for size in (0, 1, 7, 8, 9, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(BundleError):
            map_tensors(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(BundleError, match="end at byte"):
        map_tensors(path)


def test_corrupted_headers_raise_nothing_but_bundle_errors(tmp_path: Path, tensors: dict[str, Array]) -> None:
    path = tmp_path / "a"
    write_tensors(path, tensors, {"n_seen": "12"})
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    rng, refused = random.Random(42), 0
    for _ in range(4000):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            position = rng.randrange(end)
            kind = rng.randrange(4)
            if kind == 0:
                changed[position] ^= 1 << rng.randrange(8)
            elif kind == 1:
                changed[position] = rng.choice(b'0123456789-,:{}[]". eE')
            elif kind == 2:
                del changed[position : position + rng.randrange(1, 9)]
            else:
                changed[position:position] = rng.choice((b"9" * 30, b"-", b"[", b"null", b"1e9", b"\\u0000", b"\0"))
        path.write_bytes(changed)
        try:
            mapped, _ = map_tensors(path)
        except BundleError:
            refused += 1
        else:
            assert sum(view.nbytes for view in mapped.values()) <= len(changed)
    assert refused > 3000
