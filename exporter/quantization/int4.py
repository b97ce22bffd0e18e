"""8da4w: int4 weights in groups of 32 with activations quantised per token to int8, as XNNPACK computes them (torchao).

Embedding and head are 8 bits, one scale a row: at 4 bits the head alone would cost more than all other layers together.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.quant_api import (
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    quantize_,
)

from exporter.models.decoder import Decoder
from exporter.models.decoder_encoder import SentenceEncoder
from runtime_py.errors import WorkError

GROUP = 32
M = TypeVar("M", bound=nn.Module)


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
    for module in decoder.layers.modules():
        if isinstance(module, nn.Linear):
            # XNNPACK stores the scale of a group in 16 bits; rounded here, program and reference have the same one.
            weight: Any = module.weight
            weight.scale = weight.scale.to(torch.bfloat16).to(torch.float32)
    quantize_(decoder, _eight_bits(), filter_fn=lambda module, name: name == "head")
    return decoder


class RoundedLinear(nn.Module):
    """What a linear layer of 8da4w or 8da8w computes, in float32 with the weights unpacked once.

    torchao's own layer unpacks its weights at every call, 30 times the work for one token. Activations are rounded as there:
    one asymmetric scale of 8 bits a row. ``weight [N, K]`` holds the values of the codes.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        low, high = x.amin(-1, keepdim=True).clamp(max=0.0), x.amax(-1, keepdim=True).clamp(min=0.0)
        scale = ((high - low) / 255.0).clamp(min=torch.finfo(torch.float32).eps)
        zero = torch.clamp(-128.0 - torch.round(low / scale), -128.0, 127.0)
        codes = torch.clamp(torch.round(x * (1.0 / scale)) + zero, -128.0, 127.0)
        return F.linear((codes - zero) * scale, self.weight, self.bias)


def unpacked(model: M) -> M:
    """``model``, quantised by this module, with every layer in the form that computes the same numbers fast; in place."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and hasattr(child.weight, "qdata"):
                setattr(parent, name, RoundedLinear(child.weight.dequantize(), child.bias))
            elif isinstance(child, nn.Embedding) and hasattr(child.weight, "qdata"):
                child.weight = nn.Parameter(child.weight.dequantize(), requires_grad=False)
    return model


def quantize_encoder_(encoder: SentenceEncoder) -> SentenceEncoder:
    """Every linear layer and the token table to 8 bits, in place."""
    _quantize_tables(encoder)
    quantize_(encoder, _eight_bits())
    return encoder


def _eight_bits() -> Int8DynamicActivationIntxWeightConfig:
    return Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8, weight_granularity=PerAxis(0))


def _quantize_tables(model: nn.Module) -> None:
    config = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Embedding) and name in ("embedding", "tokens"))
