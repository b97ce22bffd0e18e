"""safetensors files, written whole and read by memory mapping, with a header check fit for files from strangers.

Format: 8 bytes of header length (little endian), a JSON header padded with spaces, then the tensors back to back
(https://huggingface.co/docs/safetensors). The header is padded here so that the data start at a multiple of 64 bytes;
the safetensors library pads to 8 only, which is why it is not used for writing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime_py.errors import BundleError, UsageError
from runtime_py.files import atomic_file

Array = NDArray[Any]
ALIGNMENT = 64
_MAX_HEADER = 100_000_000  # the limit of the safetensors library
_MAX_DIMENSIONS = 16
_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in {
        "F64": "<f8", "F32": "<f4", "F16": "<f2", "I8": "i1", "U8": "u1", "I32": "<i4", "I64": "<i8",
    }.items()
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def write_tensors(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> str:
    """Write ``tensors`` as one safetensors file, atomically, and return its hexadecimal SHA-256.

    Raises ``UsageError`` for a dtype outside F64 F32 F16 I8 U8 I32 I64, ``WorkError`` when there is no space.
    """
    arrays = {name: np.asarray(tensor) for name, tensor in tensors.items()}
    for name, array in arrays.items():
        if array.dtype.newbyteorder("<") not in _NAMES or name == "__metadata__":
            raise UsageError(
                f"Tensor {name!r} of {array.dtype} cannot be stored; allowed are {', '.join(_DTYPES)} "
                "and any name but '__metadata__'. Convert or rename it."
            )
    # Whole multiples of the alignment first, then wide dtypes: so every tensor is aligned to its dtype and most to 64.
    order = sorted(arrays, key=lambda n: (arrays[n].nbytes % ALIGNMENT != 0, -arrays[n].dtype.itemsize, n))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        array = arrays[name]
        end = offset + array.nbytes
        dtype = _NAMES[array.dtype.newbyteorder("<")]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    digest = hashlib.sha256()
    with atomic_file(path, 8 + len(text) + offset) as file:
        for piece in (len(text).to_bytes(8, "little"), text):
            digest.update(piece)
            file.write(piece)
        for name in order:
            data = np.ascontiguousarray(arrays[name], arrays[name].dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
            digest.update(data.data)
            file.write(data.data)
    return digest.hexdigest()


def map_tensors(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """Map ``path`` and return its tensors and metadata; nothing is copied.

    Tensors are read-only, C-contiguous ``np.memmap`` views into one mapping (a plain array where a tensor is empty),
    aligned to their dtype. Every number of the header is checked before it is used. Raises ``BundleError`` naming the
    file and the tensor.
    """
    try:
        size = path.stat().st_size
        if size < 8:
            raise BundleError(_damaged(path, f"it has {size} bytes, fewer than a header"))
        mapped = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read ({error}). Copy the whole folder again, or build it anew.") from None
    length = int.from_bytes(mapped[:8].tobytes(), "little")
    if length > min(len(mapped) - 8, _MAX_HEADER):
        raise BundleError(_damaged(path, f"a header of {length} bytes does not fit a file of {len(mapped)}"))
    header = _parse_header(path, mapped[8 : 8 + length].tobytes())
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BundleError(_damaged(path, "__metadata__ is not an object of strings"))
    data = mapped[8 + length :]
    spans = {name: _check_entry(path, name, entry, len(data)) for name, entry in header.items()}
    _check_cover(path, spans, len(data))
    return {name: _view(path, name, data, entry, spans[name]) for name, entry in header.items()}, metadata


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise BundleError(_damaged(path, f"the header has the key {key!r} twice"))
            found[key] = value
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise BundleError(_damaged(path, "its header is not JSON")) from None
    if not isinstance(header, dict):
        raise BundleError(_damaged(path, f"its header is {type(header).__name__}, not an object"))
    return header


def _check_entry(path: Path, name: str, entry: Any, n_bytes: int) -> tuple[int, int]:
    """The byte range of one tensor, after checking every field of its entry."""

    def wrong(what: str) -> BundleError:
        return BundleError(_damaged(path, f"tensor {name!r}: {what}"))

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise wrong("dtype, shape and data_offsets are expected, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise wrong(f"dtype is {_short(dtype)}; allowed are {', '.join(_DTYPES)}")
    if not _are_counts(shape) or len(shape) > _MAX_DIMENSIONS or any(n >= 1 << 48 for n in shape):
        raise wrong(f"shape is {_short(shape)}; at most {_MAX_DIMENSIONS} numbers from 0 to 2^48 are allowed")
    if not _are_counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= n_bytes:
        raise wrong(f"data_offsets are {_short(offsets)}; allowed are 0 to {n_bytes}, the first not above the second")
    start, end = offsets
    if math.prod(shape) * _DTYPES[dtype].itemsize != end - start:
        raise wrong(f"{dtype} of shape {_short(shape)} does not take {end - start} bytes")
    return start, end


def _check_cover(path: Path, spans: Mapping[str, tuple[int, int]], n_bytes: int) -> None:
    """Tensors lie back to back, without overlap or gap, to the last byte."""
    position = 0
    for name, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        if start != position:
            relation = "overlaps the tensor before it" if start < position else "leaves a gap before it"
            raise BundleError(_damaged(path, f"tensor {name!r}: starts at {start}, which {relation}"))
        position = end
    if position != n_bytes:
        raise BundleError(_damaged(path, f"its tensors end at byte {position} of {n_bytes}"))


def _view(path: Path, name: str, data: Array, entry: dict[str, Any], span: tuple[int, int]) -> Array:
    try:
        view = data[span[0] : span[1]].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    except ValueError as error:
        shape = _short(entry["shape"])
        raise BundleError(_damaged(path, f"tensor {name!r}: shape {shape} is impossible ({error})")) from None
    if not view.flags.aligned:
        raise BundleError(_damaged(path, f"tensor {name!r}: its data are not aligned to {entry['dtype']}"))
    return view


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _damaged(path: Path, what: str) -> str:
    return f"{path} is damaged: {what}. Copy the whole folder again, or build it anew."
