"""Every supported architecture, from a random checkpoint that transformers wrote to a verified bundle for each target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Run, Tiny

from exporter.checkpoints.hf_folder import HFCheckpoint
from exporter.checkpoints.tiny_folder import main as make_tiny_checkpoint
from exporter.checkpoints.tiny_folder import write_tiny_checkpoint
from exporter.models.architectures import ARCHITECTURES
from exporter.models.config import DecoderConfig, Llama3Scaling
from exporter.models.decoder import load_decoder
from exporter.models.dense import dense_logits
from runtime_py.manifest import Manifest

pytest_plugins = ["tiny_fixtures"]

TARGETS = ("onnx", "executorch")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: write_tiny_checkpoint(name, folder / name) for name in ARCHITECTURES}


def expected_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: torch.Tensor = theirs.eval()(tokens[None]).logits[0]
    return logits


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_transformers_logits_even_beyond_the_original_context(checkpoints: dict[str, Path], name: str) -> None:
    checkpoint = HFCheckpoint(checkpoints[name], "tiny")
    tokens = torch.randint(0, checkpoint.config.vocab_size, (1200,), generator=torch.Generator().manual_seed(1))
    if isinstance(scaling := checkpoint.config.rope_scaling, Llama3Scaling):
        assert scaling.original_context < len(tokens)
    expected = expected_logits(checkpoints[name], tokens)
    assert expected.abs().max() > 10
    # Measured: 2e-5 to 3.5e-5.
    torch.testing.assert_close(
        dense_logits(load_decoder(checkpoint.config, checkpoint.tensor), tokens), expected, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_other_way_to_tie_the_head_is_read_too(tmp_path: Path, checkpoints: dict[str, Path], name: str) -> None:
    tied = HFCheckpoint(checkpoints[name], "tiny").config.tied
    folder = write_tiny_checkpoint(name, tmp_path / "other", tie_word_embeddings=not tied, vocab_size=97)
    checkpoint = HFCheckpoint(folder, "tiny")
    assert checkpoint.config.tied != tied
    tokens = torch.randint(0, 97, (50,), generator=torch.Generator().manual_seed(1))
    ours = dense_logits(load_decoder(checkpoint.config, checkpoint.tensor), tokens)
    torch.testing.assert_close(ours, expected_logits(folder, tokens), rtol=0, atol=1e-4)


def built(run: Run, tiny: Tiny, checkpoint: Path, out: Path, target: str, weights: str) -> Manifest:
    """The manifest of a small bundle with these weights, which its own checks let through."""
    assert run(*tiny.build(out, model=checkpoint, targets=target, weights=weights)).code == 0
    return Manifest.read(out / "manifest.json")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_whole_build_equals_pytorch(
    tmp_path: Path, run: Run, tiny: Tiny, checkpoints: dict[str, Path], name: str, target: str
) -> None:
    manifest = built(run, tiny, checkpoints[name], tmp_path / "out", target, "fp32")
    found = manifest.targets[target]
    assert found.parity == "pass" and all(check["pass"] for check in found.checks)
    names = {f"{check['graph']} {check['name']}" for check in found.checks if check["target"] == target}
    assert {"prefill kept_rows", "query logits", "decode logits", "decode answer_tokens", "query full_attention"} <= names
    config = HFCheckpoint(checkpoints[name], "tiny").config
    assert manifest.shape.inv_freq == config.inv_freq()  # the stretched ones, for the host's tables
    if target == "executorch":
        for method in ("prefill", "query", "decode"):
            assert found.details["operators_outside_delegate"][method]["delegate"] <= 3 * config.n_layers + 3


@pytest.mark.parametrize(
    ("name", "target", "weights"), [("qwen2", "onnx", "int8"), ("qwen2", "executorch", "int4"), ("qwen3", "executorch", "int4")]
)
def test_biases_and_head_norms_survive_quantisation(
    tmp_path: Path, run: Run, tiny: Tiny, checkpoints: dict[str, Path], name: str, target: str, weights: str
) -> None:
    assert built(run, tiny, checkpoints[name], tmp_path / "out", target, weights).targets[target].parity == "pass"


def test_the_script_writes_what_build_reads_and_refuses_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new"
    assert make_tiny_checkpoint(["qwen3", str(folder)]) == 0
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "qwen3"
    assert f"build --model {folder}" in capsys.readouterr().out
    assert make_tiny_checkpoint(["qwen3", str(folder)]) == 2
    assert "not an empty folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        make_tiny_checkpoint(["gpt2", str(folder)])


def test_stretched_frequencies_are_transformers_own(tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    folder = write_tiny_checkpoint("llama", tmp_path / "llama", head_dim=64)
    config: DecoderConfig = HFCheckpoint(folder, "tiny").config
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder)).inv_freq
    assert config.inv_freq() == theirs.tolist()
