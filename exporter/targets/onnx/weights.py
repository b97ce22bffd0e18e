"""One weights file for several ONNX graphs: equal bytes are stored once, whatever name or shape a graph gives them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx_ir as ir

_SMALL = 1024  # bytes; smaller constants stay inside the graph
_PAGE, _LARGE = 4096, 1 << 20  # large tensors start on a page, so that they can be memory-mapped


class WeightsFile:
    """Writes tensors to ``path`` and points initializers at them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets: dict[bytes, int] = {}
        self._file = path.open("wb")

    def externalize(self, model: ir.Model) -> None:
        """Move the model's initializers of 1 KiB and more into the file; equal bytes share one place."""
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            if tensor is None or tensor.nbytes < _SMALL:
                continue
            data = np.ascontiguousarray(tensor.numpy()).tobytes()
            key = hashlib.sha256(data).digest()
            if key not in self._offsets:
                self._offsets[key] = self._write(data)
            value.const_value = ir.ExternalTensor(
                location=self.path.name,
                offset=self._offsets[key],
                length=len(data),
                dtype=tensor.dtype,
                shape=ir.Shape(tensor.numpy().shape),
                name=name,
                base_dir=self.path.parent,
            )

    def _write(self, data: bytes) -> int:
        step = _PAGE if len(data) >= _LARGE else 64
        offset = -(-self._file.tell() // step) * step
        self._file.write(b"\0" * (offset - self._file.tell()))
        self._file.write(data)
        return offset

    def close(self) -> None:
        """Finish the file."""
        self._file.close()
