"""ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from runtime_py.engines.base import Array
from runtime_py.engines.requirements import check_threads, check_version
from runtime_py.errors import BundleError, WorkError
from runtime_py.manifest import Manifest, graph_weights

_TYPES = {"float": "float32", "double": "float64"}  # ONNX Runtime's names where numpy's differ


class OnnxEngine:
    """Runs the ``onnx`` target; sessions are created on first use. ``threads`` 0 lets ONNX Runtime choose.

    Raises ``BundleError`` when the bundle needs a newer ONNX Runtime, or a graph is not what the manifest says.
    """

    name = "onnx"

    def __init__(self, folder: Path, manifest: Manifest, threads: int = 0) -> None:
        check_threads(threads)
        self._folder, self._manifest, self._threads = folder, manifest, threads
        self._sessions: dict[str, ort.InferenceSession] = {}
        check_version(folder, self.name, manifest.targets[self.name].minimum_runtime, "onnxruntime", ort.__version__)

    def _session(self, graph: str) -> ort.InferenceSession:
        if graph not in self._sessions:
            path = self._folder / self._manifest.targets[self.name].graphs[graph]
            try:
                session = ort.InferenceSession(str(path), self._options(graph), providers=["CPUExecutionProvider"])
            except Exception as error:  # ONNX Runtime's exception types share no base but Exception
                raise BundleError(
                    f"{path} cannot be loaded by onnxruntime {ort.__version__} ({error}). The bundle needs "
                    f"{self._manifest.targets[self.name].minimum_runtime} or newer; check it with `exporter verify`."
                ) from error
            self._check_signature(path, graph, session)
            self._sessions[graph] = session
        return self._sessions[graph]

    def _check_signature(self, path: Path, graph: str, session: ort.InferenceSession) -> None:
        signature = self._manifest.signatures[graph]
        for kind, specs, values in (
            ("input", signature.inputs, session.get_inputs()),
            ("output", signature.outputs, session.get_outputs()),
        ):
            promised = {spec.name: (spec.dtype, spec.shape) for spec in specs}
            found = {value.name: (_dtype(value.type), list(value.shape)) for value in values}
            for name in sorted(promised.keys() | found.keys()):
                if promised.get(name) != found.get(name):
                    raise BundleError(
                        f"{path}: {kind} {name} is {_described(found.get(name))}, manifest.json says "
                        f"{_described(promised.get(name))}. Copy the bundle again, or build it anew."
                    )

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


def _dtype(name: str) -> str:
    """numpy's name for ``tensor(float)`` and the like."""
    inner = name.removeprefix("tensor(").removesuffix(")")
    return _TYPES.get(inner, inner)


def _described(value: tuple[str, list[int]] | None) -> str:
    return f"{value[0]} {value[1]}" if value else "not there"
