"""Real tokenizers: on 500 varied texts our ids are transformers' ids, from a folder and from a GGUF file's metadata."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
from conftest import LlamaSaver
from script_samples import FOREIGN, KNOWN
from varied_texts import LOOK_ALIKES, varied_texts

from exporter.checkpoints.encoder_folder import EncoderFolder
from exporter.checkpoints.gguf_file import GGUFCheckpoint
from exporter.checkpoints.gguf_tokenizer import tokenizer_json
from exporter.checkpoints.hf_folder import HFCheckpoint
from exporter.template import HISTORY_HEADER, QUESTION_PREFIX, cut_template
from runtime_py.episodes.coverage import unknown_share
from runtime_py.errors import WorkError
from runtime_py.tokenizer import SentenceTokenizer, TextTokenizer

CUTS = {"llama3_1": "llama-bpe", "llama3_2": "llama-bpe", "qwen2_5": "qwen2", "qwen3": "qwen2"}
STOPS = {"llama3_1": "<|eot_id|>", "llama3_2": "<|eot_id|>", "qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>"}
HISTORY, QUESTIONS, ANSWER = '[1 May]\nAda said, "Hi."\n', ["Who said hi?", "When, and 안녕?"], "Ada did."


def fetched(name: str) -> Path:
    """Folder of a fetched tokenizer; skips without it."""
    folder = Path(os.environ.get("EPICACHE_TOKENIZERS", "")) / name
    if "EPICACHE_TOKENIZERS" not in os.environ or not folder.is_dir():
        pytest.skip("run scripts/fetch_tokenizers DIR and set EPICACHE_TOKENIZERS=DIR")
    return folder


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


REAL = [slow(name) for name in CUTS]


def checkpoint_with(name: str, folder: Path, save_llama: LlamaSaver) -> HFCheckpoint:
    """A tiny llama with a real tokenizer, whose vocabulary it claims to have."""
    save_llama(folder, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, vocab_size=152_000, eos_token_id=None)
    for path in fetched(name).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return HFCheckpoint(folder, name)


def our_tokenizer(text: str, folder: Path, stop_ids: list[int]) -> TextTokenizer:
    path = folder / "ours.json"
    path.write_text(text, encoding="utf-8")
    return TextTokenizer(path, stop_ids)


def differing(ours: TextTokenizer, theirs: Any) -> list[str]:
    """Texts with other ids than transformers'. Look-alikes are compared where special tokens are meant to be read."""
    wrong, texts = [], varied_texts()
    assert len(texts) == 500
    for text in texts:
        expected = theirs(text, add_special_tokens=False).input_ids
        if ours.encode_template(text) != expected:
            wrong.append(text)
        special = any(mark in text for mark in ("<|", "<s>", "</", "<think>", "<tool", "<pad>", "<unk>"))
        if not special and ours.encode(text) != expected:
            wrong.append(text)
    return wrong


def check_look_alikes(ours: TextTokenizer, normalise: bool) -> None:
    for text in LOOK_ALIKES:
        ids = ours.encode(text)
        assert not ours.special_ids & set(ids), text
        assert ours.decode(ids) == (unicodedata.normalize("NFC", text) if normalise else text)


@pytest.mark.parametrize("name", REAL)
def test_a_folder_s_tokenizer_is_transformers_own(tmp_path: Path, save_llama: LlamaSaver, name: str) -> None:
    from transformers import AutoTokenizer

    checkpoint = checkpoint_with(name, tmp_path, save_llama)
    theirs = AutoTokenizer.from_pretrained(fetched(name))
    ours = our_tokenizer(checkpoint.tokenizer_json(), tmp_path, checkpoint.stop_ids())
    assert differing(ours, theirs) == []
    check_look_alikes(ours, normalise=name.startswith("qwen"))
    for text in varied_texts(120):
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)


def write_vocabulary(path: Path, source: dict[str, Any], cut: str) -> Path:
    """A GGUF file with nothing but this tokenizer, as llama.cpp's converter writes it."""
    vocabulary = dict(source["model"]["vocab"])
    kinds = dict.fromkeys(vocabulary.values(), 1)
    for token in source["added_tokens"]:
        vocabulary[token["content"]] = token["id"]
        kinds[token["id"]] = 3 if token["special"] else 4
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    assert sorted(vocabulary.values()) == list(range(len(tokens)))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds[i] for i in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in source["model"]["merges"]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def read_vocabulary(path: Path) -> str:
    reader = gguf.GGUFReader(path)

    def field(key: str, default: Any = None) -> Any:
        found = reader.get_field(key)
        return default if found is None else found.contents()

    return tokenizer_json(path, field)


