"""Weight-only int8: symmetric, one float32 scale for each 32 inputs of a row, the layout of ORT's MatMulNBits at 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from runtime_py.errors import WorkError

M = TypeVar("M", bound=nn.Module)
GROUP = 32
ZERO_POINT = 128


@dataclass(frozen=True)
class Int8Weight:
    """``codes uint8 [N, K/32, 32]`` with zero point 128 and ``scales float32 [N, K/32]``; w = (code - 128) * scale."""

    codes: Tensor
    scales: Tensor


def quantize(weight: Tensor) -> Int8Weight:
    """Quantise ``weight float32 [N, K]``. Raises ``WorkError`` when K is no multiple of 32."""
    rows, width = weight.shape
    if width % GROUP:
        raise WorkError(f"int8 weights need input widths that are multiples of {GROUP}; found {width}. Use --weights fp32.")
    groups = weight.reshape(rows, width // GROUP, GROUP)
    scales = groups.abs().amax(-1) / 127.0
    codes = torch.round(groups / torch.where(scales > 0, scales, 1.0)[..., None]).clamp(-127, 127)
    return Int8Weight((codes + ZERO_POINT).to(torch.uint8), scales)


def dequantize(quantized: Int8Weight) -> Tensor:
    """The float32 ``[N, K]`` that the codes stand for."""
    values = (quantized.codes.to(torch.float32) - ZERO_POINT) * quantized.scales[..., None]
    return values.reshape(values.shape[0], -1)


def quantizable(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers and token tables of ``model`` by name; position and type tables are too small to matter."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        or (isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in ("embedding", "tokens"))
    }


def fake_quantize_(model: M) -> M:
    """Replace each quantisable weight, in place, by the values its codes stand for; tied weights stay tied."""
    done: dict[int, nn.Parameter] = {}
    for module in quantizable(model).values():
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        if id(weight) not in done:
            done[id(weight)] = nn.Parameter(dequantize(quantize(weight.data)), requires_grad=False)
        module.weight = done[id(weight)]
    return model
