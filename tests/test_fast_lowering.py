"""Fast lowering writes the same file as ExecuTorch's own lowering, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional as F

pytest.importorskip("executorch", reason="the package executorch is not installed: fast lowering is not tested")

from conftest import PlanFactory
from executorch.backends.xnnpack._passes import XNNPACKPassManager
from executorch.backends.xnnpack.partition.graphs import bilinear_2d, sdpa
from executorch.exir import EdgeProgramManager, ExecutorchBackendConfig
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.program import _program

from exporter.checkpoints.gguf_file import GGUFCheckpoint
from exporter.graphs.prefill import PrefillGraph
from exporter.graphs.query import QueryGraph
from exporter.graphs.signatures import example_inputs, signatures
from exporter.manifest_parts import model_shape
from exporter.models.decoder import load_decoder
from exporter.targets.executorch import fast_lowering, fast_passes
from exporter.targets.executorch.fast_lowering import lower_to_edge
from exporter.targets.executorch.fast_partitioner import OneDecompositionPartitioner
from exporter.targets.executorch.rewrite import XNNPACK_OPS, rewritten
from runtime_py.manifest import EmbedderInfo, GraphPlan

METHODS = ("prefill", "query", "decode")


def _pte(edge: EdgeProgramManager) -> bytes:
    config = ExecutorchBackendConfig(
        memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False), do_quant_fusion_and_const_prop=True
    )
    return edge.to_executorch(config).buffer


def _exported(model: nn.Module, *inputs: Tensor) -> dict[str, ExportedProgram]:
    with torch.no_grad():
        return {"forward": torch.export.export(model.eval(), inputs, strict=False)}


def _same_bytes(programs: dict[str, ExportedProgram]) -> bool:
    return _pte(lower_to_edge(programs)) == _pte(lower_to_edge(programs, fast=False))


def _language_programs(smollm: GGUFCheckpoint, plan: GraphPlan, weights: str) -> dict[str, ExportedProgram]:
    config = dataclasses.replace(smollm.config, n_layers=len(plan.layer_budgets))
    decoder = load_decoder(config, smollm.tensor)
    if weights == "int4":
        pytest.importorskip("torchao", reason="the package torchao is not installed: int4 is not lowered")
        from exporter.quantization.int4 import quantize_decoder_

        quantize_decoder_(decoder)
    model = rewritten(decoder)
    graphs = {
        "prefill": PrefillGraph(model, plan, XNNPACK_OPS).eval(),
        "query": QueryGraph(model, plan, plan.query, XNNPACK_OPS).eval(),
        "decode": QueryGraph(model, plan, 1, XNNPACK_OPS).eval(),
    }
    unused = EmbedderInfo("none", 1, plan.embed_length, [], [], 0)
    all_signatures = signatures(model_shape(config), plan, unused)
    with torch.no_grad():
        return {
            name: torch.export.export(graphs[name], (), kwargs=example_inputs(all_signatures[name]), strict=False)
            for name in METHODS
        }


@pytest.fixture
def changing_passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts, by class name, the passes that ``may_change`` lets through."""
    counts: Counter[str] = Counter()
    decide = fast_passes.may_change

    def counted(pass_type: type, module: torch.fx.GraphModule) -> bool:
        decision = decide(pass_type, module)
        counts[pass_type.__name__] += decision
        return decision

    monkeypatch.setattr(fast_passes, "may_change", counted)
    return counts


@pytest.fixture
def decompositions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every decomposition of a program that is really computed."""
    calls: list[int] = []
    real = ExportedProgram.run_decompositions

    def counted(self: ExportedProgram, table: dict[object, Callable[..., object]] | None = None) -> ExportedProgram:
        calls.append(len(table or {}))
        return real(self, table)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", counted)
    return calls


@pytest.mark.parametrize("weights", ["fp32", "int4"])
def test_files_of_the_default_model_are_byte_identical(
    weights: str,
    smollm: GGUFCheckpoint,
    make_plan: PlanFactory,
    changing_passes: Counter[str],
    decompositions: list[int],
) -> None:
    plan = make_plan([64, 64], block=32, prompt=32, tail=64, query=8, n_sinks=8, weights=weights)
    programs = _language_programs(smollm, plan, weights)
    decompositions.clear()
    fast = _pte(lower_to_edge(programs))
    assert len(decompositions) == len(METHODS)
    ran = {name for name, count in changing_passes.items() if count}
    skipped = {rule.__name__ for rule in fast_passes.RULES} - ran
    assert "ConvertToLinearPass" in ran
    assert len(skipped) >= len(fast_passes.RULES) - 1, ran
    assert fast == _pte(lower_to_edge(programs, fast=False))


class _Layers(nn.Module):
    """Every layer in turn, then ``joined`` copies of the result side by side."""

    def __init__(self, *layers: nn.Module, joined: int = 1) -> None:
        super().__init__()
        self.layers, self.joined = nn.ModuleList(layers), joined

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.cat([x + i for i in range(self.joined)], dim=1) if self.joined > 1 else x


class _Largest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.max(x, dim=3, keepdim=True).values


class _GivenWeight(nn.Module):
    """Two products: XNNPACK takes the first, and refuses the second because its weight is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(self.inner(x), weight)


