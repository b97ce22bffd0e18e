"""Other sentence encoders than the default: pooling, prompts and tokenizers as sentence-transformers itself has them."""

from __future__ import annotations

import json
import shutil
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from script_samples import FOREIGN, KNOWN
from test_shipped_embedder import PREDICATES, SUBJECTS
from tiny_models import Run, Tiny, save_sessions

from exporter.bundle_writer.tokenizers import embedder_info
from exporter.checkpoints.embedders import load_sentence_encoder, open_encoder
from exporter.checkpoints.encoder_folder import EncoderFolder
from exporter.checkpoints.tiny_folder import write_tiny_checkpoint
from exporter.graphs.embed import embed_graph
from exporter.models.config import EncoderConfig
from exporter.models.encoder_registry import ENCODERS
from exporter.quantization.int8 import fake_quantize_
from runtime_py.bundle import Bundle
from runtime_py.episodes.coverage import unknown_share
from runtime_py.errors import UsageError, WorkError
from runtime_py.tokenizer import SentenceTokenizer

pytest_plugins = ["tiny_fixtures"]

LENGTH = 96
SENTENCES = [f"{subject} {predicate}" for subject in SUBJECTS for predicate in PREDICATES]
F32 = NDArray[np.float32]


def module(kind: str, path: str = "") -> dict[str, str]:
    """An entry of modules.json."""
    return {"type": f"sentence_transformers.models.{kind}", "path": path}


