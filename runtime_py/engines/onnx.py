"""ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from runtime_py.engines.base import Array
from runtime_py.errors import BundleError, WorkError
from runtime_py.manifest import Manifest, graph_weights


class OnnxEngine:
    """Runs the ``onnx`` target; sessions are created on first use. ``threads`` 0 lets ONNX Runtime choose."""

    name = "onnx"

    def __init__(self, folder: Path, manifest: Manifest, threads: int = 0) -> None:
        self._folder, self._manifest, self._threads = folder, manifest, threads
        self._sessions: dict[str, ort.InferenceSession] = {}

    def _session(self, graph: str) -> ort.InferenceSession:
        if graph not in self._sessions:
            path = self._folder / self._manifest.targets[self.name].graphs[graph]
            try:
                self._sessions[graph] = ort.InferenceSession(str(path), self._options(graph), providers=["CPUExecutionProvider"])
            except Exception as error:  # ONNX Runtime's exception types share no base but Exception
                raise BundleError(
                    f"{path} cannot be loaded by onnxruntime {ort.__version__} ({error}). The bundle needs "
                    f"{self._manifest.targets[self.name].minimum_runtime} or newer; check it with `exporter verify`."
                ) from error
        return self._sessions[graph]

    def _options(self, graph: str) -> ort.SessionOptions:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.log_severity_level = 3
        if graph_weights(self._manifest.plan, self._manifest.embedder)[graph] == "fp32":
            # Prepacking would copy every weight; without it they stay in the mapped file.
            options.add_session_config_entry("session.disable_prepacking", "1")
        return options

    def run(self, graph: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See ``Engine.run``. ONNX Runtime reads contiguous numpy arrays in place."""
        session = self._session(graph)
        try:
            outputs = session.run(None, dict(inputs))
        except Exception as error:
            raise WorkError(f"onnxruntime could not run the graph {graph!r}: {error}") from error
        names = [output.name for output in session.get_outputs()]
        return {name: np.asarray(value) for name, value in zip(names, outputs, strict=True)}

    def close(self) -> None:
        """See ``Engine.close``."""
        self._sessions.clear()
