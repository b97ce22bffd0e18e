"""Presets: shapes that agree with what their makers publish, the list of them, and where their weights are looked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import ROOT, Run

from exporter.checkpoints.gguf_file import GGUFCheckpoint
from exporter.checkpoints.locating import ModelRequest, locate_decoder
from exporter.checkpoints.opening import open_decoder
from exporter.checkpoints.random_weights import RandomCheckpoint
from exporter.checkpoints.tiny_folder import write_tiny_checkpoint
from exporter.models.decoder import Decoder
from exporter.models.registry import DECODERS, preset_of
from exporter.sizes import weight_bytes, weight_counts
from runtime_py.bundle import Bundle
from runtime_py.errors import UsageError, WorkError

pytest_plugins = ["tiny_fixtures"]

# Millions of parameters, as model cards and papers give them.
PUBLISHED = {
    "smollm2-135m": 135,
    "smollm2-360m": 362,
    "smollm2-1.7b": 1711,
    "llama3.2-1b": 1236,
    "llama3.2-3b": 3213,
    "llama3.1-8b": 8030,
    "qwen2.5-0.5b": 494,
    "qwen2.5-1.5b": 1544,
    "qwen2.5-3b": 3086,
    "qwen2.5-7b": 7616,
    "qwen3-0.6b": 596,
    "qwen3-1.7b": 1720,
    "qwen3-4b": 4022,
    "qwen3-8b": 8191,
}


def test_every_preset_has_the_published_number_of_parameters() -> None:
    assert set(DECODERS) == set(PUBLISHED)
    for name, preset in DECODERS.items():
        assert weight_counts(preset.config).total / 1e6 == pytest.approx(PUBLISHED[name], abs=1), name


@pytest.mark.parametrize("name", ["smollm2-135m", "llama3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b"])
def test_counted_weights_are_the_decoder_s_own(name: str) -> None:
    with torch.device("meta"):
        decoder = Decoder(DECODERS[name].config)
    assert weight_counts(DECODERS[name].config).total == sum(p.numel() for p in decoder.parameters())


def test_the_default_preset_is_what_its_file_says(smollm: GGUFCheckpoint) -> None:
    preset = DECODERS["smollm2-135m"]
    assert preset.config.inv_freq() == smollm.config.inv_freq()
    assert (preset.config.context, list(preset.stop_ids)) == (smollm.config.context, smollm.stop_ids())
    located = locate_decoder(ModelRequest("HuggingFaceTB/smollm2-135m-instruct"))
    assert located.preset == "smollm2-135m" and open_decoder(located).config == smollm.config


@pytest.mark.parametrize(("fixture", "weights", "files"), [("small_bundle", "fp32", 4), ("small_int8_bundle", "int8", 4)])
def test_estimated_weights_are_those_of_a_bundle(
    request: pytest.FixtureRequest, smollm: GGUFCheckpoint, fixture: str, weights: str, files: int
) -> None:
    import dataclasses

    bundle: Bundle = request.getfixturevalue(fixture)
    config = dataclasses.replace(smollm.config, n_layers=bundle.manifest.shape.n_layers)
    found = [p for p in (bundle.path / "onnx").iterdir() if not p.name.startswith("embedder")]
    assert len(found) == files
    assert weight_bytes(config, weights) == pytest.approx(sum(p.stat().st_size for p in found), rel=0.03)


def test_models_lists_every_preset_with_sizes_and_memory(run: Run) -> None:
    models = {each["name"]: each for each in run("models", "--json").json["models"]}
    assert set(models) == set(DECODERS)
    small, large = models["llama3.2-1b"], models["llama3.2-3b"]
    assert small["phone_bytes"]["int4"]["4096"] < large["phone_bytes"]["int4"]["4096"] < large["phone_bytes"]["int4"]["8192"]
    # 28 layers, 4,096 + 512 rows, keys and values of 8 heads of 128 numbers, 4 bytes each.
    cache = 28 * (4096 + 512) * 2 * 8 * 128 * 4
    assert large["phone_bytes"]["int4"]["4096"] - large["weight_bytes"]["int4"] == cache
    assert models["smollm2-135m"]["phone_bytes"]["int4"]["8192"] is None  # trained on 8,192 tokens in all
    assert large["gated"] and large["licence"] == "llama3.2" and 128009 in large["stop_ids"]
    text = run("models").out
    assert all(name in text for name in DECODERS) and "llama3.2, gated" in text


def test_names_of_repositories_find_their_preset() -> None:
    assert preset_of("meta-llama/Llama-3.2-3B-Instruct") == preset_of("Llama3.2-3B") == "llama3.2-3b"
    assert preset_of("meta-llama/Llama-3.2-3B") is None


def test_a_checkpoint_of_other_shapes_than_its_preset_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint("qwen3", tmp_path / "tiny")
    located = locate_decoder(ModelRequest("qwen3-0.6b", checkpoint=folder))
    with pytest.raises(
        WorkError, match=r"is not qwen3-0\.6b \(Qwen/Qwen3-0\.6B\): n_layers 2 instead of 28, .*tied False instead of True"
    ):
        open_decoder(located)
    with pytest.raises(WorkError, match=r"architecture qwen3 instead of llama"):
        open_decoder(locate_decoder(ModelRequest("llama3.2-1b", checkpoint=folder)))
    found = open_decoder(locate_decoder(ModelRequest(str(folder)))).config
    assert found.n_layers == 2


@pytest.mark.parametrize(
    ("request_", "found"),
    [
        (ModelRequest("qwen9-1b"), "Did you mean 'qwen"),
        (ModelRequest("./none", weights_source="random"), "needs a preset"),
        (ModelRequest("qwen3-4b", Path("x"), weights_source="random"), "exclude each other"),
        (ModelRequest("qwen3-4b", revision="main", weights_source="random"), "random weights have none"),
    ],
)
def test_impossible_requests_are_wrong_use(request_: ModelRequest, found: str) -> None:
    with pytest.raises(UsageError, match=found):
        locate_decoder(request_)


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="none does not exist"):
        locate_decoder(ModelRequest("qwen3-4b", checkpoint=tmp_path / "none"))


def test_random_weights_have_the_preset_s_shapes_and_are_the_same_every_time() -> None:
    one, two = RandomCheckpoint("qwen2.5-0.5b"), RandomCheckpoint("qwen2.5-0.5b")
    name = "model.layers.3.self_attn.k_proj.weight"
    assert list(one.tensor(name).shape) == [2 * 64, 896] and torch.equal(one.tensor(name), two.tensor(name))
    other = one.tensor("model.layers.4.self_attn.k_proj.weight")
    assert not torch.equal(one.tensor(name), other)
    assert float(other.std()) == pytest.approx(896**-0.5, rel=0.05)
    assert float(one.tensor("model.layers.3.input_layernorm.weight").mean()) == pytest.approx(1.0, abs=0.05)
    assert one.source().format == "random" and one.source().weights_sha256 == two.source().weights_sha256
    with pytest.raises(WorkError, match="no tensor"):
        one.tensor("model.layers.24.input_layernorm.weight")


def test_a_trial_is_marked_in_every_output(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "trial"
    flags = {"budget": 64, "block": 32, "prompt": 32, "tail": 160, "query": 8, "layers": 2, "episodes": 2}
    words = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    built = run("build", "--model", "smollm2-360m", "--weights-source", "random", *words, "--targets", "onnx", "--out", out)
    assert built.code == 0 and "TRIAL (random weights; only the first 2 layers)" in built.err
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["trial"] == ["random weights", "only the first 2 layers"]
    assert manifest["source"]["format"] == "random" and manifest["source"]["model"] == "HuggingFaceTB/SmolLM2-360M-Instruct"
    assert len(set(manifest["plan"]["layer_budgets"])) > 1  # as uneven as those of a trained model
    verified = run("verify", out, "--json")
    assert verified.code == 0 and verified.json["trial"] == manifest["trial"] and "TRIAL" in verified.err
    names = {check["name"] for check in verified.json["checks"]}
    assert {"kept_rows", "logits", "vector"} <= names and not {"answer_tokens", "full_attention"} & names
    assert "over 3 blocks" in next(c["why"] for c in verified.json["checks"] if c["name"] == "kept_rows")
    assert run("inspect", out, "--json").json["trial"] == manifest["trial"] and "TRIAL" in run("inspect", out).out
    asked = run("chat", out, "--question", "Who?", "--max-tokens", "3", "--json")
    assert asked.code == 0 and asked.json["trial"] == manifest["trial"]
    assert "TRIAL" in run("chat", out, "--question", "Who?", "--max-tokens", "3").err


def test_what_is_missing_is_said_before_pytorch_is_imported() -> None:
    probe = "import sys, exporter.cli.build, exporter.cli.models, exporter.checkpoints.locating; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (("--budget", "7"), "--budget 7 is not possible"),
        (("--budget", "4k", "--layers", "29"), "--layers 29 is not possible: allowed are 1 to 28"),
        (("--budget", "4k", "--targets", "tpu"), "Target 'tpu' cannot be built"),
        (("--budget", "4k", "--out", "."), "exists already"),
    ],
)
def test_what_is_impossible_is_refused_before_weights_are_looked_for(run: Run, flags: tuple[str, ...], found: str) -> None:
    ran = run("build", "--model", "llama3.2-3b", *flags)
    assert ran.code == 2 and found in ran.err and "on this machine" not in ran.err
