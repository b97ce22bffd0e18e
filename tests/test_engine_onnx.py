"""The ONNX Runtime engine: what it loads, what it refuses, and that it reads its inputs where they lie."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from bundle_fixtures import copy_bundle, replace_file

from runtime_py.bundle import Bundle
from runtime_py.engines.base import Array
from runtime_py.engines.onnx import OnnxEngine
from runtime_py.errors import BundleError, UsageError, WorkError
from runtime_py.manifest import GRAPHS, GraphSignature, Manifest, TensorSpec


@pytest.fixture(scope="module")
def engine(small_bundle: Bundle) -> Iterator[OnnxEngine]:
    engine = OnnxEngine(small_bundle.path, small_bundle.manifest, 1)
    yield engine
    engine.close()


def example(signature: GraphSignature, seed: int = 0) -> dict[str, Array]:
    """Random caches behind which one token is read."""
    rng = np.random.default_rng(seed)
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
def test_every_graph_returns_what_the_manifest_promises(small_bundle: Bundle, engine: OnnxEngine, graph: str) -> None:
    signature = small_bundle.manifest.signatures[graph]
    outputs = engine.run(graph, example(signature))
    found = [TensorSpec(name, array.dtype.name, list(array.shape)) for name, array in outputs.items()]
    assert found == signature.outputs
    assert all(np.isfinite(array).all() for array in outputs.values())


def test_inputs_may_be_read_only_and_mapped(small_bundle: Bundle, engine: OnnxEngine, tmp_path: Path) -> None:
    inputs = example(small_bundle.manifest.signatures["decode"])
    mapped: dict[str, Array] = {}
    for name, array in inputs.items():
        array.tofile(tmp_path / name)
        mapped[name] = np.memmap(tmp_path / name, array.dtype, "r", shape=array.shape)
        assert not mapped[name].flags.writeable
    expected, found = engine.run("decode", inputs), engine.run("decode", mapped)
    assert all(found[name].tobytes() == array.tobytes() for name, array in expected.items())


NO_COPY = """
import resource, sys
from pathlib import Path
import numpy as np
from runtime_py.engines.onnx import OnnxEngine
from runtime_py.manifest import GraphSignature, Manifest, Target, TensorSpec
import dataclasses

folder, rows = Path(sys.argv[1]), int(sys.argv[2])
manifest = Manifest.read(folder / "manifest.json")
signature = GraphSignature([TensorSpec("k", "float32", [rows, 64])], [TensorSpec("first", "float32", [1, 64])])
target = dataclasses.replace(manifest.targets["onnx"], graphs={"decode": "first.onnx"})
manifest = dataclasses.replace(manifest, targets={"onnx": target}, signatures={"decode": signature})
engine = OnnxEngine(folder, manifest, 1)
engine.run("decode", {"k": np.zeros((rows, 64), np.float32)[:rows]})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
mapped = np.memmap(folder / "rows", np.float32, "r", shape=(rows, 64))
outputs = engine.run("decode", {"k": mapped})
assert float(outputs["first"].sum()) == 0.0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_mapped_input_is_read_where_it_lies(small_bundle: Bundle, tmp_path: Path) -> None:
    """A graph that reads one row of 256 MB: a copy of the input would have to read, and hold, all of them."""
    import onnx
    from onnx import TensorProto, helper

    rows = (256 << 20) // 256
    node = helper.make_node("Slice", ["k", "zero", "one", "zero"], ["first"])
    constants = [helper.make_tensor(n, TensorProto.INT64, [1], [v]) for n, v in (("zero", 0), ("one", 1))]
    k = helper.make_tensor_value_info("k", TensorProto.FLOAT, [rows, 64])
    first = helper.make_tensor_value_info("first", TensorProto.FLOAT, [1, 64])
    graph = helper.make_graph([node], "first", [k], [first], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "first.onnx")
    (tmp_path / "manifest.json").write_text(small_bundle.manifest.to_json(), encoding="utf-8")
    with (tmp_path / "rows").open("wb") as file:
        file.truncate(rows * 256)  # without blocks on the disk
    command = [sys.executable, "-c", NO_COPY, str(tmp_path), str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16 << 10  # KiB on Linux


def test_a_closed_engine_loads_again(small_bundle: Bundle) -> None:
    engine = OnnxEngine(small_bundle.path, small_bundle.manifest, 1)
    inputs = example(small_bundle.manifest.signatures["decode"])
    before = engine.run("decode", inputs)["logits"]
    engine.close()
    assert not engine._sessions
    assert engine.run("decode", inputs)["logits"].tobytes() == before.tobytes()
    engine.close()
    engine.close()


def test_threads_are_passed_on(small_bundle: Bundle, engine: OnnxEngine) -> None:
    other = small_bundle.engine("onnx", threads=2)
    assert isinstance(other, OnnxEngine)
    inputs = example(small_bundle.manifest.signatures["query"])
    found, expected = (e.run("query", inputs)["logits"].astype(np.float32) for e in (other, engine))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))
    assert [e._sessions["query"].get_session_options().intra_op_num_threads for e in (engine, other)] == [1, 2]
    other.close()


