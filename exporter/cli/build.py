"""``build``: from a model to a verified bundle."""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path

from exporter.checkpoints.locating import WEIGHTS_SOURCES, locate_decoder
from exporter.cli.options import count, print_checks, print_json, trial_notice
from exporter.console import Stages, folder_bytes
from exporter.models.encoder_registry import ENCODERS
from exporter.models.registry import DECODERS, preset_of
from exporter.plan import BuildPlan
from exporter.targets import TARGETS, installed_targets
from runtime_py.episodes.history import History
from runtime_py.episodes.loaders import load_history

SAMPLE = "sample_conversation.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags and their defaults, which are those of ``BuildPlan``."""
    plan = BuildPlan()
    presets, encoders = ", ".join(DECODERS), ", ".join(ENCODERS)
    parser.add_argument("--model", default=plan.model, help=f"preset ({presets}), org/name, .gguf file or folder")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="folder or .gguf file with the weights of --model")
    parser.add_argument("--revision", help="branch, tag or commit of the model on the Hugging Face hub")
    parser.add_argument("--offline", action="store_true", help="use the Hugging Face cache only")
    random = "random: real shapes without a checkpoint, for sizes and speed"
    parser.add_argument("--weights-source", default=plan.weights_source, choices=WEIGHTS_SOURCES, help=random)
    parser.add_argument(
        "--embedder", default=plan.embedder, help=f"preset ({encoders}), org/name or folder (default: {plan.embedder})"
    )
    parser.add_argument("--budget", type=count, default=plan.budget, metavar="M", help="kept rows a layer, a multiple of 8")
    known = ", ".join(TARGETS)
    parser.add_argument("--targets", help=f"comma-separated, of {known} (default: all installed that can store the weights)")
    weights = sorted({w for name in installed_targets() for w in TARGETS[name].weights})
    parser.add_argument("--weights", default=plan.weights, choices=weights, help=f"default: {plan.weights}")
    parser.add_argument("--out", type=Path, help="folder of the bundle (default: dist/<model>-<budget>)")
    parser.add_argument("--replace", action="store_true", help="replace a folder that exists")
    parser.add_argument("--history", type=Path, help="conversation to read (default: the sample conversation)")
    parser.add_argument("--index", type=int, default=0, help="which conversation of the file (default: 0)")
    for name, what in {
        "block": "tokens read at once",
        "prompt": "tokens of the patched prompt",
        "tail": "free rows behind the compressed cache",
        "query": "question tokens read at once",
        "episodes": "number of episodes",
        "embed-length": "tokens the sentence encoder reads",
    }.items():
        default = getattr(plan, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=count, default=default, metavar="N", help=f"{what} (default: {default})")
    parser.add_argument("--alpha", type=float, default=plan.alpha, help=f"sharpness of the layer budgets ({plan.alpha})")
    parser.add_argument("--layers", type=count, metavar="N", help="use only the first N layers: for trials, marked so")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")


def run(options: argparse.Namespace) -> int:
    """Build; returns 0."""
    stages = Stages()
    plan = _plan(options)
    history = read_history(options.history, options.index, stages)
    for name, value in vars(plan).items():
        if name in ("checkpoint", "revision", "offline") and not value:
            continue  # the usual case
        shown = ",".join(value) if isinstance(value, tuple) else "all" if value is None else value
        stages.line(f"{name:>13} {shown}")
    plan.check_early(options.replace)
    located = locate_decoder(plan.request, stages.line)
    # PyTorch takes seconds to import; what is missing is said before.
    from exporter.build import build_bundle

    checks = build_bundle(plan, history, stages, options.replace, located)
    if plan.trial:
        stages.line(trial_notice(plan.trial))
    if options.json:
        print_json({"pass": True, "out": str(plan.out), "trial": plan.trial, "checks": [c.to_json() for c in checks]})
    else:
        print_checks(checks)
    stages.line(f"{plan.out}: {folder_bytes(plan.out) / 1e6:.0f} MB. Next:")
    stages.line(f'  python -m exporter chat {plan.out} --question "..."')
    return 0


def _plan(options: argparse.Namespace) -> BuildPlan:
    names = options.targets.split(",") if options.targets else installed_targets(options.weights)
    wanted = tuple(dict.fromkeys(name.strip() for name in names))
    name = f"{_model_name(options.model)}-{options.budget}"
    name += "-random" if options.weights_source == "random" else ""
    name += f"-{options.layers}layers" if options.layers is not None else ""
    out = options.out or Path("dist") / name
    return BuildPlan(
        model=options.model,
        checkpoint=options.checkpoint,
        revision=options.revision,
        offline=options.offline,
        weights_source=options.weights_source,
        embedder=options.embedder,
        budget=options.budget,
        targets=wanted,
        weights=options.weights,
        out=out,
        block=options.block,
        prompt=options.prompt,
        tail=options.tail,
        query=options.query,
        embed_length=options.embed_length,
        episodes=options.episodes,
        alpha=options.alpha,
        layers=options.layers,
    )


def _model_name(model: str) -> str:
    """The preset, the name of a folder or repository, or that of a file without its extension."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name
    return preset_of(model) or (path.stem if path.suffix == ".gguf" else path.name)


def read_history(path: Path | None, index: int, stages: Stages) -> History:
    """The conversation in ``path``, or the sample conversation."""
    loaded = load_history(path if path is not None else Path(str(files("calibration").joinpath(SAMPLE))), index)
    dropped = f", {loaded.dropped} empty utterances left out" if loaded.dropped else ""
    name = path.name if path is not None else "sample conversation"
    stages.line(f"{'history':>13} {name} ({loaded.layout}), {len(loaded.history.utterances)} utterances{dropped}")
    return loaded.history
