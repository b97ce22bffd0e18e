"""The ONNX target on real weights: the PyTorch engine's results, the contract's interface, weights once, no cache copied."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from conftest import PlanFactory
from numpy.typing import NDArray

from exporter.checkpoints.gguf_file import GGUFCheckpoint
from exporter.graphs.query import QueryGraph
from exporter.graphs.signatures import signatures
from exporter.manifest_parts import library_versions, model_shape
from exporter.models.config import DecoderConfig
from exporter.models.decoder import Decoder, load_decoder
from exporter.models.encoder import Encoder
from exporter.parity.torch_engine import TorchEngine
from exporter.targets import target
from exporter.targets.base import GraphSource
from runtime_py.engines.base import Engine
from runtime_py.engines.onnx import OnnxEngine
from runtime_py.episodes.cache import EpisodeCache
from runtime_py.language_model import LanguageModel, Tail
from runtime_py.manifest import (
    SCHEMA_VERSION,
    EmbedderInfo,
    GraphPlan,
    GraphSignature,
    Manifest,
    ModelShape,
    Routing,
    Source,
    Template,
    graph_weights,
)

# Sizes at which every cache is larger than anything a graph makes of a few tokens, so that a copied cache stands out.
BUDGETS, SIZES = [320, 256], {"block": 64, "prompt": 32, "tail": 256, "query": 4, "embed_length": 64, "n_sinks": 30}
LANGUAGE_GRAPHS = ("prefill", "query", "decode")


@dataclass(frozen=True)
class Exported:
    """One export beside the model it was made from."""

    folder: Path
    manifest: Manifest
    decoder: Decoder
    torch: Engine
    onnx: Engine

    def models(self) -> tuple[LanguageModel, LanguageModel]:
        """The host's language model over PyTorch and over ONNX Runtime."""
        shape, plan = self.manifest.shape, self.manifest.plan
        return LanguageModel(self.torch, shape, plan), LanguageModel(self.onnx, shape, plan)

    def path(self, graph: str) -> Path:
        return self.folder / self.manifest.targets["onnx"].graphs[graph]


def describe(shape: ModelShape, plan: GraphPlan, embedder: EmbedderInfo) -> Manifest:
    """A manifest as an engine needs it; targets are filled in after lowering."""
    nowhere = Source("test", "none", "none", "none", "0" * 64, "none")
    template = Template([1], [1], [1], [1], [1], [2])
    graphs, versions = signatures(shape, plan, embedder), library_versions()
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name="test",
        exporter_version="test",
        libraries=versions,
        source=nowhere,
        embedder_source=nowhere,
        shape=shape,
        plan=plan,
        template=template,
        embedder=embedder,
        routing=Routing(0.0),
        signatures=graphs,
        targets={},
        memory={},
    )


@pytest.fixture(scope="module", params=["fp32", "int8"])
def exported(
    request: pytest.FixtureRequest,
    smollm: GGUFCheckpoint,
    encoder: Encoder,
    make_plan: PlanFactory,
    tmp_path_factory: pytest.TempPathFactory,
) -> Exported:
    """Two layers of the default model and the whole default encoder, lowered with these weights."""
    weights: str = request.param
    decoder = load_decoder(dataclasses.replace(smollm.config, n_layers=2), smollm.tensor)
    plan, shape = make_plan(BUDGETS, weights=weights, **SIZES), model_shape(decoder.config)
    embedder = EmbedderInfo("minilm", 384, plan.embed_length, [101], [102], 0, weights=weights)
    manifest, folder = describe(shape, plan, embedder), tmp_path_factory.mktemp(weights)
    weights_of = graph_weights(plan, embedder)
    source = GraphSource(decoder, encoder, plan, manifest.signatures, weights_of)
    manifest.targets["onnx"] = target("onnx").lower(source, folder, lambda _: None)
    stored = target("onnx").quantized(decoder, encoder, weights_of)
    reference = TorchEngine.create(*stored, shape, plan, embedder)
    return Exported(folder, manifest, decoder, reference, OnnxEngine(folder, manifest, threads=1))


