"""ExecuTorch with XNNPACK: the file that a phone loads, called as the stock Android ``Module`` calls it.

Inputs are tensors only and are taken by pointer; outputs are planned inside the program and copied out by the runtime.
"""

from __future__ import annotations

import importlib.metadata
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from runtime_py.engines.base import Array
from runtime_py.engines.requirements import check_threads, check_version
from runtime_py.errors import BundleError, WorkError
from runtime_py.manifest import GraphSignature, Manifest

# executorch/runtime/core/error.h: what a load error means for the person who sees it
_REASONS = {
    0x01: "an internal check of the runtime failed; the program may be damaged",
    0x10: "the runtime does not support a feature of the program",
    0x12: "an input has another shape or type than the program expects",
    0x14: "the runtime lacks an operator of the program: link the quantised and optimised kernels",
    0x20: "a method or a file was not found",
    0x21: "there is not enough memory for the program",
    0x22: "the file cannot be read: the path is wrong or access is not allowed",
    0x23: "the file is no ExecuTorch program of this runtime's version, or is cut short",
    0x25: "the runtime is out of resources",
    0x30: "the runtime was built without XNNPACK, or with another version of it",
    0x31: "there is not enough memory for the XNNPACK delegate",
    0x32: "the XNNPACK delegate's data is damaged",
}


class ExecutorchEngine:
    """Runs the ``executorch`` target. ``threads`` 0 leaves the thread pool as it is."""

    name = "executorch"

    def __init__(self, folder: Path, manifest: Manifest, threads: int = 0) -> None:
        check_threads(threads)
        installed = importlib.metadata.version("executorch")
        check_version(folder, self.name, manifest.targets[self.name].minimum_runtime, "executorch", installed)
        self._folder, self._manifest, self._threads = folder, manifest, threads
        self._methods: dict[str, Any] = {}
        self._programs: dict[Path, Any] = {}

    def _method(self, graph: str) -> Any:
        if graph not in self._methods:
            path = self._folder / self._manifest.targets[self.name].graphs[graph]
            try:
                self._methods[graph] = self._load(path).load_method("forward" if graph == "embed" else graph)
            except (RuntimeError, KeyError) as error:
                raise BundleError(_load_error(path, graph, error, self._manifest)) from error
        return self._methods[graph]

    def _load(self, path: Path) -> Any:
        if path not in self._programs:
            import executorch.kernels.quantized  # noqa: F401  (registers the kernels that embeddings of 8 bits need)
            from executorch.extension.pybindings import portable_lib
            from executorch.runtime import Runtime

            if self._threads > 0:
                portable_lib._unsafe_reset_threadpool(self._threads)
            self._programs[path] = Runtime.get().load_program(path)  # maps the file
        return self._programs[path]

    def run(self, graph: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See ``Engine.run``."""
        import torch

        method, signature = self._method(graph), self._manifest.signatures[graph]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # mapped caches are read-only, and no graph writes its inputs
            tensors = [torch.from_numpy(np.asarray(inputs[spec.name])) for spec in signature.inputs]
        try:
            outputs = method.execute(tensors)
        except RuntimeError as error:
            raise WorkError(f"executorch could not run the graph {graph!r}: {_reason(error)}.") from error
        return _named(signature, outputs)

    def close(self) -> None:
        """See ``Engine.close``."""
        self._methods.clear()
        self._programs.clear()


def _named(signature: GraphSignature, outputs: Any) -> dict[str, Array]:
    return {spec.name: tensor.numpy() for spec, tensor in zip(signature.outputs, outputs, strict=True)}


def _reason(error: BaseException) -> str:
    found = re.search(r"0x([0-9a-fA-F]+)", str(error)) or re.search(r"error[: ]+(\d+)", str(error))
    if found is None:
        return str(error)
    code = int(found[1], 16 if found[0].startswith("0x") else 10)
    return f"{_REASONS.get(code, 'an unknown reason')} (error {code:#x})"


def _load_error(path: Path, graph: str, error: BaseException, manifest: Manifest) -> str:
    if not path.is_file():
        return f"{path} does not exist. Copy the bundle again, or build it anew."
    needed = manifest.targets["executorch"].minimum_runtime
    return f"The graph {graph!r} of {path} cannot be loaded: {_reason(error)}. The bundle needs {needed} or newer."
