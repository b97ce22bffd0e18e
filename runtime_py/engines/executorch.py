"""ExecuTorch with XNNPACK: the file that a phone loads, called as the stock Android ``Module`` calls it.

Inputs are tensors only and are taken by pointer; outputs are planned inside the program and copied out by the runtime.
"""

from __future__ import annotations

import importlib.metadata
import re
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from runtime_py.engines.base import Array
from runtime_py.engines.requirements import check_threads, check_version
from runtime_py.errors import BundleError, WorkError
from runtime_py.manifest import GraphSignature, Manifest

# executorch/runtime/core/error.h, and what each code was measured to mean for the person who sees it
_REASONS = {
    0x01: "an internal check of the runtime failed; the program may be damaged",
    0x10: "an input has another shape than the program expects, or the runtime lacks a feature of the program",
    0x12: "an input is missing or of another type, the program has no such method, or its file has fewer than 64 bytes",
    0x14: "the runtime lacks an operator of the program: link the quantised and optimised kernels",
    0x20: "the runtime was built without XNNPACK: link its delegate",
    0x21: "there is not enough memory for the program",
    0x22: "the file cannot be read: the path is wrong or access is not allowed",
    0x23: "the file is no ExecuTorch program of this runtime's version, or is cut short",
    0x25: "the runtime is out of resources",
    0x30: "the XNNPACK delegate's part of the program is damaged, or made for another version of it",
    0x31: "there is not enough memory for the XNNPACK delegate",
    0x32: "the XNNPACK delegate has been released",
}


class ExecutorchEngine:
    """Runs the ``executorch`` target. ``threads`` 0 leaves the thread pool as it is.

    A process has one pool. An engine that asks for another number of threads than it has unloads all other engines, which
    load again when they next run; so engines of different thread counts must not run at the same time.
    """

    name = "executorch"
    _engines: ClassVar[weakref.WeakSet[ExecutorchEngine]] = weakref.WeakSet()

    def __init__(self, folder: Path, manifest: Manifest, threads: int = 0) -> None:
        check_threads(threads)
        installed = importlib.metadata.version("executorch")
        check_version(folder, self.name, manifest.targets[self.name].minimum_runtime, "executorch", installed)
        self._folder, self._manifest, self._threads = folder, manifest, threads
        self._methods: dict[str, Any] = {}
        self._programs: dict[Path, Any] = {}
        self._engines.add(self)

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
            from executorch.runtime import Runtime

            self._set_threads()
            self._programs[path] = Runtime.get().load_program(path)  # maps the file
        return self._programs[path]

    def _set_threads(self) -> None:
        from executorch.extension.pybindings import portable_lib

        if self._threads in (0, portable_lib._threadpool_get_thread_count()):
            return
        for engine in list(self._engines):
            engine.close()  # a loaded method keeps the address of the pool, which is about to be freed
        portable_lib._unsafe_reset_threadpool(self._threads)

    def run(self, graph: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """See ``Engine.run``."""
        import torch

        method, signature = self._method(graph), self._manifest.signatures[graph]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # mapped caches are read-only, and no graph writes its inputs
            given = [torch.from_numpy(np.asarray(inputs[spec.name])) for spec in signature.inputs if spec.name in inputs]
        try:
            outputs = method.execute(given)
        except RuntimeError as error:
            reason = _misfit(signature, inputs) or _reason(error)
            raise WorkError(f"executorch could not run the graph {graph!r}: {reason}.") from error
        return _named(signature, outputs)

    def close(self) -> None:
        """See ``Engine.close``."""
        self._methods.clear()
        self._programs.clear()


def _named(signature: GraphSignature, outputs: Any) -> dict[str, Array]:
    found = [tensor.numpy() for tensor in outputs]
    if [(a.dtype.name, list(a.shape)) for a in found] != [(s.dtype, s.shape) for s in signature.outputs]:
        raise BundleError(
            f"The program gave {len(found)} outputs that are not the {len(signature.outputs)} of manifest.json. "
            "Copy the bundle again, or build it anew."
        )
    return {spec.name: array for spec, array in zip(signature.outputs, found, strict=True)}


def _misfit(signature: GraphSignature, inputs: Mapping[str, Array]) -> str | None:
    """The first input that is not what the graph takes; the runtime's error has no name in it."""
    for spec in signature.inputs:
        array = inputs.get(spec.name)
        if array is None or (array.dtype.name, list(array.shape)) != (spec.dtype, spec.shape):
            found = "missing" if array is None else f"{array.dtype.name} {list(array.shape)}"
            return f"input {spec.name} is {found}; it must be {spec.dtype} {spec.shape}"
    return None


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return "the program has no such method"
    found = re.search(r"0x:?([0-9a-fA-F]+)", str(error))  # some of the binding's messages have a colon there
    if found is None:
        return str(error)
    code = int(found[1], 16)
    return f"{_REASONS.get(code, 'an unknown reason')} (error {code:#04x})"


def _load_error(path: Path, graph: str, error: BaseException, manifest: Manifest) -> str:
    if not path.is_file():
        return f"{path} does not exist. Copy the bundle again, or build it anew."
    needed = manifest.targets["executorch"].minimum_runtime
    return f"The graph {graph!r} of {path} cannot be loaded: {_reason(error)}. The bundle needs {needed} or newer."
