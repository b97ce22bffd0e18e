"""A preset's shapes filled with random numbers: sizes, memory and speed of a bundle can be tried without a checkpoint."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from dataclasses import asdict

import torch
from torch import Tensor

from exporter.checkpoints.gguf_file import GGUFCheckpoint
from exporter.models.decoder import Decoder, checkpoint_names
from exporter.models.registry import DECODERS, packaged_path
from runtime_py.errors import WorkError
from runtime_py.manifest import Source

FORMAT = "random"
_SEED = 42
_LENDER = "smollm2-135m"


class RandomCheckpoint:
    """Normal numbers that depend on the tensor's name alone; tokenizer and template are SmolLM2's.

    Every tensor is as incompressible as a trained one, and activations stay of ordinary size: what is measured of such a bundle
    is what a trained one would show. Raises ``WorkError`` when the package with the tokenizer is not installed.
    """

    def __init__(self, preset: str) -> None:
        self.preset, self.config = preset, DECODERS[preset].config
        lender = DECODERS[_LENDER]
        self._lender = GGUFCheckpoint(packaged_path(lender.packaged), lender.repo_id)

    @functools.cached_property
    def _shapes(self) -> dict[str, list[int]]:
        with torch.device("meta"):
            state = Decoder(self.config).state_dict()
        return {theirs: list(state[ours].shape) for ours, theirs in checkpoint_names(self.config).items()}

    def tensor(self, name: str) -> Tensor:
        """See ``Checkpoint.tensor``."""
        if name not in self._shapes:
            raise WorkError(f"{self.preset} has no tensor {name!r}.")
        shape = self._shapes[name]
        seed = int.from_bytes(hashlib.sha256(f"{_SEED} {self.preset} {name}".encode()).digest()[:8], "little") >> 1
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        if len(shape) == 2:
            return values.mul_(1.0 / math.sqrt(shape[1]))
        return values.mul_(0.1).add_(1.0) if "norm" in name else values.mul_(0.1)

    def tokenizer_json(self) -> str:
        return self._lender.tokenizer_json()

    def chat_template(self) -> str:
        return self._lender.chat_template()

    def special_tokens(self) -> dict[str, str]:
        return self._lender.special_tokens()

    def stop_ids(self) -> list[int]:
        return self._lender.stop_ids()

    def source(self) -> Source:
        recipe = json.dumps({"seed": _SEED, "preset": self.preset, **asdict(self.config)}, sort_keys=True)
        digest = hashlib.sha256(recipe.encode()).hexdigest()
        return Source(DECODERS[self.preset].repo_id, f"seed {_SEED}", FORMAT, "", digest, "none: random numbers")
