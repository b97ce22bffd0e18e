"""Sensitivity: the block mask is the one described, it really blocks, and profiles say what they were measured on."""

from __future__ import annotations

import hashlib
import json
import math
from importlib.resources import files

import pytest
import torch

from calibration.profiles import calibration_text, measure_profile, stored_profile
from calibration.sensitivity import BLOCK, SINKS, TEXT_TOKENS, block_mask, sensitivities, window_similarity
from exporter.checkpoints.gguf_file import GGUFCheckpoint
from exporter.models.decoder import Decoder
from exporter.models.dense import dense_pass
from runtime_py.tokenizer import TextTokenizer


@pytest.mark.parametrize(("length", "block", "sinks"), [(50, 16, 4), (64, 16, 0), (9, 4, 20), (7, 10, 1), (1, 2, 0)])
def test_block_mask_row_by_row(length: int, block: int, sinks: int) -> None:
    mask = block_mask(length, block, sinks)
    for row in range(length):
        first = (row // block) * block
        seen = set(range(first, row + 1)) | set(range(max(first - block // 2, 0), first)) | set(range(min(sinks, row + 1)))
        assert set(mask[row].nonzero().flatten().tolist()) == seen


def test_the_published_numbers_are_the_defaults() -> None:
    mask = block_mask(TEXT_TOKENS)
    assert (TEXT_TOKENS, BLOCK, SINKS) == (4096, 1024, 128)
    assert mask[4095].sum() == 1024 + 512 + 128
    assert mask[1024].sum() == 1 + 512 + 128
    assert mask[100].sum() == 101


def test_a_blocked_row_depends_on_what_its_mask_lets_through_and_on_nothing_else(tiny_decoder: Decoder) -> None:
    """The second layer's keys have attended once, so the mask's row is exactly what may change them."""
    length = 40
    mask = block_mask(length, 8, 2)
    tokens = torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(4))
    before = dense_pass(tiny_decoder, tokens, mask).keys
    for changed in range(length):
        other = tokens.clone()
        other[changed] = (tokens[changed] + 1) % 97
        after = dense_pass(tiny_decoder, other, mask).keys
        moved = [(a - b).abs().amax(dim=(0, 2)) > 1e-4 for a, b in zip(after, before, strict=True)]
        assert moved[0].nonzero().flatten().tolist() == [changed]
        unseen = ~mask[:, changed]
        assert not moved[1][unseen].any()
        assert moved[1][mask[:, changed]].float().mean() > 0.8


def test_window_similarity_by_hand() -> None:
    full = torch.tensor([[[1.0], [0.0], [3.0], [4.0], [9.0]], [[1.0], [1.0], [1.0], [0.0], [9.0]]])
    blocked = torch.tensor([[[0.0], [2.0], [3.0], [4.0], [-9.0]], [[1.0], [0.0], [-2.0], [0.0], [-9.0]]])
    # Windows of 2: head 0 gives 0 and 1, head 1 gives 1/sqrt(2) and -1; the fifth row is left out.
    assert window_similarity(full, blocked, 2) == pytest.approx((0 + 1 + math.sqrt(0.5) - 1) / 4, abs=1e-6)
    assert window_similarity(full, full * 3, 2) == pytest.approx(1.0, abs=1e-6)


def test_sensitivities_follow_from_the_two_passes(tiny_decoder: Decoder) -> None:
    tokens = torch.randint(0, 97, (600,), generator=torch.Generator().manual_seed(6))
    said: list[str] = []
    found = sensitivities(tiny_decoder, tokens, said.append)
    text = tokens[:512]  # the context of the model
    full, blocked = dense_pass(tiny_decoder, text).keys, dense_pass(tiny_decoder, text, block_mask(512, 128, 16)).keys
    expected = []
    for a, b in zip(full, blocked, strict=True):
        pairs = [(a[h, i : i + 100].flatten(), b[h, i : i + 100].flatten()) for h in range(2) for i in range(0, 500, 100)]
        expected.append(sum(float(x @ y / (x.norm() * y.norm())) for x, y in pairs) / len(pairs))
    assert found == pytest.approx(expected, abs=1e-5)
    assert found[0] == pytest.approx(1.0, abs=1e-6)  # keys of the first layer are made before any attention
    assert min(found) < 0.99
    assert len(said) == 2 and "512" in said[0] and "128" in said[1]


@pytest.mark.parametrize("length", [1, 5, 99, 101])
def test_short_texts_are_measured_too(tiny_decoder: Decoder, length: int) -> None:
    tokens = torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(6))
    assert all(-1.0 <= s <= 1.0 + 1e-6 for s in sensitivities(tiny_decoder, tokens))


def test_a_measured_profile_names_its_model_and_text(tiny_decoder: Decoder) -> None:
    profile = measure_profile(tiny_decoder, lambda text: [ord(c) % 97 for c in text[:700]], "tiny", "f" * 64)
    assert profile["model"] == "tiny" and profile["weights_sha256"] == "f" * 64
    assert profile["text_sha256"] == hashlib.sha256(calibration_text().encode("utf-8")).hexdigest()
    assert profile["tokens"] == 512
    values = profile["sensitivities"]
    assert isinstance(values, list) and len(values) == 3
    assert json.loads(json.dumps(profile)) == profile


def test_the_text_is_long_enough(smollm_tokenizer: TextTokenizer) -> None:
    assert len(smollm_tokenizer.encode(calibration_text())) >= TEXT_TOKENS


def test_stored_profiles_are_of_the_current_text_and_found_by_digest() -> None:
    stored = [e for e in files("calibration").joinpath("profiles").iterdir() if e.name.endswith(".json")]
    assert stored
    for entry in stored:
        profile = json.loads(entry.read_text(encoding="utf-8"))
        values = profile["sensitivities"]
        assert profile["text_sha256"] == hashlib.sha256(calibration_text().encode("utf-8")).hexdigest(), entry.name
        assert profile["tokens"] == TEXT_TOKENS
        assert all(-1.0 <= s <= 1.0 for s in values) and values[0] == 1.0
        assert stored_profile(profile["weights_sha256"], len(values)) == values
        assert stored_profile(profile["weights_sha256"], len(values) - 1) is None
    assert stored_profile("0" * 64, 30) is None


def test_the_default_models_profile_can_be_measured_again(
    smollm: GGUFCheckpoint, smollm_short: Decoder, smollm_tokenizer: TextTokenizer
) -> None:
    """The first layers see nothing of those behind them, so three layers give the first three values."""
    values = stored_profile(smollm.source().weights_sha256, smollm.config.n_layers)
    assert values is not None
    measured = sensitivities(smollm_short, torch.tensor(smollm_tokenizer.encode(calibration_text())))
    assert measured == pytest.approx(values[:3], abs=1e-4)
