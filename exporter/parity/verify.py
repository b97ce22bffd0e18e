"""Verification of a bundle: integrity first, then every target against PyTorch from the checkpoint itself."""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from exporter.checkpoints.base import Checkpoint
from exporter.checkpoints.hf_folder import EncoderFolder
from exporter.models.decoder import Decoder, load_decoder
from exporter.models.dense import dense_logits
from exporter.models.encoder import Encoder, load_encoder
from exporter.models.registry import DECODERS, ENCODERS, Preset, open_decoder, open_encoder
from exporter.parity.checks import Check
from exporter.parity.language import answer_check, language_checks
from exporter.parity.text import embedder_checks, episode_checks, text_checks
from exporter.parity.torch_engine import TorchEngine
from exporter.quantization.int8 import fake_quantize_
from exporter.targets.base import Progress
from runtime_py.bundle import Bundle
from runtime_py.errors import WorkError
from runtime_py.language_model import LanguageModel
from runtime_py.manifest import Manifest


@dataclass(frozen=True)
class Models:
    """Float32 models from the checkpoints that a bundle was made of."""

    checkpoint: Checkpoint
    decoder: Decoder
    encoder: Encoder

    def engine(self, manifest: Manifest) -> TorchEngine:
        """PyTorch over these models, quantised as the bundle is."""
        return TorchEngine.create(self.decoder, self.encoder, manifest.shape, manifest.plan, manifest.embedder)


def load_models(manifest: Manifest, model: str | None = None, embedder: str | None = None) -> Models:
    """Open the checkpoints named by the manifest, or by ``model`` and ``embedder`` (preset, file or folder).

    Raises ``WorkError`` when a checkpoint cannot be found or is not the one the bundle was made of.
    """
    checkpoint = open_decoder(model or _preset(manifest.source.model, DECODERS, "--model"))
    folder = open_encoder(embedder or _preset(manifest.embedder_source.model, ENCODERS, "--embedder"))
    _check_digest(checkpoint, manifest.source.weights_sha256)
    _check_digest(folder, manifest.embedder_source.weights_sha256)
    config = dataclasses.replace(checkpoint.config, n_layers=manifest.shape.n_layers)
    return Models(checkpoint, load_decoder(config, checkpoint.tensor), load_encoder(folder.config, folder.tensor))


def _preset(model: str, presets: dict[str, Preset], flag: str) -> str:
    for name, preset in presets.items():
        if preset.model == model:
            return name
    raise WorkError(f"The bundle was made of {model!r}, which is no preset. Say where it is with {flag} FOLDER.")


def _check_digest(checkpoint: Checkpoint | EncoderFolder, expected: str) -> None:
    source = checkpoint.source()
    if source.weights_sha256 != expected:
        raise WorkError(
            f"The weights of {source.model} ({source.file}) have the SHA-256 {source.weights_sha256}; the bundle was made of "
            f"{expected}. Name the right checkpoint, or build the bundle again."
        )


def verify_bundle(bundle: Bundle, models: Models, progress: Progress = lambda _: None) -> list[Check]:
    """Every check of every target in the bundle, against PyTorch on the weights as the bundle stores them."""
    manifest = bundle.manifest
    reference = models.engine(manifest)
    embedder = dataclasses.replace(manifest.embedder, weights="fp32")
    full = TorchEngine.create(models.decoder, models.encoder, manifest.shape, manifest.plan, embedder)
    decoder = models.decoder
    if manifest.plan.weights == "int8":
        decoder = fake_quantize_(copy.deepcopy(decoder))
    progress("tokenizers, template, stored episodes")
    checks = text_checks(bundle, models.checkpoint)
    checks += episode_checks(bundle, LanguageModel(reference, manifest.shape, manifest.plan))
    for target in manifest.targets:
        engine = bundle.engine(target)
        progress(f"{target}: prefill, query and decode over evicting blocks")
        checks += language_checks(bundle, target, engine, reference, decoder)
        progress(f"{target}: greedy answers")
        checks.append(answer_check(bundle, target, engine, reference))
        progress(f"{target}: embedder and routing")
        checks += embedder_checks(bundle, target, engine, reference, full)
        engine.close()
    return checks


def integrity_checks(problems: list[str], folder: Path) -> list[Check]:
    """The verdict of SHA256SUMS as a check."""
    why = " ".join(problems[:5]) or f"every file of {folder.name} equals SHA256SUMS"
    return [Check("bundle", "files", "integrity", len(problems), 0, why)]


def quantisation_loss(decoder: Decoder, tokens: list[int]) -> dict[str, float]:
    """Distance of int8 weights from float32 on ``tokens``: perplexity of both and mean KL in nats a token."""
    ids = torch.tensor(tokens)
    exact = torch.log_softmax(dense_logits(decoder, ids), -1)
    coarse = torch.log_softmax(dense_logits(fake_quantize_(copy.deepcopy(decoder)), ids), -1)
    target = ids[1:, None]
    losses = [-float(x[:-1].gather(1, target).mean()) for x in (exact, coarse)]
    kl = float((exact.exp() * (exact - coarse)).sum(-1).mean())
    return {"perplexity_fp32": math.exp(losses[0]), "perplexity": math.exp(losses[1]), "kl": kl, "tokens": len(tokens)}