def read_history(exported: Exported, ids: list[int], blocks: int) -> EpisodeCache:
    """The PyTorch engine's cache after blocks of 64, 1 and 50 tokens by turns, each read by both engines and compared."""
    reference, onnx_model = exported.models()
    cache, start = EpisodeCache.empty(reference.shape, reference.plan), 0
    for block in range(blocks):
        size = (64, 1, 50)[block % 3]
        tokens, prompt = ids[start : start + size], ids[2000 + block : 2000 + block + (32, 7)[block % 2]]
        found, cache = onnx_model.prefill(cache, tokens, prompt), reference.prefill(cache, tokens, prompt)
        start += size
        for layer in range(2):
            np.testing.assert_array_equal(found.src[layer], cache.src[layer])
            np.testing.assert_allclose(found.k[layer], cache.k[layer], rtol=0, atol=1e-4)
            np.testing.assert_allclose(found.v[layer], cache.v[layer], rtol=0, atol=1e-4)
    assert cache.n_seen > max(BUDGETS)
    return cache


def kl(p_logits: NDArray[np.float32], q_logits: NDArray[np.float32]) -> float:
    """KL divergence in nats between the softmaxes of two logit vectors."""
    p, q = (torch.log_softmax(torch.from_numpy(x.astype(np.float64)), -1) for x in (p_logits, q_logits))
    return float((p.exp() * (p - q)).sum())


def test_outputs_equal_the_pytorch_engines(exported: Exported, story_ids: list[int]) -> None:
    cache = read_history(exported, story_ids, 14)
    start = cache.n_seen
    tails = []
    for model in exported.models():
        sealed, tail = model.seal(cache), Tail.empty(model.shape, model.plan)
        logits = [model.read(sealed, tail, story_ids[start : start + 11])]
        logits += [model.read(sealed, tail, [token]) for token in story_ids[start + 11 : start + 24]]
        tails.append((logits, tail))
    (expected, reference_tail), (found, onnx_tail) = tails
    if exported.manifest.plan.weights == "fp32":
        np.testing.assert_allclose(np.stack(found), np.stack(expected), rtol=0, atol=1e-3)
        for a, b in zip(onnx_tail.k + onnx_tail.v, reference_tail.k + reference_tail.v, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-3)
    else:  # query and decode quantise their activations as well
        assert max(kl(a, b) for a, b in zip(expected, found, strict=True)) < 0.01
    assert np.ptp(expected[0]) > 10


def test_embedding_equals_the_pytorch_engines(exported: Exported) -> None:
    for count in (2, 3, 40, 64):
        ids = np.zeros((1, 64), np.int32)
        ids[0, :count] = [101, *np.random.default_rng(count).integers(1000, 30000, count - 2), 102]
        inputs = {"tokens": ids, "n_tokens": np.array([count], np.int32)}
        expected, found = (engine.run("embed", inputs)["vector"] for engine in (exported.torch, exported.onnx))
        assert found.shape == (384,)
        assert float(np.abs(found.astype(np.float64) - expected.astype(np.float64)).max()) < 1e-5


def test_interfaces_are_those_of_the_signature(exported: Exported) -> None:
    dtypes = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.INT32: "int32"}
    for graph, signature in exported.manifest.signatures.items():
        model = onnx.load(exported.path(graph), load_external_data=False)
        for values, specs in ((model.graph.input, signature.inputs), (model.graph.output, signature.outputs)):
            found = [
                (v.name, dtypes[v.type.tensor_type.elem_type], [d.dim_value for d in v.type.tensor_type.shape.dim])
                for v in values
            ]
            assert found == [(spec.name, spec.dtype, spec.shape) for spec in specs]