def json_file(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def cls_copy(minilm: EncoderFolder, folder: Path) -> Path:
    """MiniLM's real weights, pooled at their first token, with prompts."""
    shutil.copytree(minilm.folder, folder)
    json_file(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 384, "pooling_mode_cls_token": True})
    prompts = {"query": "Represent this sentence for searching relevant passages: ", "document": ""}
    json_file(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    return folder


def unigram_bert(folder: Path) -> Path:
    """A random BERT with a SentencePiece-like vocabulary and <s> text </s>, as the multilingual E5 models have."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=600, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([*SENTENCES, "query: passage: 안녕하세요 반가워요 내일 만나요"] * 3, trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    parts = folder.with_name("parts")
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, sep_token="</s>", **names).save_pretrained(parts)
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    vocabulary = tokenizer.get_vocab_size()
    BertModel(BertConfig(vocab_size=vocabulary, initializer_range=0.5, pad_token_id=1, **sizes)).save_pretrained(parts)
    body = Transformer(str(parts))
    model = SentenceTransformer(modules=[body, Pooling(64, pooling_mode="mean")], device="cpu")
    model.prompts = {"query": "query: ", "passage": "passage: "}
    model.save(str(folder))
    return folder


def decoder_embedder(folder: Path) -> Path:
    """A random Qwen 3 that pools its last token, stored without the "model." in front, as Qwen3 Embedding is."""
    from tokenizers import Tokenizer, processors
    from transformers import AutoModel

    parts = write_tiny_checkpoint("qwen3", folder.with_name("qwen3"), initializer_range=0.15)
    AutoModel.from_pretrained(parts, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(parts / name, folder / name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <|im_end|>", special_tokens=[("<|im_end|>", end)])
    tokenizer.save(str(folder / "tokenizer.json"))
    kinds = ["Transformer", "Pooling", "Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    json_file(folder / "modules.json", modules)
    json_file(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True})
    prompts = {"query": "Instruct: Find the passage that answers\nQuery:", "document": ""}
    json_file(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    return folder


@pytest.fixture(scope="module", params=["cls", "unigram", "decoder"])
def folder(request: pytest.FixtureRequest, minilm: EncoderFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    out = tmp_path_factory.mktemp(request.param) / "embedder"
    made: dict[str, Callable[[], Path]] = {
        "cls": lambda: cls_copy(minilm, out),
        "unigram": lambda: unigram_bert(out),
        "decoder": lambda: decoder_embedder(out),
    }
    return made[request.param]()


def expected_vectors(folder: Path, texts: Sequence[str], prompt: str) -> F32:
    """From sentence-transformers itself."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    model.max_seq_length = LENGTH
    vectors: F32 = model.encode(list(texts), prompt_name=prompt, normalize_embeddings=True)
    return vectors


def test_vectors_are_those_of_sentence_transformers_prompts_included(folder: Path) -> None:
    found = open_encoder(str(folder))
    around = found.around_text()
    tokenizer = SentenceTokenizer(folder / "tokenizer.json", around.prefix, around.suffix, around.pad_id, LENGTH)
    encoder = load_sentence_encoder(found)
    exact = embed_graph(encoder, LENGTH)
    coarse = embed_graph(fake_quantize_(load_sentence_encoder(found)), LENGTH)
    saved = json.loads((folder / "config_sentence_transformers.json").read_text(encoding="utf-8"))["prompts"]
    second = "passage" if "passage" in saved else "document"
    assert found.prompts.query == saved["query"] != "" and found.prompts.document == saved[second]
    for prompt, name in ((found.prompts.query, "query"), (found.prompts.document, second)):
        expected = expected_vectors(folder, SENTENCES, name)
        for sentence, theirs in zip(SENTENCES, expected, strict=True):
            ids, count = tokenizer.encode(prompt + sentence)
            inputs = (torch.from_numpy(ids), torch.tensor([count], dtype=torch.int32))
            with torch.no_grad():
                assert float(exact(*inputs).numpy() @ theirs) > 0.9999, sentence
                assert float(coarse(*inputs).numpy() @ theirs) > 0.98, sentence


@pytest.mark.parametrize("target", ["onnx", "executorch"])
def test_a_bundle_embeds_questions_and_segments_as_its_encoder_s_makers_do(
    tmp_path: Path, run: Run, tiny: Tiny, folder: Path, target: str
) -> None:
    out = tmp_path / "out"
    ran = run(*tiny.build(out, embedder=folder, targets=target, **{"embed-length": LENGTH}))
    assert ran.code == 0, ran.err
    bundle = Bundle.open(out)
    embedder = bundle.embedder(bundle.engine(target))
    second = "document" if bundle.manifest.embedder.document_prompt == "" else "passage"
    for embed, name in ((embedder.embed_query, "query"), (embedder.embed_document, second)):
        expected = expected_vectors(folder, SENTENCES[:12], name)
        cosines = [float(embed(text) @ theirs) for text, theirs in zip(SENTENCES, expected, strict=False)]
        assert min(cosines) >= 0.98, cosines


@pytest.mark.parametrize(
    ("file", "value", "found"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, r"the pooling is 'max'; .* 'mean' or 'cls'"),
        ("1_Pooling/config.json", {"pooling_mode_lasttoken": True}, r"the pooling is 'lasttoken'; .* 'mean' or 'cls'"),
        ("modules.json", [{"type": "sentence_transformers.models.Dense"}], "the module 'Dense' is not supported"),
        ("modules.json", {"type": 3}, "modules.json cannot be read"),
        ("modules.json", [module("Transformer")], "one Pooling are expected, found Transformer"),
        ("modules.json", [module("Transformer"), module("Pooling"), module("Pooling")], "one Pooling are expected"),
        ("modules.json", [module("Transformer", "0_Transformer"), module("Pooling")], "at the top of the folder"),
        ("modules.json", [module("Transformer"), module("Pooling", "../x")], r"the path '\.\./x' leads out"),
        ("config.json", {"model_type": "xlm-roberta"}, "The nearest preset is multilingual-e5-small"),
        ("config.json", {"model_type": "mpnet"}, "The nearest preset is minilm-l12"),
        ("config_sentence_transformers.json", {"prompts": {"query": 3}}, "prompts is no object of texts"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    minilm: EncoderFolder, tmp_path: Path, file: str, value: object, found: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(minilm.folder, folder)
    json_file(folder / file, value)
    with pytest.raises(WorkError, match=found) as caught:
        open_encoder(str(folder))
    assert str(folder) in str(caught.value)


def test_presets_bring_the_prompts_that_their_folders_lack(minilm: EncoderFolder) -> None:
    preset = ENCODERS["multilingual-e5-small"]
    folder = EncoderFolder(minilm.folder, preset.repo_id, preset.licence, preset.prompts)
    assert (folder.prompts.query, folder.prompts.document) == ("query: ", "passage: ")
    assert minilm.prompts.query == minilm.prompts.document == ""
    with pytest.raises(UsageError, match=r"Presets: minilm-l6, .*qwen3-embedding-0\.6b"):
        open_encoder("minilm")


PROMPTS = [
    ({"query": "find: ", "document": ""}, "query", "find: ", ""),
    ({"query": "find: ", "document": "text: "}, None, "find: ", "text: "),
    ({"query": "find: ", "document": "", "passage": "text: "}, None, "find: ", "text: "),
    ({"query": "find: ", "corpus": "text: "}, "query", "find: ", "text: "),
    ({"query": "", "document": "text: "}, "document", "", "text: "),
    ({"other": "x: "}, "other", "x: ", "x: "),
    ({"other": "x: "}, None, "", ""),
]


@pytest.mark.parametrize(("prompts", "default", "query", "document"), PROMPTS)
def test_prompts_are_found_under_every_name_they_have(
    minilm: EncoderFolder, tmp_path: Path, prompts: dict[str, str], default: str | None, query: str, document: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(minilm.folder, folder)
    json_file(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": default})
    found = open_encoder(str(folder)).prompts
    assert (found.query, found.document) == (query, document)
    if set(prompts) == {"query", "document"}:  # otherwise the library's own placeholders decide
        library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
        theirs, text = library.SentenceTransformer(str(folder), device="cpu"), "the kiln reached cone six"
        assert float(theirs.encode_query(text) @ theirs.encode(query + text, prompt="")) > 0.9999
        assert float(theirs.encode_document(text) @ theirs.encode(document + text, prompt="")) > 0.9999


def test_the_pooling_is_read_where_modules_say(minilm: EncoderFolder, tmp_path: Path) -> None:
    folder = cls_copy(minilm, tmp_path / "copy")
    (folder / "1_Pooling").rename(folder / "pool")
    json_file(folder / "modules.json", [module("Transformer"), module("Pooling", "pool"), module("Normalize", "2_Normalize")])
    config = open_encoder(str(folder)).config
    assert isinstance(config, EncoderConfig) and config.pooling == "cls"


def test_small_letters_that_only_sentence_transformers_would_make_are_refused(minilm: EncoderFolder, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(minilm.folder, folder)
    json_file(folder / "sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": True})
    assert open_encoder(str(folder)).around_text().prefix == [101]
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["normalizer"]["lowercase"] = False
    json_file(folder / "tokenizer.json", tokenizer)
    with pytest.raises(WorkError, match="do_lower_case is true, and the tokenizer keeps capitals"):
        open_encoder(str(folder)).around_text()


def test_a_prompt_that_leaves_no_room_for_text_is_refused(minilm: EncoderFolder, tmp_path: Path) -> None:
    found = open_encoder(str(cls_copy(minilm, tmp_path / "copy")))
    least = len(found.prompts.query.split()) + 1 + 2 + 8  # its words and colon, [CLS] and [SEP], and text
    with pytest.raises(UsageError, match=rf"--embed-length {least - 1} is not possible: .* Give at least {least}\."):
        embedder_info(found, least - 1)
    assert embedder_info(found, least).query_prompt == found.prompts.query


def unigram(folder: Path, pieces: Sequence[str]) -> SentenceTokenizer:
    """A SentencePiece-like vocabulary of just these pieces, the single letters of English besides."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = sorted({*pieces, "▁", *"abcdefghijklmnopqrstuvwxyz"})
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((piece, -float(i)) for i, piece in enumerate(known))], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<unk>"])
    tokenizer.save(str(folder / "unigram.json"))
    return SentenceTokenizer(folder / "unigram.json", [], [], 0, LENGTH)


def test_a_script_the_encoder_hardly_knows_is_found(minilm: EncoderFolder) -> None:
    around = minilm.around_text()
    english = SentenceTokenizer(minilm.folder / "tokenizer.json", around.prefix, around.suffix, around.pad_id, LENGTH)
    assert max(unknown_share(english, [text]) for text in KNOWN) < 0.2
    assert min(unknown_share(english, [text]) for text in FOREIGN) > 0.7
    assert unknown_share(english, ["12:30 😀 ...", ""]) == 0.0
    half = unknown_share(english, [KNOWN[0], FOREIGN[0]])
    assert unknown_share(english, KNOWN[:1]) < half < unknown_share(english, FOREIGN[:1])
    decomposed = unicodedata.normalize("NFD", FOREIGN[0])
    assert unknown_share(english, [decomposed]) == unknown_share(english, [FOREIGN[0]])


def test_what_a_vocabulary_with_scores_does_not_know_is_found(tmp_path: Path) -> None:
    """There the piece of an unknown text is that text itself."""
    tokenizer = unigram(tmp_path, ["▁rented", "▁boat"])
    assert unknown_share(tokenizer, ["rented boat"]) == 0.0
    assert {unknown_share(tokenizer, [text]) for text in FOREIGN} == {1.0}


def test_syllables_and_ideographs_may_stand_alone_and_letters_may_not(tmp_path: Path) -> None:
    """Multilingual vocabularies read much of Korean syllable by syllable."""
    tokenizer = unigram(tmp_path, [*"호수에갔어요我们去了湖边", "▁озеро", *"озер"])
    assert unknown_share(tokenizer, ["호수에 갔어요", "我们去了湖边"]) == 0.0
    assert unknown_share(tokenizer, ["озеро"]) == 0.0
    assert unknown_share(tokenizer, ["резо"]) == 1.0


def test_bytes_of_a_letter_are_letters_that_fall_apart(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    for texts, name in ((KNOWN, "english"), ((*FOREIGN, *KNOWN), "all")):
        trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
        learnt.train_from_iterator([*texts] * 8, trainer)
        learnt.save(str(tmp_path / f"{name}.json"))
    english, multilingual = (SentenceTokenizer(tmp_path / f"{name}.json", [], [], 0, LENGTH) for name in ("english", "all"))
    assert min(unknown_share(english, [text]) for text in FOREIGN) > 0.9
    assert max(unknown_share(multilingual, [text]) for text in (*FOREIGN, *KNOWN)) < 0.2


def test_a_korean_history_is_warned_about_and_an_english_one_is_not(tmp_path: Path, run: Run, tiny: Tiny) -> None:
    said = [{"speaker": ("Ada", "Ben")[i % 2], "text": f"{FOREIGN[0]} {i}"} for i in range(12)]
    foreign = save_sessions(tmp_path / "korean.json", said)
    ran = run(*tiny.build(tmp_path / "korean", history=foreign))
    assert ran.code == 0 and "hardly knows this script" in ran.err and "--embedder multilingual-e5-small" in ran.err
    assert "hardly knows" not in run(*tiny.build(tmp_path / "english")).err
