"""A Hugging Face folder with a decoder."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from exporter.checkpoints.base import sha256_of
from exporter.checkpoints.hf_config import decoder_config
from exporter.checkpoints.json_file import JsonObject
from exporter.checkpoints.weight_folder import WeightFolder
from runtime_py.errors import WorkError
from runtime_py.manifest import Source


class HFCheckpoint:
    """A decoder folder. Raises ``WorkError`` for an architecture or feature that is not supported, by name."""

    def __init__(self, folder: Path, model: str, revision: str = "", licence: str = "see the model card") -> None:
        self.folder, self.model = folder, model
        self._revision, self._licence = revision or folder.name, licence
        self._weights = WeightFolder(folder)
        self._json = JsonObject.read(folder / "config.json")
        self.config = decoder_config(self._json)

    def tensor(self, name: str) -> Tensor:
        return self._weights.tensor(name)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise WorkError(f"{self.folder} has no usable tokenizer ({error}). tokenizer.json is needed.") from error

    def tokenizer_json(self) -> str:
        data = json.loads(self._tokenizer.backend_tokenizer.to_str())
        data["post_processor"] = None  # the only thing it could add is a BOS
        return json.dumps(data, ensure_ascii=False)

    def chat_template(self) -> str:
        template = self._tokenizer.chat_template
        if not isinstance(template, str):
            raise WorkError(f"{self.folder} has no chat template; an instruction-tuned checkpoint is needed.")
        return template

    def special_tokens(self) -> dict[str, str]:
        return {k: str(v) for k, v in self._tokenizer.special_tokens_map.items() if isinstance(v, str)}

    def stop_ids(self) -> list[int]:
        generation = self.folder / "generation_config.json"
        ids = JsonObject.read(generation).data.get("eos_token_id") if generation.exists() else None
        ids = self._json.data.get("eos_token_id") if ids is None else ids
        found = {int(i) for i in (ids if isinstance(ids, list) else [ids]) if i is not None}
        end = self._tokenizer.eos_token_id
        return sorted(found | ({int(end)} if end is not None else set()))

    def source(self) -> Source:
        digest = sha256_of(self._weights.files)
        files = " ".join(f.name for f in self._weights.files)
        return Source(self.model, self._revision, "safetensors", files, digest, self._licence)
