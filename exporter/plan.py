"""The plan of a build: every number that fixes a shape, resolved and checked before any work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exporter.budgets import layer_budgets
from exporter.checkpoints.locating import ModelRequest
from exporter.models.config import DecoderConfig
from exporter.models.registry import DECODERS, preset_of
from exporter.targets import check_target
from runtime_py.errors import UsageError
from runtime_py.manifest import GraphPlan, Template

MIN_BUDGET, MIN_BLOCK = 64, 32
SINKS_BEHIND_PREFIX = 4
DEFAULT_ALPHA = 1.0
GRANULARITY = 8


@dataclass(frozen=True)
class BuildPlan:
    """What ``build`` was asked for. Counts are tokens; ``budget`` is kept rows per layer and KV head, averaged over layers."""

    model: str = "smollm2-135m"
    checkpoint: Path | None = None  # where the weights of ``model`` are, when they are not where it is looked for
    revision: str | None = None
    offline: bool = False
    weights_source: str = "checkpoint"
    embedder: str = "minilm-l6"
    budget: int = 512
    targets: tuple[str, ...] = ("onnx",)
    weights: str = "fp32"
    out: Path = field(default_factory=Path)
    block: int = 256
    prompt: int = 256
    tail: int = 512
    query: int = 32
    embed_length: int = 256
    episodes: int = 4
    alpha: float = DEFAULT_ALPHA
    layers: int | None = None  # only the first layers of the model: for trials

    @property
    def request(self) -> ModelRequest:
        """Which weights are asked for."""
        return ModelRequest(self.model, self.checkpoint, self.revision, self.offline, self.weights_source)

    @property
    def trial(self) -> list[str]:
        """What makes the bundle a trial whose answers mean nothing; empty for one of use."""
        random = ["random weights"] if self.weights_source == "random" else []
        return random + ([f"only the first {self.layers} layers"] if self.layers is not None else [])

    def check_early(self, replace: bool) -> None:
        """Refuse, before weights are looked for or downloaded, what no checkpoint could make possible.

        Raises ``UsageError`` for a destination that is taken, a target that cannot be built, and for a preset, whose shapes
        are known, an impossible number.
        """
        self._check_destination(replace)
        for name in self.targets:
            check_target(name, self.weights)
        if preset := preset_of(self.model):
            self.check(DECODERS[preset].config)

    def _check_destination(self, replace: bool) -> None:
        """Refuse to write over anything but what ``--replace`` may mean: a bundle, or an empty folder."""
        out = self.out
        if not out.exists():
            return
        if not replace:
            raise UsageError(f"{out} exists already. Name another folder with --out, or replace it with --replace.")
        if not out.is_dir() or (not (out / "manifest.json").is_file() and any(out.iterdir())):
            raise UsageError(
                f"{out} is not a bundle; --replace deletes only a bundle or an empty folder. Name another folder with --out."
            )

    def check(self, config: DecoderConfig, longest_text: int | None = None) -> None:
        """Refuse impossible numbers. Raises ``UsageError`` naming the flag, the value and what is allowed.

        ``longest_text`` is what the sentence encoder can read, in tokens; None while it is not known.
        """
        context = config.context
        limits = {
            "--block": (self.block, MIN_BLOCK, context),
            "--prompt": (self.prompt, 32, context),
            "--tail": (self.tail, 64, context),
            "--query": (self.query, 2, self.tail // 2),
            "--episodes": (self.episodes, 1, 64),
            "--budget": (self.budget, MIN_BUDGET, self._room(context)),
        }
        for flag, (value, low, high) in limits.items():
            if high < low:
                raise UsageError(
                    f"--block {self.block} + --prompt {self.prompt}, or --tail {self.tail}, leave no room for the smallest "
                    f"budget, {MIN_BUDGET}, in the {context} tokens the model was trained on. Lower them."
                )
            if not low <= value <= high:
                raise UsageError(f"{flag} {value} is not possible: allowed are {low} to {high}.{self._hint(flag, value)}")
        layer_budgets([0.0], self.budget, 0.0, GRANULARITY)  # refuses what is no multiple of the granularity
        if not 0.0 <= self.alpha <= 16.0:
            raise UsageError(f"--alpha {self.alpha} is not possible: allowed are 0 to 16.")
        if self.layers is not None and not 1 <= self.layers <= config.n_layers:
            raise UsageError(f"--layers {self.layers} is not possible: allowed are 1 to {config.n_layers}.")
        if longest_text is not None and not 16 <= self.embed_length <= longest_text:
            raise UsageError(f"--embed-length {self.embed_length} is not possible: allowed are 16 to {longest_text}.")

    def _room(self, context: int) -> int:
        """The largest budget that fits when all layers get the same; unequal layers need a smaller one."""
        return (context - max(self.block + self.prompt, self.tail)) // GRANULARITY * GRANULARITY

    def _hint(self, flag: str, value: int) -> str:
        if flag == "--budget" and value < MIN_BUDGET:
            return " It is the number of kept rows a layer; try 512."
        return ""

    def resolve(self, config: DecoderConfig, sensitivities: Sequence[float], template: Template) -> GraphPlan:
        """The numbers of the graphs. Raises ``UsageError`` with the largest value that fits, when the context is too short."""
        around = len(template.turn_end) + len(template.question_prefix) + len(template.question_suffix)
        if self.tail < 4 * around:
            raise UsageError(
                f"--tail {self.tail} is too short: the template around a question takes {around} tokens; "
                f"allowed are {4 * around} and more."
            )
        budgets = layer_budgets(sensitivities, self.budget, self.alpha, GRANULARITY)
        excess = self._excess(budgets, config.context)
        if excess > 0:
            best = self._largest_budget(config, sensitivities)
            advice = f"The largest --budget that fits is {best}" if best else "No budget fits; lower --block, --prompt, --tail"
            raise UsageError(
                f"--budget {self.budget} gives the largest layer {max(budgets)} rows; with block {self.block} + prompt "
                f"{self.prompt} or tail {self.tail} that exceeds the {config.context} tokens the model was trained on. {advice}."
            )
        return GraphPlan(
            budget=self.budget,
            block=self.block,
            prompt=self.prompt,
            tail=self.tail,
            query=self.query,
            embed_length=self.embed_length,
            episodes=self.episodes,
            alpha=self.alpha,
            granularity=GRANULARITY,
            layer_budgets=budgets,
            n_sinks=min(len(template.prefix) + SINKS_BEHIND_PREFIX, min(budgets) // 4),
            weights=self.weights,
            cache="fp32",
        )

    def _excess(self, budgets: list[int], context: int) -> int:
        return max(budgets) + max(self.block + self.prompt, self.tail) - context

    def _largest_budget(self, config: DecoderConfig, sensitivities: Sequence[float]) -> int:
        for budget in range(self.budget // GRANULARITY * GRANULARITY, MIN_BUDGET - 1, -GRANULARITY):
            if self._excess(layer_budgets(sensitivities, budget, self.alpha, GRANULARITY), config.context) <= 0:
                return budget
        return 0


def parse_count(text: str) -> int:
    """``"512"``, ``"4k"``, ``"4K"`` (k is 1,024). Raises ``UsageError`` for anything else."""
    match = re.fullmatch(r"(\d{1,9})([kK]?)", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a number of tokens. Write a whole number, like 512, or 4k for 4,096.")
    return int(match[1]) * (1024 if match[2] else 1)
