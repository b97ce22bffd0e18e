"""What a checkpoint offers to a build, whatever file it lies in."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

from torch import Tensor

from exporter.models.config import DecoderConfig
from runtime_py.manifest import Source


class Checkpoint(Protocol):
    """A decoder's weights, read lazily, with the tokenizer and the chat template that belong to them."""

    config: DecoderConfig

    def tensor(self, name: str) -> Tensor:
        """One tensor by its Hugging Face name, float32, row-major ``[out, in]``. Raises ``WorkError`` when missing."""
        ...

    def tokenizer_json(self) -> str:
        """The tokenizer in the format of the tokenizers library, with no BOS added by itself."""
        ...

    def chat_template(self) -> str:
        """The Jinja source of the chat template. Raises ``WorkError`` when the checkpoint has none."""
        ...

    def special_tokens(self) -> dict[str, str]:
        """``bos_token``, ``eos_token`` and the like, as the chat template names them."""
        ...

    def stop_ids(self) -> list[int]:
        """Token ids that end an answer."""
        ...

    def source(self) -> Source:
        """Where the weights came from."""
        ...


def sha256_of(paths: list[Path]) -> str:
    """One digest over the contents of ``paths`` in order."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()
