"""The ExecuTorch engine: what it loads and maps, what it refuses and with which words, and its threads."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import executorch_bundles
import numpy as np
import pytest

from runtime_py.bundle import Bundle
from runtime_py.engines.base import Array
from runtime_py.engines.executorch import ExecutorchEngine
from runtime_py.episodes.history import History
from runtime_py.errors import BundleError, UsageError, WorkError
from runtime_py.manifest import GRAPHS, GraphSignature, TensorSpec


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, small_history: History) -> Bundle:
    return executorch_bundles.executorch_bundle("fp32", tmp_path_factory.getbasetemp(), small_history)


@pytest.fixture(scope="module")
def engine(bundle: Bundle) -> Iterator[ExecutorchEngine]:
    engine = ExecutorchEngine(bundle.path, bundle.manifest, 1)
    yield engine
    engine.close()


def example(signature: GraphSignature) -> dict[str, Array]:
    """Random caches behind which one token is read."""
    rng = np.random.default_rng(0)
    counts = {"n_tokens": 1, "n_prompt": 1, "n_seen": 300, "n_tail": 5}
    inputs: dict[str, Array] = {}
    for spec in signature.inputs:
        if spec.name in counts:
            inputs[spec.name] = np.array([counts[spec.name]], np.int32)
        elif spec.dtype == "int32":
            inputs[spec.name] = rng.integers(0, 200, spec.shape, np.int32)
        else:
            inputs[spec.name] = rng.standard_normal(spec.shape, np.float32)
    return inputs


@pytest.mark.parametrize("graph", GRAPHS)
def test_every_graph_returns_what_the_manifest_promises(bundle: Bundle, engine: ExecutorchEngine, graph: str) -> None:
    signature = bundle.manifest.signatures[graph]
    outputs = engine.run(graph, example(signature))
    found = [TensorSpec(name, array.dtype.name, list(array.shape)) for name, array in outputs.items()]
    assert found == signature.outputs
    assert all(np.isfinite(array).all() for array in outputs.values())


def test_outputs_outlast_the_next_call_of_their_graph(bundle: Bundle, engine: ExecutorchEngine) -> None:
    inputs = example(bundle.manifest.signatures["decode"])
    first = engine.run("decode", inputs)
    kept = {name: array.copy() for name, array in first.items()}
    engine.run("decode", {**inputs, "tokens": inputs["tokens"] + 1})
    assert all(first[name].tobytes() == array.tobytes() for name, array in kept.items())


def test_inputs_may_be_read_only_and_mapped(bundle: Bundle, engine: ExecutorchEngine, tmp_path: Path) -> None:
    inputs = example(bundle.manifest.signatures["decode"])
    mapped: dict[str, Array] = {}
    for name, array in inputs.items():
        array.tofile(tmp_path / name)
        mapped[name] = np.memmap(tmp_path / name, array.dtype, "r", shape=array.shape)
        assert not mapped[name].flags.writeable
    expected, found = engine.run("decode", inputs), engine.run("decode", mapped)
    assert all(found[name].tobytes() == array.tobytes() for name, array in expected.items())


def test_a_closed_engine_loads_again(bundle: Bundle) -> None:
    engine = ExecutorchEngine(bundle.path, bundle.manifest, 1)
    inputs = example(bundle.manifest.signatures["embed"])
    before = engine.run("embed", inputs)["vector"]
    engine.close()
    assert engine.run("embed", inputs)["vector"].tobytes() == before.tobytes()
    engine.close()
    engine.close()


def test_threads_are_those_asked_for(bundle: Bundle) -> None:
    """Engines of different thread counts in turn: a method that outlived its pool would crash, not always at once."""
    from executorch.extension.pybindings import portable_lib

    inputs = {graph: example(bundle.manifest.signatures[graph]) for graph in ("decode", "embed")}
    engines = {threads: ExecutorchEngine(bundle.path, bundle.manifest, threads) for threads in (1, 2)}
    expected = {graph: engines[1].run(graph, inputs[graph]) for graph in inputs}
    for threads in (2, 1, 2, 1):
        for graph in ("decode", "embed", "decode"):
            found = engines[threads].run(graph, inputs[graph])
            assert portable_lib._threadpool_get_thread_count() == threads
            for name in found:
                one, other = (each[name].astype(np.float32) for each in (expected[graph], found))
                np.testing.assert_allclose(other, one, rtol=0, atol=1e-5 * float(np.abs(one).max()))
        assert not engines[3 - threads]._methods
    unset = ExecutorchEngine(bundle.path, bundle.manifest, 0)
    unset.run("embed", inputs["embed"])
    assert portable_lib._threadpool_get_thread_count() == 1
    assert engines[1]._methods
    for engine in (unset, *engines.values()):
        engine.close()


@pytest.mark.parametrize("threads", [-1, 257])
def test_impossible_threads_are_refused(bundle: Bundle, threads: int) -> None:
    with pytest.raises(UsageError, match=f"{threads} threads are not possible: allowed are 1 to 256"):
        bundle.engine("executorch", threads)


@pytest.mark.parametrize("name", ["tokens", "k_0", "tail_v_1", "n_tail"])
def test_wrong_inputs_are_named(bundle: Bundle, engine: ExecutorchEngine, name: str) -> None:
    good = example(bundle.manifest.signatures["decode"])
    array, allowed = good[name], f"{good[name].dtype.name} {list(good[name].shape)}"
    longer, turned = np.concatenate([array] * 2), array.reshape(-1, 1, *array.shape[1:])
    for wrong in (longer, turned, array.astype(np.float64), array.astype(np.int64)):
        said = re.escape(f"input {name} is {wrong.dtype.name} {list(wrong.shape)}; it must be {allowed}")
        with pytest.raises(WorkError, match=f"could not run the graph 'decode': {said}"):
            engine.run("decode", {**good, name: wrong})
    with pytest.raises(WorkError, match=f"input {name} is missing; it must be {re.escape(allowed)}"):
        engine.run("decode", {key: value for key, value in good.items() if key != name})
    engine.run("decode", good)


def damaged_copy(bundle: Bundle, folder: Path, data: bytes | None) -> ExecutorchEngine:
    """An engine over a folder that has only embedder.pte, with ``data`` in it, or nothing."""
    (folder / "executorch").mkdir()
    if data is not None:
        (folder / "executorch" / "embedder.pte").write_bytes(data)
    return ExecutorchEngine(folder, bundle.manifest, 1)


def test_a_missing_file_is_named(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"executorch/embedder\.pte does not exist\. Copy the bundle again"):
        damaged_copy(bundle, tmp_path, None).run("embed", {})


CUT_SHORT = r"is no ExecuTorch program of this runtime's version, or is cut short \(error 0x23\)"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("empty", r"fewer than 64 bytes \(error 0x12\)"),
        ("63 bytes", r"fewer than 64 bytes \(error 0x12\)"),
        ("half", CUT_SHORT),
        ("all but a byte", CUT_SHORT),
        ("garbage", CUT_SHORT),
        ("another version", CUT_SHORT),
        ("tables overwritten", CUT_SHORT),
        ("second half zero", r"XNNPACK delegate's part of the program is damaged.* \(error 0x30\)"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(bundle: Bundle, tmp_path: Path, damage: str, reason: str) -> None:
    data = (bundle.path / "executorch" / "embedder.pte").read_bytes()
    half = len(data) // 2
    changed = {
        "empty": b"",
        "63 bytes": data[:63],
        "half": data[:half],
        "all but a byte": data[:-1],
        "garbage": b"not a program. " * 10_000,
        "another version": data[:4] + b"ET99" + data[8:],
        "tables overwritten": data[:64] + b"\xff" * 4096 + data[4160:],
        "second half zero": data[:half] + bytes(len(data) - half),
    }
    engine = damaged_copy(bundle, tmp_path, changed[damage])
    for _ in range(2):  # a refused program is not kept
        with pytest.raises(BundleError, match=rf"'embed' of .*embedder\.pte cannot be loaded: .*{reason}\. The bundle needs"):
            engine.run("embed", {})


def test_a_program_without_the_graph_is_refused(bundle: Bundle) -> None:
    manifest, target = bundle.manifest, bundle.manifest.targets["executorch"]
    graphs = {**target.graphs, "decode": target.graphs["embed"]}
    swapped = dataclasses.replace(manifest, targets={"executorch": dataclasses.replace(target, graphs=graphs)})
    engine = ExecutorchEngine(bundle.path, swapped, 1)
    with pytest.raises(BundleError, match=r"'decode' of .*embedder\.pte cannot be loaded: the program has no such method"):
        engine.run("decode", {})
    engine.close()


MAPPED = """
import re, sys
from pathlib import Path
import numpy as np
from runtime_py.engines.executorch import ExecutorchEngine
from runtime_py.manifest import Manifest

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

folder = Path(sys.argv[1])
manifest = Manifest.read(folder / "manifest.json")
engine = ExecutorchEngine(folder, manifest, 1)
# The libraries and the pool are in memory after a first run of the other program.
engine.run("embed", {spec.name: np.ones(spec.shape, spec.dtype) for spec in manifest.signatures["embed"].inputs})
before = anonymous()
engine._load(folder / "executorch" / "model.pte")
loaded = anonymous()
engine._method("decode")
print(loaded - before, anonymous() - loaded)
"""


def test_a_program_is_mapped_and_each_method_packs_its_products_once(bundle: Bundle) -> None:
    """Memory of its own that a process takes: next to nothing for the program, and for a method what its delegate packs.

    The embedding, read where it is mapped, is never copied. In this runtime each further method packs a copy of its own.
    """
    done = subprocess.run(
        [sys.executable, "-c", MAPPED, str(bundle.path)],
        capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    program, method = map(int, done.stdout.split())
    size = (bundle.path / "executorch" / "model.pte").stat().st_size
    shape = bundle.manifest.shape
    embedding = 4 * shape.vocab_size * shape.hidden
    assert program < 16 << 20
    assert method < size - embedding + (32 << 20)
