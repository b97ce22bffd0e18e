"""A sentence-transformers folder: a BERT or a decoder, its pooling, its prompts and the tokens around a text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from exporter.checkpoints.base import sha256_of
from exporter.checkpoints.hf_config import decoder_config
from exporter.checkpoints.json_file import JsonObject
from exporter.checkpoints.weight_folder import WeightFolder
from exporter.models.architectures import ARCHITECTURES
from exporter.models.config import DecoderConfig, EncoderConfig
from exporter.models.encoder_registry import Prompts
from runtime_py.errors import WorkError
from runtime_py.manifest import Source, is_inside_path

# What to take instead of the kinds that people try most.
_NEAREST = {"xlm-roberta": "multilingual-e5-small", "mpnet": "minilm-l12", "roberta": "minilm-l12", "distilbert": "minilm-l6"}
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class AroundText:
    """Ids that the tokenizer puts before and behind a text, and the padding id."""

    prefix: list[int]
    suffix: list[int]
    pad_id: int


class EncoderFolder:
    """BERT with mean or CLS pooling, or a decoder with last-token pooling. Raises ``WorkError`` for others, by name.

    Vectors are normalised whether or not the folder asks for it: they are only compared by cosine. ``prompts`` are used
    when the folder has none of its own.
    """

    def __init__(self, folder: Path, model: str, licence: str, prompts: Prompts | None = None, revision: str = "") -> None:
        self.folder, self.model, self.licence, self._revision = folder, model, licence, revision or folder.name
        self._weights = WeightFolder(folder)
        file = JsonObject.read(folder / "config.json")
        kind = file.data.get("model_type")
        if kind not in ARCHITECTURES and kind != "bert":
            near = _NEAREST.get(str(kind), "minilm-l6")
            raise WorkError(
                f"{file.path}: model_type is {kind!r}; supported is 'bert', and {', '.join(ARCHITECTURES)} with last-token "
                f"pooling. The nearest preset is {near}."
            )
        pooling, with_prompt = _pooling(folder, ("mean", "cls") if kind == "bert" else ("lasttoken",))
        self.config: EncoderConfig | DecoderConfig
        self.config = _bert_config(file, pooling) if kind == "bert" else decoder_config(file)
        self.prompts = _prompts(folder, prompts or Prompts())
        if not with_prompt and (self.prompts.query or self.prompts.document):
            raise WorkError(
                f"{folder}: pooling without the prompt's tokens (include_prompt) is not supported. Take another embedder."
            )

    @property
    def dimension(self) -> int:
        """Numbers in a vector."""
        return self.config.hidden

    @property
    def longest(self) -> int:
        """The longest text in tokens."""
        return self.config.positions if isinstance(self.config, EncoderConfig) else self.config.context

    def tensor(self, name: str) -> Tensor:
        """One tensor by its Hugging Face name, float32; a decoder may be stored with or without its "model." in front."""
        bare = name.removeprefix("model.")
        return self._weights.tensor(name if name in self._weights or bare not in self._weights else bare)

    def tokenizer_json(self) -> str:
        """The tokenizer, in the format of the tokenizers library."""
        try:
            return (self.folder / "tokenizer.json").read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise WorkError(f"{self.folder} has no readable tokenizer.json ({error}).") from error

    def tokenizer(self) -> Tokenizer:
        """The tokenizer with the tokens that it puts around a text; it neither pads nor cuts."""
        try:
            tokenizer = Tokenizer.from_str(self.tokenizer_json())
        except Exception as error:  # the library raises bare Exception
            raise WorkError(f"{self.folder / 'tokenizer.json'} is no usable tokenizer ({error}). Copy it again.") from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def around_text(self) -> AroundText:
        """Read from the tokenizer itself, whatever its special tokens are called."""
        tokenizer = self.tokenizer()
        self._check_case(tokenizer)
        padding = json.loads(self.tokenizer_json()).get("padding") or {}
        whole, inner = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
        start = next((i for i in range(len(whole)) if inner and whole[i : i + len(inner)] == inner), None)
        if start is None:
            raise WorkError(f"{self.folder / 'tokenizer.json'} changes a text when it puts tokens around it; not supported.")
        suffix = whole[start + len(inner) :]
        if isinstance(self.config, DecoderConfig) and not suffix:
            raise WorkError(f"{self.folder / 'tokenizer.json'} puts no token behind a text, whose row would be the vector.")
        return AroundText(whole[:start], suffix, self._pad_id(tokenizer, padding))

    def source(self) -> Source:
        """Where the weights came from."""
        files = " ".join(f.name for f in self._weights.files)
        return Source(self.model, self._revision, "safetensors", files, sha256_of(self._weights.files), self.licence)

    def _check_case(self, tokenizer: Tokenizer) -> None:
        """sentence-transformers writes its texts in small letters when this file says so; the tokenizer must do that itself."""
        path = self.folder / "sentence_bert_config.json"
        lower = path.exists() and JsonObject.read(path).data.get("do_lower_case")
        if lower and tokenizer.encode("A b").ids != tokenizer.encode("a b").ids:
            raise WorkError(
                f"{path}: do_lower_case is true, and the tokenizer keeps capitals; not supported. Add a Lowercase normalizer to "
                "tokenizer.json, or take another embedder."
            )

    def _pad_id(self, tokenizer: Tokenizer, padding: dict[str, Any]) -> int:
        """Any id will do, since padding is masked; the model's own is taken where it is known."""
        path = self.folder / "tokenizer_config.json"
        token = JsonObject.read(path).data.get("pad_token") if path.exists() else None
        token = token.get("content") if isinstance(token, dict) else token
        found = tokenizer.token_to_id(token) if isinstance(token, str) else None
        return int(found if found is not None else padding.get("pad_id", 0))


