"""``models``: the presets, with what their files and a phone's memory come to."""

from __future__ import annotations

import argparse
from typing import Any

from exporter.cli.options import print_json
from exporter.models.encoder_registry import ENCODERS
from exporter.models.registry import DECODERS, Preset
from exporter.plan import BuildPlan
from exporter.sizes import cache_bytes, phone_bytes, weight_bytes, weight_counts

BUDGETS = (2048, 4096, 6144, 8192)
WEIGHTS = ("int4", "int8", "fp32")
_SHOWN = "int4"  # what a phone gets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags."""
    parser.add_argument("--json", action="store_true", help="print as JSON, with shapes and every kind of weights")


def run(options: argparse.Namespace) -> int:
    """Print; returns 0."""
    shown = [describe(name, preset) for name, preset in DECODERS.items()]
    if options.json:
        print_json({"models": shown, "embedders": [_describe_embedder(name) for name in ENCODERS]})
    else:
        _print(shown)
        _print_embedders()
    return 0


def describe(name: str, preset: Preset) -> dict[str, Any]:
    """One model of ``models --json``; bytes are of the default plan with float32 caches. None: the context is too short."""
    config, plan = preset.config, BuildPlan()
    fits = {budget: budget + max(plan.block + plan.prompt, plan.tail) <= config.context for budget in BUDGETS}
    return {
        "name": name,
        "repo_id": preset.repo_id,
        "architecture": config.architecture,
        "licence": preset.licence,
        "gated": preset.gated,
        "installed_by_pip": preset.packaged is not None,
        "parameters": weight_counts(config).total,
        "shape": {
            "layers": config.n_layers,
            "heads": config.n_heads,
            "kv_heads": config.n_kv_heads,
            "head_dim": config.head_dim,
            "hidden": config.hidden,
            "ffn": config.ffn,
            "vocab_size": config.vocab_size,
            "tied": config.tied,
        },
        "context": config.context,
        "stop_ids": list(preset.stop_ids),
        "weight_bytes": {weights: weight_bytes(config, weights) for weights in WEIGHTS},
        "phone_bytes": {
            weights: {str(b): phone_bytes(config, weights, b, plan.tail) if fits[b] else None for b in BUDGETS}
            for weights in WEIGHTS
        },
        "full_cache_bytes_at_30000": cache_bytes(config, 30_000),
    }


def _describe_embedder(name: str) -> dict[str, Any]:
    preset = ENCODERS[name]
    return {
        "name": name,
        "repo_id": preset.repo_id,
        "languages": preset.languages,
        "licence": preset.licence,
        "installed_by_pip": preset.packaged is not None,
    }


def _print_embedders() -> None:
    print("\nSentence encoders for --embedder, with their languages:")
    for name, preset in ENCODERS.items():
        print(f"  {name:<24} {preset.languages:<10} {preset.licence}")


def _print(shown: list[dict[str, Any]]) -> None:
    print(
        f"{'':<13} {'':>6} {'':>6}  {'weights in a bundle, MB':^24} {'phone, ' + _SHOWN + ', MB, at budget':^27} {'full KV':>8}"
    )
    print(
        f"{'model':<13} {'params':>6} {'trained':>7} {'int4':>7} {'int8':>7} {'fp32':>8} "
        + " ".join(f"{b // 1024}k".rjust(6) for b in BUDGETS)
        + f" {'of 30K':>8}  licence"
    )
    for model in shown:
        sizes, memory = model["weight_bytes"], model["phone_bytes"][_SHOWN]
        print(
            f"{model['name']:<13} {_billions(model['parameters']):>6} {model['context'] // 1024:>6}k "
            f"{_mb(sizes['int4']):>7} {_mb(sizes['int8']):>7} {_mb(sizes['fp32']):>8} "
            + " ".join(_mb(memory[str(b)]).rjust(6) for b in BUDGETS)
            + f" {_mb(model['full_cache_bytes_at_30000']):>8}  {model['licence']}{', gated' if model['gated'] else ''}"
        )
    print("Phone memory: weights, one episode's sealed cache and the tail; -: more than the model was trained on.")
    print("Full KV: the cache alone of a conversation of 30,000 tokens without a budget.")
    print("Build one:  python -m exporter build --model NAME --budget 4k")


def _mb(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:,.0f}"


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
