"""Fixtures shared by the tests: the preset models, loaded once, and small random models.

One thread and seeded generators everywhere: sums then run in one order, whatever the number of cores.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from calibration.profiles import calibration_text
from exporter.checkpoints.embedders import load_sentence_encoder, open_encoder
from exporter.checkpoints.encoder_folder import EncoderFolder
from exporter.checkpoints.gguf_file import GGUFCheckpoint
from exporter.graphs.prefill import PrefillGraph
from exporter.graphs.query import QueryGraph
from exporter.graphs.signatures import signatures
from exporter.manifest_parts import model_shape
from exporter.models.config import DecoderConfig
from exporter.models.decoder import Decoder, load_decoder
from exporter.models.encoder import Encoder
from exporter.models.encoder_registry import ENCODERS
from exporter.models.registry import DECODERS, packaged_path
from exporter.parity.torch_engine import TorchEngine
from runtime_py.errors import WorkError
from runtime_py.language_model import LanguageModel
from runtime_py.manifest import EmbedderInfo, GraphPlan
from runtime_py.tokenizer import TextTokenizer

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so begins a job in the background; its children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

PlanFactory = Callable[..., GraphPlan]
LanguageModelFactory = Callable[[Decoder, GraphPlan], LanguageModel]
LlamaSaver = Callable[..., Path]


@pytest.fixture(scope="session")
def smollm() -> GGUFCheckpoint:
    """The default preset's checkpoint."""
    preset = DECODERS["smollm2-135m"]
    try:
        return GGUFCheckpoint(packaged_path(preset.packaged), preset.repo_id)
    except WorkError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm_short(smollm: GGUFCheckpoint) -> Decoder:
    """The first 3 layers of the default preset, with its real weights; read-only."""
    return load_decoder(dataclasses.replace(smollm.config, n_layers=3), smollm.tensor)


@pytest.fixture(scope="session")
def smollm_tokenizer(smollm: GGUFCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """The default preset's tokenizer, as a bundle holds it."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(smollm.tokenizer_json(), encoding="utf-8")
    return TextTokenizer(path, smollm.stop_ids())


@pytest.fixture(scope="session")
def transformers_tokenizer(smollm: GGUFCheckpoint) -> Any:
    """The tokenizer that transformers itself builds from the default preset's file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm.path.parent, gguf_file=smollm.path.name, local_files_only=True)


@pytest.fixture(scope="session")
def story_ids(smollm_tokenizer: TextTokenizer) -> list[int]:
    """Ids of the first 10,000 characters of the calibration text: more than 2,000 tokens of prose."""
    return smollm_tokenizer.encode(calibration_text()[:10_000])


@pytest.fixture(scope="session")
def minilm() -> EncoderFolder:
    """The default sentence encoder's folder."""
    try:
        packaged_path(ENCODERS["minilm-l6"].packaged)
    except WorkError as error:
        pytest.skip(str(error))
    return open_encoder("minilm-l6")


@pytest.fixture(scope="session")
def encoder(minilm: EncoderFolder) -> Encoder:
    """The default sentence encoder; read-only."""
    loaded = load_sentence_encoder(minilm)
    assert isinstance(loaded, Encoder)
    return loaded


@pytest.fixture(scope="session")
def tiny_config() -> DecoderConfig:
    """A llama of 3 layers with two query heads for each of 2 KV heads, and a width int8 weights accept."""
    return DecoderConfig("llama", 3, 4, 2, 8, 32, 64, 97, 512, 10000.0, 1e-5, tied=False)


@pytest.fixture(scope="session")
def tiny_decoder(tiny_config: DecoderConfig) -> Decoder:
    """Random weights, large enough for attention to be far from uniform; read-only."""
    generator = torch.Generator().manual_seed(7)
    decoder = Decoder(tiny_config)
    for name, parameter in decoder.named_parameters():
        parameter.normal_(0.0, 0.4, generator=generator)
        if "norm" in name:
            parameter.add_(1.0)
    return decoder.eval()


@pytest.fixture(scope="session")
def make_plan() -> PlanFactory:
    """``make_plan([16, 24], block=8, ...)``: a plan with these layer budgets and small sizes."""

    def make(budgets: Sequence[int], **changes: int | str) -> GraphPlan:
        sizes: dict[str, int | str] = {
            "block": 8,
            "prompt": 6,
            "tail": 32,
            "query": 4,
            "embed_length": 32,
            "n_sinks": min(3, min(budgets) // 4),
            "weights": "fp32",
        }
        return GraphPlan(
            budget=sum(budgets) // len(budgets),
            episodes=4,
            alpha=1.0,
            granularity=8,
            layer_budgets=list(budgets),
            cache="fp32",
            **(sizes | changes),  # type: ignore[arg-type]
        )

    return make


@pytest.fixture(scope="session")
def make_language_model() -> LanguageModelFactory:
    """``make_language_model(decoder, plan)``: the host's language model over the PyTorch engine, without an embedder."""

    def make(decoder: Decoder, plan: GraphPlan) -> LanguageModel:
        shape = model_shape(decoder.config)
        modules = {
            "prefill": PrefillGraph(decoder, plan).eval(),
            "query": QueryGraph(decoder, plan, plan.query).eval(),
            "decode": QueryGraph(decoder, plan, 1).eval(),
        }
        unused = EmbedderInfo("none", 1, plan.embed_length, [], [], 0)
        return LanguageModel(TorchEngine(modules, signatures(shape, plan, unused)), shape, plan)

    return make


@pytest.fixture(scope="session")
def save_llama() -> LlamaSaver:
    """``save_llama(folder, dtype=..., max_shard_size=..., **config)``: a random llama, written by transformers itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def save(folder: Path, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB", **changes: object) -> Path:
        sizes: dict[str, object] = {
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.3,
        }
        torch.manual_seed(5)
        LlamaForCausalLM(LlamaConfig(**(sizes | changes))).to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return save


# The fixtures of bundle_fixtures.py belong to every test; importing them here registers them once.
from bundle_fixtures import build_small, small_bundle, small_history, small_int8_bundle  # noqa: E402, F401