@pytest.mark.parametrize("threads", [-1, 257, 10**12])
def test_impossible_threads_are_refused(small_bundle: Bundle, threads: int) -> None:
    with pytest.raises(UsageError, match=f"{threads} threads are not possible: allowed are 1 to 256"):
        small_bundle.engine("onnx", threads)


@pytest.mark.parametrize("name", ["tokens", "k_0", "tail_v_1", "n_tail"])
def test_wrong_inputs_are_a_work_error(small_bundle: Bundle, engine: OnnxEngine, name: str) -> None:
    good = example(small_bundle.manifest.signatures["decode"])
    for wrong in (good[name].astype(np.float64), np.concatenate([good[name]] * 2)):
        with pytest.raises(WorkError, match="could not run the graph 'decode'"):
            engine.run("decode", {**good, name: wrong})
    with pytest.raises(WorkError, match="could not run the graph 'decode'"):
        engine.run("decode", {key: value for key, value in good.items() if key != name})
    engine.run("decode", good)


def with_minimum(manifest: Manifest, minimum: str) -> Manifest:
    target = dataclasses.replace(manifest.targets["onnx"], minimum_runtime=minimum)
    return dataclasses.replace(manifest, targets={"onnx": target})


@pytest.mark.parametrize("version", ["99.0.0", "1.9999", "2", ort.__version__ + ".1"])
def test_a_bundle_for_a_newer_runtime_is_refused_with_both_versions(small_bundle: Bundle, version: str) -> None:
    newer = version if version != ort.__version__ + ".1" else re.sub(r"\d+$", lambda m: str(int(m[0]) + 1), ort.__version__)
    with pytest.raises(
        BundleError, match=rf"needs onnxruntime {re.escape(newer)} .* is onnxruntime {re.escape(ort.__version__)}"
    ):
        OnnxEngine(small_bundle.path, with_minimum(small_bundle.manifest, f"onnxruntime {newer}"))


@pytest.mark.parametrize("version", [ort.__version__, "1.2.9", "0.99.99", "1", ort.__version__ + "+cu12"])
def test_a_bundle_for_this_or_an_older_runtime_runs(small_bundle: Bundle, version: str) -> None:
    engine = OnnxEngine(small_bundle.path, with_minimum(small_bundle.manifest, f"onnxruntime {version}"), 1)
    engine.run("embed", example(small_bundle.manifest.signatures["embed"]))
    engine.close()


@pytest.mark.parametrize("minimum", ["", "onnxruntime", "torch 2.13", "onnxruntime " + "9" * 5000, "onnxruntime x"], ids=len)
def test_a_minimum_that_says_nothing_is_refused(small_bundle: Bundle, minimum: str) -> None:
    with pytest.raises(BundleError, match="minimum_runtime"):
        OnnxEngine(small_bundle.path, with_minimum(small_bundle.manifest, minimum))


