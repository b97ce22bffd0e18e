"""Stored sensitivity profiles: one JSON file a model, found by the digest of its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib.resources import files

import torch

from calibration.sensitivity import TEXT_TOKENS, sensitivities
from exporter.models.decoder import Decoder

TEXT_FILE = "calibration_text.txt"


def calibration_text() -> str:
    """The project's calibration text."""
    return files("calibration").joinpath(TEXT_FILE).read_text(encoding="utf-8")


def stored_profile(weights_sha256: str, n_layers: int) -> list[float] | None:
    """``s_l`` for each layer of the model with these weights, or None when it was never profiled."""
    for entry in files("calibration").joinpath("profiles").iterdir():
        if entry.name.endswith(".json"):
            profile = json.loads(entry.read_text(encoding="utf-8"))
            if profile["weights_sha256"] == weights_sha256 and len(profile["sensitivities"]) == n_layers:
                return [float(s) for s in profile["sensitivities"]]
    return None


def measure_profile(
    decoder: Decoder,
    encode: Callable[[str], list[int]],
    model: str,
    weights_sha256: str,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, object]:
    """A new profile with its provenance, ready to be stored as JSON."""
    text = calibration_text()
    tokens = torch.tensor(encode(text), dtype=torch.int64)
    return {
        "model": model,
        "weights_sha256": weights_sha256,
        "text": TEXT_FILE,
        "text_sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
        "tokens": min(TEXT_TOKENS, decoder.config.context, len(tokens)),
        "sensitivities": [round(s, 6) for s in sensitivities(decoder, tokens, progress)],
    }
