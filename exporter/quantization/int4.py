"""8da4w: int4 weights in groups of 32 with activations quantised per token to int8, as XNNPACK computes them (torchao).

Embedding and head are 8 bits, one scale a row: at 4 bits the head alone would cost more than all other layers together.
"""

from __future__ import annotations

import torch
from torch import nn
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.quant_api import (
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    quantize_,
)

from exporter.models.decoder import Decoder
from exporter.models.encoder import Encoder
from runtime_py.errors import WorkError

GROUP = 32


def quantize_decoder_(decoder: Decoder) -> Decoder:
    """Quantise in place; a tied head gets a table of its own. Raises ``WorkError`` for widths that 32 does not divide."""
    for name, module in decoder.named_modules():
        if isinstance(module, nn.Linear) and module.in_features % GROUP:
            raise WorkError(f"int4 needs input widths that are multiples of {GROUP}; {name} has {module.in_features}.")
    decoder.head.weight = nn.Parameter(decoder.head.weight.detach().clone(), requires_grad=False)
    _quantize_tables(decoder)
    four = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4,  # type: ignore[attr-defined]
        weight_granularity=PerGroup(GROUP),
    )
    quantize_(decoder.layers, four)
    quantize_(decoder, _eight_bits(), filter_fn=lambda module, name: name == "head")
    return decoder


def quantize_encoder_(encoder: Encoder) -> Encoder:
    """Every linear layer and the token table to 8 bits, in place."""
    _quantize_tables(encoder)
    quantize_(encoder, _eight_bits())
    return encoder


def _eight_bits() -> Int8DynamicActivationIntxWeightConfig:
    return Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8, weight_granularity=PerAxis(0))


def _quantize_tables(model: nn.Module) -> None:
    config = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Embedding) and name in ("embedding", "tokens"))
