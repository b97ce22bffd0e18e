"""A decoder as a sentence encoder: its last token's final row is the vector (Qwen3 Embedding, arXiv:2506.05176)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from exporter.models.config import DecoderConfig
from exporter.models.decoder import DecoderLayer, RMSNorm, checkpoint_names
from exporter.models.encoder import Encoder
from exporter.models.loading import load_weights


class DecoderEncoder(nn.Module):
    """Token table, layers and final norm of a decoder, without its head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.requires_grad_(False)


SentenceEncoder = Encoder | DecoderEncoder


def load_decoder_encoder(config: DecoderConfig, tensor: Callable[[str], Tensor]) -> DecoderEncoder:
    """Build one whose weights are read one by one with ``tensor(checkpoint name)``, each float32.

    Raises ``WorkError`` when a tensor does not fit ``config``.
    """
    with torch.device("meta"):
        encoder = DecoderEncoder(config)
    names = {ours: theirs for ours, theirs in checkpoint_names(config).items() if not ours.startswith("head.")}
    names["tokens.weight"] = names.pop("embedding.weight")
    load_weights(encoder, names, tensor)
    return encoder.requires_grad_(False).eval()
