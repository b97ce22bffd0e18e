"""Hugging Face folders: a decoder's, and a sentence encoder's."""

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
from exporter.models.config import EncoderConfig
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


class EncoderFolder:
    """A sentence-transformers folder: BERT, mean pooling, normalised."""

    def __init__(self, folder: Path, model: str, licence: str) -> None:
        self.folder, self.model, self.licence = folder, model, licence
        self._weights = WeightFolder(folder)
        file = JsonObject.read(folder / "config.json")
        for key, wanted in {"model_type": "bert", "hidden_act": "gelu"}.items():
            if file.data.get(key) != wanted:
                raise WorkError(f"{file.path}: {key} is {file.data.get(key)!r}; supported is {wanted!r}.")
        _check_pooling(folder)
        self.config = EncoderConfig(
            n_layers=file.count("num_hidden_layers"),
            n_heads=file.count("num_attention_heads"),
            hidden=file.count("hidden_size"),
            ffn=file.count("intermediate_size"),
            vocab_size=file.count("vocab_size"),
            positions=file.count("max_position_embeddings"),
            token_types=file.count("type_vocab_size"),
            norm_eps=file.real("layer_norm_eps"),
        )

    def tensor(self, name: str) -> Tensor:
        """One tensor by its BERT name, float32."""
        return self._weights.tensor(name)

    def tokenizer_json(self) -> str:
        """The WordPiece tokenizer, in the format of the tokenizers library."""
        try:
            return (self.folder / "tokenizer.json").read_text(encoding="utf-8")
        except OSError as error:
            raise WorkError(f"{self.folder} has no readable tokenizer.json ({error}).") from error

    def source(self) -> Source:
        files = " ".join(f.name for f in self._weights.files)
        digest = sha256_of(self._weights.files)
        return Source(self.model, self.folder.name, "safetensors", files, digest, self.licence)


def _check_pooling(folder: Path) -> None:
    """Refuse a sentence-transformers folder that pools otherwise than by the mean; a plain BERT folder says nothing."""
    path = folder / "1_Pooling" / "config.json"
    if not path.exists():
        return
    data = JsonObject.read(path).data
    older = [key.removesuffix("s").removesuffix("_token") for key, on in data.items() if key.startswith("pooling_mode_") and on]
    mode = data.get("pooling_mode", "+".join(key.removeprefix("pooling_mode_") for key in older))
    if mode != "mean":
        raise WorkError(f"{path}: the pooling is {mode!r}; supported is 'mean'.")