@pytest.mark.parametrize("name", REAL)
def test_a_gguf_file_s_vocabulary_gives_the_same_ids(tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer

    source = json.loads((fetched(name) / "tokenizer.json").read_text(encoding="utf-8"))
    path = write_vocabulary(tmp_path / "vocabulary.gguf", source, CUTS[name])
    ours = our_tokenizer(read_vocabulary(path), tmp_path, [])
    assert differing(ours, AutoTokenizer.from_pretrained(fetched(name))) == []
    check_look_alikes(ours, normalise=name.startswith("qwen"))


@pytest.mark.parametrize("name", REAL)
def test_real_templates_are_cut_where_transformers_renders_them(tmp_path: Path, save_llama: LlamaSaver, name: str) -> None:
    from transformers import AutoTokenizer

    checkpoint = checkpoint_with(name, tmp_path, save_llama)
    tokenizer = our_tokenizer(checkpoint.tokenizer_json(), tmp_path, checkpoint.stop_ids())
    template = cut_template(checkpoint, tokenizer)
    theirs: Any = AutoTokenizer.from_pretrained(fetched(name))
    first = HISTORY_HEADER + HISTORY + QUESTION_PREFIX + QUESTIONS[0]
    options = {"add_generation_prompt": True, "enable_thinking": False, "date_string": "26 Jul 2024"}
    rendered = theirs.apply_chat_template([{"role": "user", "content": first}], tokenize=False, **options)
    encode = tokenizer.encode
    ids = [*template.prefix, *encode(HISTORY), *template.question_prefix, *encode(QUESTIONS[0]), *template.question_suffix]
    assert tokenizer.decode(ids, skip_special=False) == rendered
    begin = theirs.convert_tokens_to_ids("<|begin_of_text|>") if name.startswith("llama") else None
    assert begin is None or (ids[0] == begin and ids.count(begin) == 1)
    # The template's own pieces, recognised as transformers recognises them.
    assert (
        template.prefix == theirs(rendered[: rendered.index(HISTORY_HEADER)] + HISTORY_HEADER, add_special_tokens=False).input_ids
    )
    turns = [{"role": "user", "content": first}, {"role": "assistant", "content": ANSWER}]
    turns.append({"role": "user", "content": QUESTIONS[1]})
    again = theirs.apply_chat_template(turns, tokenize=False, **options)
    between = tokenizer.decode(template.turn_end, skip_special=False)
    assert ANSWER + between + QUESTIONS[1] in again
    assert theirs.convert_tokens_to_ids(STOPS[name]) in template.stop_ids
    if name == "qwen3":
        assert rendered.endswith("<think>\n\n</think>\n\n")


def test_the_default_model_gives_transformers_ids_where_numbers_are_not_split(
    smollm: GGUFCheckpoint, smollm_tokenizer: TextTokenizer, transformers_tokenizer: Any
) -> None:
    # transformers drops the digit splitting when it reads this GGUF file; without numbers it is right.
    compared = [text for text in varied_texts() if not any(c.isnumeric() for c in text)]
    assert len(compared) > 180
    for text in compared:
        assert smollm_tokenizer.encode_template(text) == transformers_tokenizer(text, add_special_tokens=False).input_ids, text
    for text in varied_texts():
        assert smollm_tokenizer.decode(smollm_tokenizer.encode(text)) == text
    check_look_alikes(smollm_tokenizer, normalise=False)


def test_the_default_model_s_vocabulary_survives_a_gguf_file(tmp_path: Path, smollm: GGUFCheckpoint) -> None:
    source = json.loads(smollm.tokenizer_json())
    path = write_vocabulary(tmp_path / "vocabulary.gguf", source, "smollm")
    assert json.loads(read_vocabulary(path)) == source


def test_a_pre_tokenizer_that_is_not_known_is_refused_by_name(tmp_path: Path, smollm: GGUFCheckpoint) -> None:
    source = json.loads(smollm.tokenizer_json())
    with pytest.raises(
        WorkError, match=r"the pre-tokenizer 'deepseek-llm' is not supported. Supported are gpt-2, smollm, llama-bpe"
    ):
        read_vocabulary(write_vocabulary(tmp_path / "vocabulary.gguf", source, "deepseek-llm"))


def test_the_sentence_encoder_gives_transformers_ids(minilm: EncoderFolder) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(minilm.folder)
    ours = Tokenizer.from_str(minilm.tokenizer_json())
    ours.no_truncation()
    ours.no_padding()
    for text in varied_texts():
        assert ours.encode(text).ids == theirs(text).input_ids, text


@pytest.mark.slow
def test_qwen_s_vocabulary_knows_every_script() -> None:
    tokenizer = SentenceTokenizer(fetched("qwen3") / "tokenizer.json", [], [], 0, 64)
    assert max(unknown_share(tokenizer, [text]) for text in (*KNOWN, *FOREIGN)) < 0.2
