"""int8 weights: a bounded round trip, ties kept, and the same values in every place that holds them."""

from __future__ import annotations

import copy

import pytest
import torch

from exporter.models.config import EncoderConfig
from exporter.models.decoder import Decoder
from exporter.models.encoder import Encoder
from exporter.quantization.int8 import GROUP, ZERO_POINT, dequantize, fake_quantize_, quantizable, quantize
from exporter.targets.onnx.int8 import Int8Codes
from runtime_py.errors import WorkError


def weight(rows: int = 50, width: int = 96) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(rows, width, generator=generator) * torch.logspace(-6, 3, rows)[:, None]


def test_round_trip_is_off_by_half_a_step_of_each_group_at_most() -> None:
    original = weight()
    quantized = quantize(original)
    assert (quantized.codes.dtype, quantized.codes.shape) == (torch.uint8, (50, 3, GROUP))
    assert (quantized.scales.dtype, quantized.scales.shape) == (torch.float32, (50, 3))
    error = (dequantize(quantized) - original).abs().reshape(50, 3, GROUP)
    largest = original.abs().reshape(50, 3, GROUP).amax(-1)
    assert (error.amax(-1) <= largest / 254 * (1 + 1e-5)).all()
    assert error.amax() > 0


def test_the_largest_value_of_a_group_is_kept_and_codes_are_symmetric() -> None:
    original = weight()
    quantized = quantize(original)
    assert int(quantized.codes.min()) >= ZERO_POINT - 127  # 0 would be -128, which the other sign has not
    assert (quantized.codes.to(torch.int32) - ZERO_POINT).abs().amax(-1).eq(127).all()
    groups, back = (t.reshape(50, 3, GROUP) for t in (original, dequantize(quantized)))
    torch.testing.assert_close(back.abs().amax(-1), groups.abs().amax(-1), rtol=1e-6, atol=0)
    negated = quantize(-original)
    assert torch.equal(negated.codes.to(torch.int32), 2 * ZERO_POINT - quantized.codes.to(torch.int32))


def test_zero_rows_and_vanishing_values_stay_finite() -> None:
    original = torch.zeros(3, 64)
    original[1, :32] = 1e-44  # so small that the scale itself is rounded to zero
    original[2, 5] = 1.0
    back = dequantize(quantize(original))
    assert torch.equal(back[0], torch.zeros(64))
    assert back[1].abs().max() < 1e-40 and torch.isfinite(back).all()
    assert torch.equal(back[2], original[2])


def test_quantising_again_changes_nothing() -> None:
    once = quantize(weight())
    again = quantize(dequantize(once))
    assert torch.equal(again.codes, once.codes)
    torch.testing.assert_close(again.scales, once.scales, rtol=1e-6, atol=0)


@pytest.mark.parametrize("width", [1, 31, 48])
def test_other_widths_are_refused_with_what_to_do(width: int) -> None:
    with pytest.raises(WorkError, match=rf"multiples of 32; found {width}\. Use --weights fp32"):
        quantize(torch.ones(2, width))


def tied_decoder(decoder: Decoder) -> Decoder:
    tied = copy.deepcopy(decoder)
    tied.head.weight = tied.embedding.weight
    return tied


def test_tied_weights_stay_tied_and_norms_stay_as_they_are(tiny_decoder: Decoder) -> None:
    before = copy.deepcopy(tiny_decoder.state_dict())
    quantized = fake_quantize_(tied_decoder(tiny_decoder))
    assert quantized.head.weight is quantized.embedding.weight
    for name, value in quantized.state_dict().items():
        expected = before["embedding.weight" if name == "head.weight" else name]
        assert torch.equal(value, expected if "norm" in name else dequantize(quantize(expected))), name
    assert all(torch.equal(tiny_decoder.state_dict()[name], value) for name, value in before.items())


def test_every_linear_and_token_table_is_quantised_and_no_other_table(tiny_decoder: Decoder) -> None:
    layer = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    expected = {"embedding", "head", *(f"layers.{i}.{part}" for i in range(3) for part in layer)}
    assert set(quantizable(tiny_decoder)) == expected
    encoder = Encoder(EncoderConfig(1, 2, 32, 64, 40, 16, 2, 1e-12))
    parts = ["query", "key", "value", "output", "up", "down"]
    assert set(quantizable(encoder)) == {"tokens", *(f"layers.0.{part}" for part in parts)}


def test_graphs_share_one_set_of_codes(tiny_decoder: Decoder) -> None:
    class Graph(torch.nn.Module):
        def __init__(self, decoder: Decoder) -> None:
            super().__init__()
            self.decoder = decoder

    tied = tied_decoder(tiny_decoder)
    codes = Int8Codes({"prefill": Graph(tied), "query": Graph(tied)})
    head = codes.get("decoder.head.weight")
    assert head is not None and head is codes.get("decoder.embedding.weight")
    assert torch.equal(dequantize(head), dequantize(quantize(tied.embedding.weight)))
    assert codes.get("decoder.norm.weight") is None