def test_weights_are_stored_once_and_found_beside_the_graphs(exported: Exported) -> None:
    weights = exported.folder / "onnx" / "weights.bin"
    parameters = {id(p): p for p in exported.decoder.parameters()}.values()
    if exported.manifest.plan.weights == "fp32":
        expected = sum(p.numel() * 4 for p in parameters)
    else:  # one byte, and a float32 scale for each 32 of them
        expected = sum(p.numel() * 36 // 32 if p.dim() == 2 else p.numel() * 4 for p in parameters)
    assert weights.stat().st_size == pytest.approx(expected, rel=0.02)
    places: dict[str, set[tuple[int, int]]] = {}
    for graph in LANGUAGE_GRAPHS:
        assert exported.path(graph).stat().st_size < 200_000
        model = onnx.load(exported.path(graph), load_external_data=False)
        external = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
        for tensor in external:
            entry = {item.key: item.value for item in tensor.external_data}
            assert entry["location"] == "weights.bin"
            offset, length = int(entry["offset"]), int(entry["length"])
            assert offset % (4096 if length >= 1 << 20 else 64) == 0 and offset + length <= weights.stat().st_size
            places.setdefault(graph, set()).add((offset, length))
    assert places["query"] == places["decode"]
    large = {graph: {p for p in found if p[1] >= 1 << 18} for graph, found in places.items()}
    assert large["prefill"] < large["query"]  # the last layer's feed-forward part is dead code in prefill


def optimised(path: Path, out: Path) -> onnx.ModelProto:
    """What ONNX Runtime makes of a graph; its weights lie beside ``out``."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(out)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", f"{out.name}.bin")
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return onnx.load(out, load_external_data=False)


def sizes_made(model: onnx.ModelProto, path: Path, signature: GraphSignature) -> dict[str, int]:
    """Numbers in every intermediate value of ``model``, found by running it with all of them as outputs."""
    final = {v.name for v in model.graph.output}
    made = {name for node in model.graph.node for name in node.output if name} - final
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(made))
    onnx.save(model, path)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    values = session.run(None, {s.name: np.ones(s.shape, s.dtype) for s in signature.inputs})
    return {o.name: v.size for o, v in zip(session.get_outputs(), values, strict=True) if o.name in made}


def test_no_cache_is_copied_after_onnx_runtimes_own_optimisation(exported: Exported, tmp_path: Path) -> None:
    """Query and decode read caches in matrix products only, and nothing else a graph makes is as large as a cache."""
    for graph in ("query", "decode"):
        signature = exported.manifest.signatures[graph]
        model = optimised(exported.path(graph), tmp_path / f"{graph}.onnx")
        caches = {s.name: int(np.prod(s.shape)) for s in signature.inputs if s.name.split("_")[0] in ("k", "v", "tail")}
        assert len(caches) == 8
        assert {n.op_type for n in model.graph.node if caches.keys() & set(n.input)} <= {"MatMul", "FusedMatMul"}
        sizes = sizes_made(model, tmp_path / f"{graph}.onnx", signature)
        assert len(sizes) > 100
        assert max(sizes.values()) < min(caches.values()), max(sizes.items(), key=lambda item: item[1])


MEASURE = """
import json, sys
import numpy as np, onnxruntime as ort
def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
options = ort.SessionOptions()
options.intra_op_num_threads = 1
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
types = {"tensor(float)": np.float32, "tensor(int32)": np.int32}
inputs = {i.name: np.ones(i.shape, types[i.type]) for i in session.get_inputs()}
before = peak()
session.run(None, inputs)
read = peak() - before
original = inputs["tail_k_0"]  # stays alive, so that its memory cannot take the copy
copied = np.asfortranarray(original)
inputs["tail_k_0"] = copied
before = peak()
session.run(None, inputs)
print(json.dumps({"read": read, "reordered": peak() - before, "cache": copied.nbytes}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_onnx_runtime_reads_caches_in_place(make_plan: PlanFactory, tmp_path: Path) -> None:
    """Peak memory of a process that decodes beside 134 MB of caches: it grows by less than half of one of them."""
    import onnx_ir as ir

    from exporter.targets.onnx.export import export_graph

    config = DecoderConfig("llama", 2, 4, 2, 64, 32, 48, 97, 1 << 17, 10000.0, 1e-5, tied=False)
    plan = make_plan([64, 64], tail=1 << 16)
    embedder = EmbedderInfo("none", 1, 32, [], [], 0)
    decoder = Decoder(config).eval()
    signature = signatures(model_shape(config), plan, embedder)["decode"]
    ir.save(export_graph(QueryGraph(decoder, plan, 1), signature), tmp_path / "decode.onnx")
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "decode.onnx")]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    grown = json.loads(run.stdout)
    assert grown["cache"] == 2 * (1 << 16) * 64 * 4
    assert grown["read"] < grown["cache"] / 2
    assert grown["reordered"] >= grown["cache"]  # what a copy looks like