def _bert_config(file: JsonObject, pooling: str) -> EncoderConfig:
    if file.data.get("hidden_act") != "gelu":
        raise WorkError(f"{file.path}: hidden_act is {file.data.get('hidden_act')!r}; supported is 'gelu'.")
    if file.data.get("position_embedding_type", "absolute") != "absolute":
        raise WorkError(f"{file.path}: relative positions are not supported. Take an embedder with absolute ones.")
    return EncoderConfig(
        n_layers=file.count("num_hidden_layers"),
        n_heads=file.count("num_attention_heads"),
        hidden=file.count("hidden_size"),
        ffn=file.count("intermediate_size"),
        vocab_size=file.count("vocab_size"),
        positions=file.count("max_position_embeddings"),
        token_types=file.count("type_vocab_size"),
        norm_eps=file.real("layer_norm_eps"),
        pooling=pooling,
    )


def _pooling(folder: Path, allowed: tuple[str, ...]) -> tuple[str, bool]:
    """The pooling, and whether a prompt's tokens take part in it; a plain folder gets the first that is allowed."""
    path = folder / _pooling_folder(folder) / "config.json"
    if not path.exists():
        return allowed[0], True
    data = JsonObject.read(path).data
    on = [key for key, value in data.items() if key.startswith("pooling_mode_") and value]
    older = [key.removeprefix("pooling_mode_").removesuffix("s").removesuffix("_token") for key in on]
    mode = data.get("pooling_mode", "+".join(older))
    if mode not in allowed:
        raise WorkError(f"{path}: the pooling is {mode!r}; supported for this model is {' or '.join(map(repr, allowed))}.")
    return str(mode), bool(data.get("include_prompt", True))


def _pooling_folder(folder: Path) -> str:
    """Where the pooling is described. Refuses a pipeline with other steps than the graph has, such as a dense layer."""
    path = folder / "modules.json"
    if not path.exists():
        return "1_Pooling"
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        steps = {str(module["type"]).rsplit(".", 1)[-1]: str(module.get("path", "")) for module in modules}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise WorkError(f"{path} cannot be read ({error}). Copy or download it again.") from None
    if strange := [kind for kind in steps if kind not in _KNOWN_MODULES]:
        raise WorkError(f"{path}: the module {strange[0]!r} is not supported. Supported are {', '.join(_KNOWN_MODULES)}.")
    if len(modules) != len(steps) or "Pooling" not in steps or steps.get("Transformer"):
        raise WorkError(
            f"{path}: one Transformer at the top of the folder and one Pooling are expected, found {', '.join(steps)}. "
            "Save the model again with sentence-transformers, or take another embedder."
        )
    if not is_inside_path(steps["Pooling"]):
        raise WorkError(f"{path}: the path {steps['Pooling']!r} leads out of the folder. Copy or download it again.")
    return steps["Pooling"]


def _prompts(folder: Path, default: Prompts) -> Prompts:
    """The folder's prompts for questions and documents, under the names that sentence-transformers gives them."""
    path = folder / "config_sentence_transformers.json"
    data = JsonObject.read(path).data if path.exists() else {}
    found = data.get("prompts") or {}
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise WorkError(f"{path}: prompts is no object of texts. Copy or download it again.")
    if not any(found.values()):
        return default
    always = str(found.get(str(data.get("default_prompt_name")), ""))
    # sentence-transformers saves an empty document prompt beside a passage prompt that its makers set. Where no other is set,
    # the empty one is a choice, and keeps the default prompt away.
    names = [name for name in ("document", "passage", "corpus") if name in found]
    document = next((str(found[name]) for name in names if found[name]), "" if names else always)
    return Prompts(str(found.get("query", always)), document)