def changed(signature: GraphSignature, name: str, replacement: TensorSpec | None) -> GraphSignature:
    def edit(specs: list[TensorSpec]) -> list[TensorSpec]:
        return [each for spec in specs if (each := replacement if spec.name == name else spec) is not None]

    return GraphSignature(edit(signature.inputs), edit(signature.outputs))


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("tail_k_1", TensorSpec("tail_k_1", "float32", [3, 200, 64]), "input tail_k_1 is float32 [3, 192, 64], .* [3, 200, 64]"),
        ("tokens", TensorSpec("tokens", "int64", [1, 1]), "input tokens is int32 [1, 1], manifest.json says int64 [1, 1]"),
        ("n_tail", None, "input n_tail is int32 [1], manifest.json says not there"),
        ("n_tail", TensorSpec("n_used", "int32", [1]), "input n_tail is int32 [1], manifest.json says not there"),
        ("logits", TensorSpec("logits", "float32", [1, 10]), "output logits is float32 [1, 49152], .* float32 [1, 10]"),
        ("new_v_0", None, "output new_v_0 is float32 [3, 1, 64], manifest.json says not there"),
    ],
)
def test_a_graph_that_is_not_what_the_manifest_says_is_refused(
    small_bundle: Bundle, name: str, spec: TensorSpec | None, message: str
) -> None:
    manifest = small_bundle.manifest
    signatures = {**manifest.signatures, "decode": changed(manifest.signatures["decode"], name, spec)}
    engine = OnnxEngine(small_bundle.path, dataclasses.replace(manifest, signatures=signatures), 1)
    expected = r"decode\.onnx: " + message.replace("[", r"\[").replace("]", r"\]")
    for _ in range(2):  # a refused graph is not kept
        with pytest.raises(BundleError, match=expected):
            engine.run("decode", {})
    engine.close()


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint8", "int64", "bool"])
def test_every_dtype_goes_by_its_name_in_numpy(small_bundle: Bundle, tmp_path: Path, dtype: str) -> None:
    import onnx
    from onnx import helper

    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    x, y = (helper.make_tensor_value_info(name, element, [2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "same", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "same.onnx")
    target = dataclasses.replace(small_bundle.manifest.targets["onnx"], graphs={"embed": "same.onnx"})
    signature = GraphSignature([TensorSpec("x", dtype, [2])], [TensorSpec("y", dtype, [2])])
    manifest = dataclasses.replace(small_bundle.manifest, targets={"onnx": target}, signatures={"embed": signature})
    data = np.array([1, 0], dtype)
    assert np.array_equal(OnnxEngine(tmp_path, manifest, 1).run("embed", {"x": data})["y"], data)


def test_graphs_in_each_others_place_are_refused(small_bundle: Bundle) -> None:
    manifest = small_bundle.manifest
    graphs = manifest.targets["onnx"].graphs
    target = dataclasses.replace(manifest.targets["onnx"], graphs={**graphs, "decode": graphs["query"]})
    engine = OnnxEngine(small_bundle.path, dataclasses.replace(manifest, targets={"onnx": target}), 1)
    with pytest.raises(BundleError, match=r"query\.onnx: input cos is float32 \[16, 32\], manifest.json says float32 \[1, 32\]"):
        engine.run("decode", {})


@pytest.mark.parametrize("data", [b"", b"not a graph", None], ids=repr)
def test_a_file_that_is_no_graph_is_refused_with_its_name(small_bundle: Bundle, tmp_path: Path, data: bytes | None) -> None:
    folder = copy_bundle(small_bundle, tmp_path / "bundle", slim=True)
    replace_file(folder / "onnx" / "embedder.onnx", data or b"")
    if data is None:
        (folder / "onnx" / "embedder.onnx").unlink()
    engine = OnnxEngine(folder, small_bundle.manifest, 1)
    with pytest.raises(BundleError, match=rf"embedder\.onnx cannot be loaded by onnxruntime {re.escape(ort.__version__)}"):
        engine.run("embed", {})


def test_weights_that_are_cut_off_are_refused(small_bundle: Bundle, tmp_path: Path) -> None:
    folder = copy_bundle(small_bundle, tmp_path / "bundle", slim=True)
    engine = OnnxEngine(folder, small_bundle.manifest, 1)
    with pytest.raises(BundleError, match=r"decode\.onnx cannot be loaded"):
        engine.run("decode", {})
