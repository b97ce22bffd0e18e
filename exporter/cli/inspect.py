"""``inspect``: what is in a bundle, without PyTorch and without an engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from exporter.cli.options import add_bundle, print_json, trial_notice
from runtime_py.bundle import Bundle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags."""
    add_bundle(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(options: argparse.Namespace) -> int:
    """Print; returns 0."""
    shown = describe(Bundle.open(options.bundle))
    if options.json:
        print_json(shown)
    else:
        _print(shown)
    return 0


def describe(bundle: Bundle) -> dict[str, Any]:
    """Everything ``inspect --json`` prints."""
    manifest, history = bundle.manifest, bundle.episodes_file()
    return {
        "name": manifest.name,
        "id": bundle.id,
        "model": manifest.source.model,
        "embedder": manifest.embedder_source.model,
        "embedder_prompts": {"query": manifest.embedder.query_prompt, "document": manifest.embedder.document_prompt},
        "weights": manifest.plan.weights,
        "trial": manifest.trial,
        "budget": manifest.plan.budget,
        "layer_budgets": manifest.plan.layer_budgets,
        "layer_budgets_sum": sum(manifest.plan.layer_budgets),
        "targets": {name: {"parity": t.parity, "minimum_runtime": t.minimum_runtime} for name, t in manifest.targets.items()},
        "memory": manifest.memory,
        "quality": manifest.quality,
        "episodes": [
            {"n_seen": e.n_seen, "segments": sum(s.episode == i for s in history.segments), "medoids": e.medoids}
            for i, e in enumerate(history.episodes)
        ],
        "files": [{"path": p, "bytes": size} for p, size in _files(bundle.path)],
    }


def _files(folder: Path) -> list[tuple[str, int]]:
    return [(str(p.relative_to(folder)), p.stat().st_size) for p in sorted(folder.rglob("*")) if p.is_file()]


def _print(shown: dict[str, Any]) -> None:
    print(f"{shown['name']}: {shown['model']}, weights {shown['weights']}, id {shown['id'][:16]}")
    prompts = " ".join(f"{name} prompt {text!r}" for name, text in shown["embedder_prompts"].items() if text)
    print(f"embedder {shown['embedder']}: {prompts or 'no prompts'}")
    if shown["trial"]:
        print(trial_notice(shown["trial"]))
    for name, target in shown["targets"].items():
        print(f"target {name}: parity {target['parity']}, needs {target['minimum_runtime']}")
    budgets = shown["layer_budgets"]
    print(f"layer budgets, {len(budgets)} layers, sum {shown['layer_budgets_sum']} = {len(budgets)} x {shown['budget']}:")
    print("  " + " ".join(map(str, budgets)))
    memory = shown["memory"]
    print(
        f"memory: sealed cache {memory['sealed_cache_per_episode'] / 1e6:.1f} MB an episode, tail {memory['tail'] / 1e6:.1f} MB"
    )
    for tokens, size in memory["full_cache_at"].items():
        print(f"  full KV of {int(tokens):,} tokens would be {size / 1e6:,.0f} MB")
    for index, episode in enumerate(shown["episodes"]):
        print(f"episode {index}: {episode['segments']} segments, {episode['n_seen']} tokens read, medoids {episode['medoids']}")
    for file in shown["files"]:
        print(f"{file['bytes']:>12,} {file['path']}")
