"""tokenizer/: both tokenizers, the template as text, and golden vectors that every runtime must reproduce."""

from __future__ import annotations

import json
from pathlib import Path

from exporter.checkpoints.base import Checkpoint
from exporter.checkpoints.encoder_folder import EncoderFolder
from exporter.template import template_texts
from runtime_py.errors import UsageError
from runtime_py.manifest import EmbedderInfo
from runtime_py.tokenizer import SentenceTokenizer, TextTokenizer

# Tokens of text that an embedder reads at least, behind its prompt.
MIN_TEXT = 8
# Each line is here for a reason: case, digits, white space, scripts, emoji with joiners, code, look-alike special tokens.
GOLDEN_TEXTS = (
    "What did we decide about the boat?",
    "In 2024, at 12:30 pm, it cost 1,250.75 euros - 3x more!",
    "  two  spaces,\ta tab and a no-break\u00a0space ",
    "Grüße aus Köln; l'été à Besançon; naïve café",
    "안녕하세요, 내일 세 시에 만나요.",
    "東京で会いましょう。 مرحبا بالعالم",
    "👩‍👩‍👧 🇰🇷 😀 ok 👍🏽",
    'def f(x):\n    return {"a": [x, -1]}  # done',
    "<|im_end|> and [SEP] are words here, <s> too",
    "don't won't I'LL they've THEY'RE",
    "antidisestablishmentarianism aaaaaaaaaaaaaaaaaaaaaaaa",
)


def write_tokenizers(checkpoint: Checkpoint, encoder: EncoderFolder, info: EmbedderInfo, folder: Path) -> None:
    """Write ``folder/tokenizer/``."""
    out = folder / "tokenizer"
    out.mkdir()
    (out / "tokenizer.json").write_text(checkpoint.tokenizer_json(), encoding="utf-8")
    (out / "embedder.json").write_text(encoder.tokenizer_json(), encoding="utf-8")
    (out / "template.json").write_text(_json(template_texts(checkpoint)), encoding="utf-8")
    text = TextTokenizer(out / "tokenizer.json", checkpoint.stop_ids())
    sentences = SentenceTokenizer(out / "embedder.json", info.prefix_ids, info.suffix_ids, info.pad_id, info.length)
    vectors: dict[str, list[dict[str, object]]] = {"text": [], "embedder": []}
    for golden in GOLDEN_TEXTS:
        vectors["text"].append({"text": golden, "ids": text.encode(golden)})
        tokens, n_tokens = sentences.encode(golden)
        vectors["embedder"].append({"text": golden, "ids": tokens[0, :n_tokens].tolist()})
    (out / "vectors.json").write_text(_json(vectors), encoding="utf-8")


def embedder_info(encoder: EncoderFolder, length: int) -> EmbedderInfo:
    """What a runtime must know to use the encoder as its makers do.

    Raises ``UsageError`` when a prompt leaves no room for text: then all texts had one vector.
    """
    around, prompts = encoder.around_text(), encoder.prompts
    tokenizer = encoder.tokenizer()
    fixed = max(len(tokenizer.encode(prompt, add_special_tokens=False)) for prompt in (prompts.query, prompts.document))
    fixed += len(around.prefix) + len(around.suffix)
    if fixed + MIN_TEXT > length:
        raise UsageError(
            f"--embed-length {length} is not possible: the embedder's prompt and the tokens around a text take {fixed}. "
            f"Give at least {fixed + MIN_TEXT}."
        )
    return EmbedderInfo(
        encoder.model,
        encoder.dimension,
        length,
        around.prefix,
        around.suffix,
        around.pad_id,
        prompts.query,
        prompts.document,
    )


def _json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
