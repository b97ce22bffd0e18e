"""8da4w: the fast reference computes what torchao's layers compute, to the bit, and what is not quantised stays."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("torchao", reason="the package torchao is not installed")

from exporter.models.config import DecoderConfig
from exporter.models.decoder import Decoder, DecoderLayer
from exporter.models.dense import dense_logits
from exporter.models.encoder import Encoder, EncoderLayer
from exporter.quantization.int4 import RoundedLinear, quantize_decoder_, quantize_encoder_, unpacked
from runtime_py.errors import WorkError


def first_layer(decoder: Decoder) -> DecoderLayer:
    layer = decoder.layers[0]
    assert isinstance(layer, DecoderLayer)
    return layer


def test_unpacked_layers_equal_torchaos(smollm_short: Decoder) -> None:
    packed = quantize_decoder_(copy.deepcopy(smollm_short))
    fast = unpacked(copy.deepcopy(packed))
    assert isinstance(first_layer(fast).q_proj, RoundedLinear) and isinstance(fast.head, RoundedLinear)
    x = torch.randn(6, smollm_short.config.hidden, generator=torch.Generator().manual_seed(1))
    x[3], x[4] = 0.0, x[4].abs()
    assert torch.equal(first_layer(packed).q_proj(x), first_layer(fast).q_proj(x))
    tokens = torch.arange(100, 160)
    assert torch.equal(dense_logits(packed, tokens), dense_logits(fast, tokens))


def test_quantisation_is_coarse_but_near(smollm_short: Decoder) -> None:
    fast = unpacked(quantize_decoder_(copy.deepcopy(smollm_short)))
    before, after = first_layer(smollm_short).q_proj.weight, first_layer(fast).q_proj.weight
    groups, kept = before.reshape(-1, 32), after.reshape(-1, 32)
    step = groups.abs().amax(-1, keepdim=True) / 7.5
    assert ((groups - kept).abs() <= step * 1.01).all()
    assert all(len(row.unique()) <= 16 for row in kept[:200])
    assert torch.equal(fast.norm.weight, smollm_short.norm.weight)


def test_a_tied_head_gets_a_table_of_its_own_and_the_source_stays(smollm_short: Decoder) -> None:
    before = smollm_short.embedding.weight.clone()
    packed = quantize_decoder_(copy.deepcopy(smollm_short))
    assert packed.head.weight is not packed.embedding.weight
    assert torch.equal(smollm_short.embedding.weight, before)
    assert smollm_short.head.weight is smollm_short.embedding.weight


def test_encoder_is_near_its_source(encoder: Encoder) -> None:
    fast = unpacked(quantize_encoder_(copy.deepcopy(encoder)))
    x = torch.randn(5, encoder.config.hidden, generator=torch.Generator().manual_seed(2))
    before, after = encoder.layers[0], fast.layers[0]
    assert isinstance(before, EncoderLayer) and isinstance(after, EncoderLayer)
    expected = before.up(x)
    assert float((after.up(x) - expected).abs().max()) < 0.05 * float(expected.abs().max())


def test_widths_that_the_group_does_not_divide_are_refused() -> None:
    config = DecoderConfig("llama", 1, 2, 1, 8, 16, 48, 50, 64, 1e4, 1e-5, True)
    with pytest.raises(WorkError, match="multiples of 32"):
        quantize_decoder_(Decoder(config))