class _OwnLength(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) + x.shape[0]


PICTURE = torch.linspace(-1.0, 1.0, 2 * 6 * 6).reshape(1, 2, 6, 6)
OTHER_MODELS = {
    "convolution, norm, activation": (_Layers(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), PICTURE, "FuseBatchNormPass"),
    "norm alone": (_Layers(nn.BatchNorm2d(2), nn.Hardtanh()), PICTURE, "DecomposeBatchNorm"),
    "one dimension": (_Layers(nn.Conv1d(6, 4, 3)), PICTURE[0], "Conv1dUnsqueezePass"),
    "pooling": (_Layers(nn.MaxPool2d(2)), PICTURE, "ChannelsLastTaggedReshapePass"),
    "many joined": (_Layers(nn.Sigmoid(), joined=7), PICTURE, "DecomposeConcatenate"),
    "largest": (_Largest(), PICTURE, "RemoveGetItemPass"),
    "copies": (
        _Layers(nn.Linear(6, 4), nn.Dropout(), nn.Flatten(), nn.Linear(24, 2)),
        PICTURE[0],
        "XNNPACKRemoveCloneOpsTransform",
    ),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_passes_that_other_models_need_do_run(name: str, changing_passes: Counter[str]) -> None:
    model, example, needed = OTHER_MODELS[name]
    assert _same_bytes(_exported(model, example))
    assert changing_passes[needed]


def test_symbolic_lengths_keep_their_pass(changing_passes: Counter[str]) -> None:
    rows = {0: torch.export.Dim("rows", min=2, max=8)}
    assert _same_bytes({"forward": torch.export.export(_OwnLength(), (torch.ones(3, 4),), dynamic_shapes=(rows,))})
    assert changing_passes["SymToTensorPass"]


def test_an_operation_that_xnnpack_refuses_is_decomposed_as_before(decompositions: list[int]) -> None:
    programs = _exported(_GivenWeight(), torch.ones(4, 8), torch.ones(8, 8))
    partitioner = OneDecompositionPartitioner()
    program = partitioner.transform_for_pre_decomposition(programs["forward"])
    assert program is programs["forward"]
    assert partitioner.ops_to_not_decompose(program)[1] is not None
    decompositions.clear()
    edge = lower_to_edge(programs)
    assert len(decompositions) > 1
    assert _pte(edge) == _pte(lower_to_edge(programs, fast=False))


@pytest.mark.parametrize(("pass_name", "patterns"), [("ConvertToSDPAPass", sdpa), ("ConvertToUpsampleBilinear2d", bilinear_2d)])
def test_rules_let_through_the_patterns_that_a_pass_looks_for(pass_name: str, patterns: object) -> None:
    (pass_type,) = (each for each in fast_passes.RULES if each.__name__ == pass_name)
    graphs = patterns.get_graphs()  # type: ignore[attr-defined]
    assert graphs
    assert all(fast_passes.may_change(pass_type, graph) for graph in graphs)


def test_every_pass_of_the_delegate_has_a_rule_but_the_one_that_always_matches() -> None:
    program = _exported(nn.Linear(2, 2), torch.ones(1, 2))["forward"]
    without = {each for each in XNNPACKPassManager(program).passes if each not in fast_passes.RULES}
    assert {each.__name__ for each in without} == {"ConvertToLinearPass"}


def test_the_library_is_as_before_after_an_error() -> None:
    transform, passes = XNNPACKPassManager.transform, _program.base_pre_op_replace_passes
    with pytest.raises(ZeroDivisionError), fast_passes.idle_passes_skipped():
        assert XNNPACKPassManager.transform is not transform
        assert _program.base_pre_op_replace_passes is not passes
        raise ZeroDivisionError
    assert XNNPACKPassManager.transform is transform
    assert _program.base_pre_op_replace_passes is passes

    with pytest.raises(AttributeError):
        lower_to_edge({"forward": nn.Linear(2, 2)})  # type: ignore[dict-item]
    assert XNNPACKPassManager.transform is transform
    assert _program.base_pre_op_replace_passes is passes


def test_another_version_is_lowered_the_slow_way_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_lowering, "TESTED_VERSION", "0.0.1")
    # An import of the fast way's internals would now fail.
    monkeypatch.setitem(sys.modules, "exporter.targets.executorch.fast_passes", None)
    monkeypatch.setitem(sys.modules, "exporter.targets.executorch.fast_partitioner", None)
    programs = _exported(nn.Linear(4, 4), torch.ones(1, 4))
    said: list[str] = []
    fallen_back = _pte(lower_to_edge(programs, progress=said.append))
    assert len(said) == 1
    assert version("executorch") in said[0] and "0.0.1" in said[0]
    assert fallen_back == _pte(lower_to_edge(programs, fast=False, progress=said.append))
    assert len(said) == 1


def test_the_installed_version_is_the_tested_one_and_says_nothing() -> None:
    said: list[str] = []
    lower_to_edge(_exported(nn.Linear(4, 4), torch.ones(1, 4)), progress=said.append)
    assert said == []
