"""The ExecuTorch target: what is delegated, that no cache is copied, sizes, and the self-test in every engine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from conftest import PlanFactory

pytest.importorskip("executorch", reason="the package executorch is not installed")

from executorch_bundles import executorch_bundle

from exporter.cli.main import main
from exporter.graphs.query import QueryGraph
from exporter.graphs.signatures import example_inputs, signatures
from exporter.manifest_parts import model_shape
from exporter.models.decoder import Decoder
from exporter.targets.executorch.fast_lowering import lower_to_edge
from exporter.targets.executorch.inspection import cache_consumers, check_no_cache_copy
from exporter.targets.executorch.rewrite import XNNPACK_OPS, rewritten
from runtime_py.bundle import Bundle
from runtime_py.episodes.history import History
from runtime_py.errors import WorkError
from runtime_py.manifest import EmbedderInfo
from runtime_py.selftest import selftest, selftest_file
from runtime_py.tensor_files import map_tensors, write_tensors


@pytest.fixture(scope="session", params=["fp32", "int4"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, small_history: History) -> Bundle:
    """A verified two-layer bundle for ExecuTorch."""
    return executorch_bundle(request.param, tmp_path_factory.getbasetemp(), small_history)


def test_rewrites_compute_the_same(smollm_short: Decoder, make_plan: PlanFactory) -> None:
    plan = make_plan([16, 24, 16])
    shape = model_shape(smollm_short.config)
    signature = signatures(shape, plan, EmbedderInfo("none", 1, 32, [], [], 0))["query"]
    generator = torch.Generator().manual_seed(3)
    inputs = example_inputs(signature)
    for name in ("k", "v", "tail_k", "tail_v"):
        inputs[name] = [torch.randn(t.shape, generator=generator) for t in inputs[name]]
    inputs |= {"n_seen": torch.tensor([40], dtype=torch.int32), "n_tokens": torch.tensor([3], dtype=torch.int32)}
    inputs["cos"] = torch.ones_like(inputs["cos"])
    plain = QueryGraph(smollm_short, plan, plan.query)(**inputs)[0]
    other = QueryGraph(rewritten(smollm_short), plan, plan.query, XNNPACK_OPS)(**inputs)[0]
    assert torch.allclose(plain, other, atol=2e-5 * float(plain.abs().max()), rtol=0)


def test_row_maximum_by_halves_for_every_length() -> None:
    for rows in range(1, 40):
        x = torch.randn(2, rows, 5, generator=torch.Generator().manual_seed(rows))
        assert torch.equal(XNNPACK_OPS.row_maximum(x), x.amax(dim=1))


def test_a_transposed_cache_is_found_inside_the_delegate(smollm_short: Decoder, make_plan: PlanFactory) -> None:
    """The plain form of attention turns the cache; the walk must see it, or it would prove nothing for the other form."""
    config = dataclasses.replace(smollm_short.config, n_layers=1)
    decoder = Decoder(config).eval()
    plan = make_plan([16])
    signature = signatures(model_shape(config), plan, EmbedderInfo("none", 1, 32, [], [], 0))["decode"]
    lowered = {}
    for name, graph in {
        "plain": QueryGraph(rewritten(decoder), plan, 1),
        "rewritten": QueryGraph(rewritten(decoder), plan, 1, XNNPACK_OPS),
    }.items():
        program = torch.export.export(graph, (), kwargs=example_inputs(signature), strict=False)
        lowered[name] = lower_to_edge({"decode": program}).exported_program("decode").graph_module
    assert not list(cache_consumers(lowered["rewritten"]))
    check_no_cache_copy(lowered["rewritten"], "decode")
    with pytest.raises(WorkError, match="copies a cache"):
        check_no_cache_copy(lowered["plain"], "decode")


def test_bundle_passes_and_lists_what_is_outside_the_delegate(bundle: Bundle) -> None:
    target = bundle.manifest.targets["executorch"]
    assert target.parity == "pass"
    outside = target.details["operators_outside_delegate"]
    layers = bundle.manifest.shape.n_layers
    for method in ("query", "decode"):
        assert outside[method]["delegate"] <= 4  # masks, all layers, the last row's norm, the head: whatever the depth
    assert outside["prefill"]["delegate"] <= 3 * layers + 3
    assert not {"aten.clone.default", "aten.permute_copy.default"} & (outside["query"].keys() | outside["decode"].keys())


def test_weights_are_stored_once(bundle: Bundle) -> None:
    shape = bundle.manifest.shape
    table = shape.vocab_size * shape.hidden
    layers = shape.n_layers * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    size = (bundle.path / "executorch" / "model.pte").stat().st_size
    if bundle.manifest.plan.weights == "fp32":
        expected = 4 * (2 * table + layers)  # the portable table and the packed head are two
    else:
        row_scales = 4 * (2 * shape.vocab_size)
        expected = 2 * table + row_scales + layers // 2 + 2 * layers // 32
    assert size == pytest.approx(expected, rel=0.03)


def test_selftest_replays_and_can_fail(bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = selftest(bundle, bundle.engine("executorch"))
    assert {r.graph for r in results} == {"prefill", "query", "decode", "embed"}
    assert all(r.passed for r in results), results
    assert main(["verify", str(bundle.path), "--selftest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pass"] is True

    vectors, metadata = map_tensors(bundle.path / selftest_file("executorch"))
    changed = {name: values.copy() for name, values in vectors.items()}
    changed["decode"] = changed["decode"][::-1].copy()
    changed["src"] = changed["src"] + 1
    copy = tmp_path / "copy"
    copy.mkdir()
    for part in bundle.path.iterdir():
        (copy / part.name).symlink_to(part)
    (copy / "selftest").unlink()
    (copy / "selftest").mkdir()
    write_tensors(copy / selftest_file("executorch"), changed, metadata)
    broken = Bundle(copy, bundle.manifest)
    failed = {(r.graph, r.name) for r in selftest(broken, broken.engine("executorch")) if not r.passed}
    assert {graph for graph, _ in failed} >= {"prefill", "decode"}
