"""The whole default model: thirty layers, the sample conversation, the default plan. Minutes each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import Run

from exporter.cli.main import main
from exporter.models.registry import DECODERS, packaged_path
from runtime_py.bundle import Bundle
from runtime_py.errors import WorkError

pytest_plugins = ["tiny_fixtures"]
pytestmark = pytest.mark.slow

QUESTIONS = (
    "What did Tobiah pay for the nucleus from Hesper Lund?",
    "Where does Tobiah take his Korean lessons?",
    "Why was the operation on Grandpa Anselmo's right eye put off?",
)


@pytest.fixture(scope="module", params=["fp32", "int8"])
def full(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The default bundle for ONNX Runtime; ``build`` publishes it only when every check holds."""
    try:
        packaged_path(DECODERS["smollm2-135m"].packaged)
    except WorkError as error:
        pytest.skip(str(error))
    out = tmp_path_factory.mktemp("full") / request.param
    assert main(["build", "--targets", "onnx", "--weights", request.param, "--out", str(out)]) == 0
    return Bundle.open(out)


def test_every_check_holds_and_the_budget_is_kept(full: Bundle) -> None:
    manifest = full.manifest
    plan, shape, target = manifest.plan, manifest.shape, manifest.targets["onnx"]
    assert target.parity == "pass"
    assert all(check["pass"] for check in target.checks)
    assert shape.n_layers == len(plan.layer_budgets) == 30
    assert sum(plan.layer_budgets) == 30 * plan.budget == 30 * 512
    assert len(full.episodes_file().episodes) == 4
    episode = full.path / "episodes" / full.episodes_file().episodes[0].cache
    # Kept rows are keys, values and sources; their size does not depend on the 7,892 tokens of the history.
    rows = 30 * 512 * shape.n_kv_heads
    assert episode.stat().st_size == pytest.approx(rows * (2 * 4 * shape.head_dim + 4), rel=0.01)
    if plan.weights == "int8":
        assert (full.path / "onnx" / "weights.bin").stat().st_size < 200e6
        (cost,) = manifest.quality.values()
        assert 0 < cost["kl"] < 0.05


def test_both_engines_answer_with_the_same_tokens(full: Bundle, run: Run) -> None:
    """With float32 weights; int8 activations part at the first near tie, which the checks bound."""
    words = ["chat", full.path, "--max-tokens", "24", "--json"]
    for question in QUESTIONS:
        words += ["--question", question]
    answers = {}
    for engine in ("onnx", "torch"):
        ran = run(*words, "--engine", engine)
        assert ran.code == 0
        answers[engine] = [json.loads(line) for line in ran.out.splitlines()]
    assert len(answers["onnx"]) == len(answers["torch"]) == 3
    assert [a["episode"] for a in answers["onnx"]] == [a["episode"] for a in answers["torch"]]
    assert all(a["tokens"] for a in answers["onnx"])
    if full.manifest.plan.weights == "fp32":
        assert [a["tokens"] for a in answers["onnx"]] == [a["tokens"] for a in answers["torch"]]


def test_verify_holds_on_a_copy(full: Bundle, run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in full.path.rglob("*"):
        target = copy / path.relative_to(full.path)
        target.mkdir() if path.is_dir() else target.hardlink_to(path)
    ran = run("verify", copy)
    assert ran.code == 0
    assert "FAIL" not in ran.out
