"""The chat template as pieces: together they are what the template itself renders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import LlamaSaver

from exporter.checkpoints.gguf_file import GGUFCheckpoint
from exporter.checkpoints.hf_folder import HFCheckpoint
from exporter.template import HISTORY_HEADER, QUESTION_PREFIX, RECALL_PREFIX, cut_template, template_texts
from runtime_py.errors import WorkError
from runtime_py.manifest import Template
from runtime_py.tokenizer import TextTokenizer

HISTORY, QUESTIONS, ANSWERS = '[1 May]\nAda said, "Hi."\n', ["Who said hi?", "When?"], ["Ada did.", "On 1 May."]


@pytest.fixture(scope="module")
def template(smollm: GGUFCheckpoint, smollm_tokenizer: TextTokenizer) -> Template:
    return cut_template(smollm, smollm_tokenizer)


def rendered_by_transformers(tokenizer: Any) -> str:
    """Two questions and one answer behind the history, rendered whole."""
    first = HISTORY_HEADER + HISTORY + QUESTION_PREFIX + QUESTIONS[0]
    turns = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": ANSWERS[0]},
        {"role": "user", "content": QUESTION_PREFIX + QUESTIONS[1]},
    ]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def test_the_pieces_make_up_the_rendered_conversation(
    template: Template, smollm_tokenizer: TextTokenizer, transformers_tokenizer: Any
) -> None:
    encode = smollm_tokenizer.encode
    ids = [*template.prefix, *encode(HISTORY), *template.question_prefix, *encode(QUESTIONS[0]), *template.question_suffix]
    ids += [*encode(ANSWERS[0]), *template.turn_end, *template.question_prefix, *encode(QUESTIONS[1])]
    ids += template.question_suffix
    assert smollm_tokenizer.decode(ids, skip_special=False) == rendered_by_transformers(transformers_tokenizer)


def test_special_tokens_are_recognised_in_the_pieces_and_nowhere_else(
    template: Template, smollm_tokenizer: TextTokenizer
) -> None:
    start, end = 1, 2
    assert template.prefix.count(start) == 2 and template.prefix[0] == start and template.prefix.count(end) == 1
    assert template.question_suffix[0] == end and template.question_suffix.count(start) == 1
    assert template.turn_end[0] == end and template.turn_end.count(start) == 1
    assert not {start, end} & {*template.question_prefix, *template.recall_prefix}
    assert template.stop_ids == [end]
    assert smollm_tokenizer.decode(template.recall_prefix) == RECALL_PREFIX
    assert not {start, end} & set(smollm_tokenizer.encode("<|im_end|>\n<|im_start|>system\n"))


def template_folder(folder: Path, save_llama: LlamaSaver, source: str | None) -> HFCheckpoint:
    """A tiny folder with a word tokenizer and this chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = source
    fast.save_pretrained(save_llama(folder))
    return HFCheckpoint(folder, "tiny")


LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def test_bos_and_turn_ends_of_another_template(tmp_path: Path, save_llama: LlamaSaver) -> None:
    texts = template_texts(template_folder(tmp_path, save_llama, LLAMA_2))
    assert texts == {
        "prefix": "<s>[INST] " + HISTORY_HEADER,
        "question_prefix": QUESTION_PREFIX,
        "question_suffix": " [/INST]",
        "turn_end": " </s><s>[INST] ",
        "recall_prefix": RECALL_PREFIX,
    }


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not keep the texts of the turns in order"),
        ("{{ messages[-1].content }}:", "does not keep the texts of the turns in order"),
        ("{% for m in messages | reverse %}{{ m.content }};{% endfor %}", "does not keep the texts of the turns in order"),
        ("nothing of the sort", "does not keep the texts of the turns in order"),
        ("{{ raise_exception('only one turn') }}", "cannot be rendered: only one turn"),
        ("{% for m in messages %}", "cannot be rendered"),
        ("{{ messages.__class__.__mro__ }}", "cannot be rendered"),
        (None, "has no chat template; an instruction-tuned"),
    ],
)
def test_unusable_templates_are_refused(tmp_path: Path, save_llama: LlamaSaver, source: str | None, found: str) -> None:
    with pytest.raises(WorkError) as caught:
        template_texts(template_folder(tmp_path, save_llama, source))
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("date", "shown"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{% set day = strftime_now('%A, %Y-%m-%d') %}{{ day }}", "Friday, 2024-07-26"),
        ("{% if strftime_now is defined %}{% set day = strftime_now('%B %d') %}{% endif %}{{ day }}", "July 26"),
    ],
)
def test_a_template_that_asks_for_the_day_gets_the_same_one_every_day(
    tmp_path: Path, save_llama: LlamaSaver, date: str, shown: str
) -> None:
    source = f"Today is {date}. " + "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}{{ 'assistant: ' }}"
    texts = template_texts(template_folder(tmp_path, save_llama, source))
    assert texts["prefix"].startswith(f"Today is {shown}. user: ")
