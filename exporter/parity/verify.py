"""Verification of a bundle: integrity first, then every target against PyTorch from the checkpoint itself."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from exporter.checkpoints.base import Checkpoint
from exporter.checkpoints.embedders import load_sentence_encoder, open_encoder
from exporter.checkpoints.encoder_folder import EncoderFolder
from exporter.checkpoints.locating import ModelRequest, locate_decoder
from exporter.checkpoints.opening import open_decoder
from exporter.checkpoints.random_weights import FORMAT as RANDOM
from exporter.graphs.signatures import signatures
from exporter.manifest_parts import memory_figures, model_shape
from exporter.models.decoder import Decoder, load_decoder
from exporter.models.decoder_encoder import SentenceEncoder
from exporter.models.dense import dense_logits
from exporter.models.encoder_registry import ENCODERS
from exporter.models.registry import DECODERS, preset_of
from exporter.parity.checks import Check
from exporter.parity.episodes import centroid_check, episode_checks
from exporter.parity.language import Scope, answer_check, language_checks
from exporter.parity.text import Texts, embedder_checks, text_checks
from exporter.parity.torch_engine import TorchEngine
from exporter.targets import target as lowering
from exporter.targets.base import Progress
from exporter.trial import EVICTING_BLOCKS
from runtime_py.bundle import Bundle
from runtime_py.errors import BundleError, WorkError
from runtime_py.language_model import LanguageModel
from runtime_py.manifest import Manifest, Source, graph_weights

# Answers of random weights are noise; that the graphs compute the same noise as PyTorch is all there is to see.
TRIAL = Scope(evicting_blocks=EVICTING_BLOCKS, decode_steps=8, full_attention=False, greedy_answers=False)


@dataclass(frozen=True)
class Models:
    """Float32 models from the checkpoints that a bundle was made of."""

    checkpoint: Checkpoint
    decoder: Decoder
    encoder: SentenceEncoder

    def engine(self, manifest: Manifest, target: str | None = None) -> TorchEngine:
        """PyTorch over these models, with weights as ``target`` (by default the bundle's first) stores them."""
        return self.quantized(manifest, target or next(iter(manifest.targets))).full_engine(manifest)

    def full_engine(self, manifest: Manifest) -> TorchEngine:
        """PyTorch over these models as they are."""
        return TorchEngine.create(self.decoder, self.encoder, manifest.shape, manifest.plan, manifest.embedder)

    def quantized(self, manifest: Manifest, target: str) -> Models:
        """These models with weights as ``target`` stores them."""
        weights = graph_weights(manifest.plan, manifest.embedder)
        decoder, encoder = lowering(target).quantized(self.decoder, self.encoder, weights)
        return dataclasses.replace(self, decoder=decoder, encoder=encoder)


def load_models(manifest: Manifest, model: str | None = None, embedder: str | None = None) -> Models:
    """Open the checkpoints named by the manifest, or by ``model`` and ``embedder`` (preset, file or folder).

    Raises ``WorkError`` when a checkpoint cannot be found or is not the one the bundle was made of.
    """
    checkpoint = open_decoder(locate_decoder(_request(manifest.source, model)))
    folder = open_encoder(embedder or _encoder(manifest.embedder_source.model), offline=True)
    _check_digest(checkpoint, manifest.source.weights_sha256)
    _check_digest(folder, manifest.embedder_source.weights_sha256)
    config = dataclasses.replace(checkpoint.config, n_layers=manifest.shape.n_layers)
    return Models(checkpoint, load_decoder(config, checkpoint.tensor), load_sentence_encoder(folder))


def _request(source: Source, model: str | None) -> ModelRequest:
    """The weights that ``source`` names, or those at ``model``; nothing is downloaded for a comparison."""
    if source.format == RANDOM:
        return ModelRequest(source.model, weights_source="random")
    if model is not None:
        return ModelRequest(model, offline=True)
    preset = preset_of(source.model)
    if preset is None and "/" not in source.model:
        raise WorkError(f"The bundle was made of {source.model!r}, which is no preset. Say where it is with --model FOLDER.")
    from_hub = preset is None or DECODERS[preset].packaged is None
    return ModelRequest(source.model, revision=source.revision if from_hub else None, offline=True)


def _encoder(model: str) -> str:
    if "/" in model or any(preset.repo_id == model for preset in ENCODERS.values()):
        return model
    raise WorkError(f"The bundle was made of {model!r}, which is no preset. Say where it is with --embedder FOLDER.")


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
    if not manifest.targets:
        raise BundleError(f"{bundle.path} has no target: there is nothing to compare. Build it again.")
    full = models.full_engine(manifest)
    scope = TRIAL if manifest.source.format == RANDOM else Scope()
    progress("tokenizers, template, stored episodes")
    checks = [_manifest_check(manifest, models), *text_checks(bundle, models.checkpoint)]
    texts = Texts.of(bundle)
    exact = texts.vectors(bundle, full)
    for target in manifest.targets:
        engine, stored = bundle.engine(target), models.quantized(manifest, target)
        reference = stored.full_engine(manifest)
        expected = texts.vectors(bundle, reference)
        rounded = lowering(target).rounded_graphs(graph_weights(manifest.plan, manifest.embedder))
        if target == next(iter(manifest.targets)):  # its graphs have read the history
            reader = LanguageModel(reference, manifest.shape, manifest.plan)
            checks += episode_checks(bundle, reader, stored.decoder, rounded)
            checks.append(centroid_check(bundle, expected[: texts.n_segments], rounded))
        progress(f"{target}: prefill, query and decode over evicting blocks")
        checks += language_checks(bundle, target, engine, reference, stored.decoder, rounded, scope)
        progress(f"{target}: embedder and routing")
        found = texts.vectors(bundle, engine)
        checks += embedder_checks(bundle, target, found, expected, exact, rounded)
        if scope.greedy_answers and np.isfinite(found).all():  # else no question finds an episode
            progress(f"{target}: greedy answers")
            checks.append(answer_check(bundle, target, engine, reference, rounded))
        engine.close()
    return checks


def _manifest_check(manifest: Manifest, models: Models) -> Check:
    """What the manifest says of the graphs follows from the checkpoints and the plan; phones allocate by it."""
    shape = model_shape(models.decoder.config)
    pairs = {
        "shape": (manifest.shape, shape),
        "signatures": (manifest.signatures, signatures(shape, manifest.plan, manifest.embedder)),
        "memory": (manifest.memory, memory_figures(shape, manifest.plan)),
    }
    wrong = [name for name, (found, expected) in pairs.items() if found != expected]
    return Check("bundle", "manifest", "derived", len(wrong), 0, f"of {', '.join(pairs)}; wrong: {', '.join(wrong) or 'none'}")


def integrity_checks(problems: list[str], folder: Path) -> list[Check]:
    """The verdict of SHA256SUMS as a check."""
    why = " ".join(problems[:5]) or f"every file of {folder.name} equals SHA256SUMS"
    return [Check("bundle", "files", "integrity", len(problems), 0, why)]


def quantisation_loss(decoder: Decoder, quantized: Decoder, tokens: list[int]) -> dict[str, float]:
    """Distance of ``quantized`` from float32 on ``tokens``: perplexity of both and mean KL in nats a token."""
    ids = torch.tensor(tokens)
    exact = torch.log_softmax(dense_logits(decoder, ids), -1)
    coarse = torch.log_softmax(dense_logits(quantized, ids), -1)
    target = ids[1:, None]
    losses = [-float(x[:-1].gather(1, target).mean()) for x in (exact, coarse)]
    kl = float((exact.exp() * (exact - coarse)).sum(-1).mean())
    return {"perplexity_fp32": math.exp(losses[0]), "perplexity": math.exp(losses[1]), "kl": kl, "tokens": len(tokens)}
