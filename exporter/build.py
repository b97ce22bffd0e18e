"""The stages of a build. Everything happens in a folder beside the destination, which is renamed whole at the end."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibration.profiles import calibration_text, measure_profile, stored_profile
from exporter import __version__
from exporter.bundle_writer.selftest import write_selftest
from exporter.bundle_writer.tokenizers import embedder_info, write_tokenizers
from exporter.checkpoints.base import Checkpoint
from exporter.checkpoints.embedders import load_sentence_encoder, open_encoder
from exporter.checkpoints.encoder_folder import EncoderFolder
from exporter.checkpoints.locating import Located, locate_decoder
from exporter.checkpoints.opening import open_decoder
from exporter.checkpoints.random_weights import FORMAT as RANDOM
from exporter.console import Stages
from exporter.graphs.signatures import signatures
from exporter.history import HistoryTools, fill_store, write_episodes
from exporter.manifest_parts import library_versions, memory_figures, model_shape
from exporter.models.decoder import load_decoder
from exporter.parity.checks import Check
from exporter.parity.verify import Models, quantisation_loss, verify_bundle
from exporter.plan import BuildPlan
from exporter.targets import target
from exporter.targets.base import GraphSource
from exporter.template import cut_template
from exporter.trial import borrowed_sensitivities, shortened
from runtime_py.bundle import Bundle
from runtime_py.episodes.history import History
from runtime_py.episodes.store import Store
from runtime_py.errors import WorkError
from runtime_py.files import writing_folder
from runtime_py.integrity import write_sums
from runtime_py.language_model import LanguageModel
from runtime_py.manifest import SCHEMA_VERSION, Manifest, Routing, Source, Target, graph_weights
from runtime_py.tokenizer import TextTokenizer

ROUTING_THRESHOLD = 0.05
_QUALITY_TOKENS = 1024


@dataclass(frozen=True)
class _Inputs:
    """What a build works with once everything asked for has been checked."""

    plan: BuildPlan
    models: Models
    encoder: EncoderFolder
    text_ids: list[int]  # the calibration text
    manifest: Manifest


def build_bundle(
    plan: BuildPlan, history: History, stages: Stages, replace: bool = False, located: Located | None = None
) -> list[Check]:
    """Build, verify and publish a bundle at ``plan.out``; returns the checks, all passed. ``located``: the model, once found.

    Raises ``UsageError`` for an impossible plan before any work, ``WorkError`` when a stage or a check fails; then nothing
    appears at ``plan.out``, and a bundle that failed its checks is kept beside it for inspection.
    """
    plan.check_early(replace)
    checkpoint = open_decoder(located or locate_decoder(plan.request, stages.note))
    encoder = open_encoder(plan.embedder, plan.offline, stages.note)
    plan.check(checkpoint.config, encoder.longest)
    with writing_folder(plan.out, replace) as folder:
        with stages.stage("load"):
            inputs = _prepare(plan, checkpoint, encoder, folder, stages)
        with stages.stage("lower", folder):
            targets = _lower(inputs, folder, stages)
        manifest = dataclasses.replace(inputs.manifest, targets=targets)
        _write_manifest(manifest, folder)
        with stages.stage("episodes", folder):
            _build_episodes(folder, history, stages)
        with stages.stage("verify"):
            bundle = Bundle.open(folder, check=False)
            for name in plan.targets:
                write_selftest(bundle, name, inputs.models.engine(manifest, name), inputs.text_ids)
            write_sums(folder)  # sessions name their store after the bundle's id
            checks = verify_bundle(bundle, inputs.models, stages.note)
            quality = _quality(inputs, stages)
        manifest = dataclasses.replace(manifest, targets=_with_verdicts(targets, checks), quality=quality)
        _write_manifest(manifest, folder)
        write_sums(folder)
        failed = [c for c in checks if not c.passed]
        if failed:
            kept = _keep_aside(folder, plan.out)
            names = ", ".join(f"{c.target} {c.graph} {c.name} {c.value:.3g} > {c.limit:g}" for c in failed)
            raise WorkError(f"{len(failed)} of {len(checks)} checks failed ({names}). Not published; kept in {kept}.")
    return checks


def _prepare(plan: BuildPlan, checkpoint: Checkpoint, encoder: EncoderFolder, folder: Path, stages: Stages) -> _Inputs:
    """Read weights, find or measure the sensitivities, resolve the plan, write tokenizers and layer budgets."""
    config = checkpoint.config
    if plan.layers is not None:
        config = dataclasses.replace(config, n_layers=plan.layers)
    info = embedder_info(encoder, plan.embed_length)
    write_tokenizers(checkpoint, encoder, info, folder)
    tokenizer = TextTokenizer(folder / "tokenizer" / "tokenizer.json", checkpoint.stop_ids())
    template = cut_template(checkpoint, tokenizer)
    source = checkpoint.source()
    flat = [0.0] * config.n_layers
    stored = flat if plan.alpha == 0 else _known_sensitivities(checkpoint, source)
    # An impossible plan is refused before the weights are read; without a profile, what no profile could make possible.
    plan.resolve(config, stored[: config.n_layers] if stored is not None else flat, template)
    decoder = load_decoder(config, checkpoint.tensor)
    models = Models(checkpoint, decoder, load_sentence_encoder(encoder))
    if stored is None:
        stages.note("no stored profile of this model: calibrating")
        profile: dict[str, Any] = measure_profile(decoder, tokenizer.encode, source.model, source.weights_sha256, stages.note)
        stored = profile["sensitivities"]
    sensitivities = stored[: config.n_layers]
    graph_plan = plan.resolve(config, sensitivities, template)
    shape = model_shape(config)
    budgets = {"sensitivities": sensitivities, "alpha": plan.alpha, "budgets": graph_plan.layer_budgets}
    (folder / "layer_budgets.json").write_text(json.dumps(budgets, indent=1) + "\n", encoding="utf-8")
    smallest, largest = graph_plan.min_budget, graph_plan.max_budget
    stages.note(f"{config.n_layers} layers, budgets {smallest} to {largest}, {graph_plan.n_sinks} sinks")
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        name=plan.out.resolve().name,
        exporter_version=__version__,
        libraries=library_versions(),
        source=source,
        embedder_source=encoder.source(),
        shape=shape,
        plan=graph_plan,
        template=template,
        embedder=info,
        routing=Routing(ROUTING_THRESHOLD),
        signatures=signatures(shape, graph_plan, info),
        targets={},
        memory=memory_figures(shape, graph_plan),
        trial=plan.trial,
    )
    return _Inputs(plan, models, encoder, tokenizer.encode(calibration_text()), manifest)


def _known_sensitivities(checkpoint: Checkpoint, source: Source) -> list[float] | None:
    """Of the whole model, from a stored profile; None when the model must be calibrated."""
    layers = checkpoint.config.n_layers
    return borrowed_sensitivities(layers) if source.format == RANDOM else stored_profile(source.weights_sha256, layers)


def _lower(inputs: _Inputs, folder: Path, stages: Stages) -> dict[str, Target]:
    manifest, models = inputs.manifest, inputs.models
    weights = graph_weights(manifest.plan, manifest.embedder)
    graphs = GraphSource(models.decoder, models.encoder, manifest.plan, manifest.signatures, weights)
    return {
        name: target(name).lower(graphs, folder, lambda text, name=name: stages.note(f"{name} {text}"))  # type: ignore[misc]
        for name in inputs.plan.targets
    }


def _build_episodes(folder: Path, history: History, stages: Stages) -> None:
    """Cluster and read the history with the shipped graphs themselves."""
    bundle = Bundle.open(folder, check=False)
    manifest = bundle.manifest
    engine = bundle.engine(next(iter(manifest.targets)))
    text = bundle.text_tokenizer()
    tools = HistoryTools(
        LanguageModel(engine, manifest.shape, manifest.plan),
        bundle.embedder(engine),
        text.encode,
        manifest.template,
    )

    if manifest.source.format == RANDOM:
        history = shortened(history, manifest.plan, manifest.template.prefix, text.encode)
        stages.note(f"random weights: only the first {len(history.utterances)} utterances are read")

    def report(episode: int, done: int, total: int) -> None:
        stages.count("shared tokens" if episode < 0 else f"episode {episode}: tokens", done, total)

    with (
        # Inside the folder that is being built: what removes that one after a kill removes this one too.
        tempfile.TemporaryDirectory(dir=folder, prefix="store-") as scratch,
        Store.create(Path(scratch) / "store", "build", history.speakers) as store,
    ):
        segments, labels = fill_store(store, history, tools, stages.note, report, checkpoint=False)
        write_episodes(store, segments, labels, folder)
    engine.close()


def _quality(inputs: _Inputs, stages: Stages) -> dict[str, Any]:
    """What quantised weights cost on the calibration text, by target; float32 loses nothing, random weights have nothing."""
    if inputs.plan.weights == "fp32" or inputs.manifest.source.format == RANDOM:
        return {}
    quality = {}
    for name in inputs.plan.targets:
        stored = inputs.models.quantized(inputs.manifest, name)
        loss = quantisation_loss(inputs.models.decoder, stored.decoder, inputs.text_ids[:_QUALITY_TOKENS])
        stages.note(
            f"{name} {inputs.plan.weights} against fp32: KL {loss['kl']:.4f} nats, perplexity {loss['perplexity']:.2f} "
            f"({loss['perplexity_fp32']:.2f})"
        )
        quality[name] = loss
    return quality


def _with_verdicts(targets: dict[str, Target], checks: list[Check]) -> dict[str, Target]:
    """Targets with their checks and verdict; checks of the bundle itself count for every target."""
    result = {}
    for name, each in targets.items():
        own = [c for c in checks if c.target in (name, "bundle")]
        verdict = "pass" if own and all(c.passed for c in own) else "fail"
        result[name] = dataclasses.replace(each, parity=verdict, checks=[c.to_json() for c in own])
    return result


def _write_manifest(manifest: Manifest, folder: Path) -> None:
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")


def _keep_aside(folder: Path, destination: Path) -> Path:
    """Move a bundle that failed its checks to NAME.failed; of what may be there, only another failed bundle is deleted."""
    destination = destination.resolve()
    for number in itertools.count(1):
        kept = destination.with_name(f"{destination.name}.failed" + (f"-{number}" if number > 1 else ""))
        if not kept.is_symlink() and (kept / "manifest.json").is_file():
            shutil.rmtree(kept)
        if not kept.exists() and not kept.is_symlink():
            break
    folder.rename(kept)
    return kept
