"""The chat template, rendered once at build time and cut into token lists: phones run no Jinja."""

from __future__ import annotations

import datetime

from exporter.checkpoints.base import Checkpoint
from runtime_py.errors import WorkError
from runtime_py.manifest import Template
from runtime_py.tokenizer import TextTokenizer

HISTORY_HEADER = "Below are past conversations. Use them to answer the question at the end.\n\n"
QUESTION_PREFIX = "\nAnswer in one short sentence, from the conversations above.\nQuestion: "
RECALL_PREFIX = "\nThe parts of the conversations nearest to the question:\n"

_TODAY = datetime.date(2024, 7, 26)  # what Llama 3's template falls back to
# Stands for the clock that transformers gives templates: a bundle neither differs from day to day nor calls its build day today.
_ONE_DAY = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('%{code}', '{_TODAY.strftime(f'%{code}')}')" for code in "aAbBdHjmMSyY")
    + " }}{% endmacro %}"
)
_HISTORY, _QUESTION, _ANSWER, _NEXT = "@@history@@", "@@question@@", "@@answer@@", "@@next@@"


def template_texts(checkpoint: Checkpoint) -> dict[str, str]:
    """The pieces as text. Raises ``WorkError`` when the template does not keep the turns' texts in order."""
    opening = [{"role": "user", "content": _HISTORY + _QUESTION}]
    first = _render(checkpoint, opening)
    turns = [*opening, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}]
    second = _render(checkpoint, turns)
    before, _, after = first.partition(_HISTORY + _QUESTION)
    _, found, rest = second.partition(_ANSWER)
    between, found_next, _ = rest.partition(_NEXT)
    if not after or not found or not found_next or not second.startswith(before + _HISTORY + _QUESTION):
        raise WorkError("The chat template does not keep the texts of the turns in order; an instruction-tuned model is needed.")
    return {
        "prefix": before + HISTORY_HEADER,
        "question_prefix": QUESTION_PREFIX,
        "question_suffix": after,
        "turn_end": between,
        "recall_prefix": RECALL_PREFIX,
    }


def _render(checkpoint: Checkpoint, turns: list[dict[str, str]]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, _ = render_jinja_template(
            conversations=[turns],
            chat_template=_ONE_DAY + checkpoint.chat_template(),
            add_generation_prompt=True,
            enable_thinking=False,  # a phone answers from its cache at once
            **checkpoint.special_tokens(),
        )
    except WorkError:
        raise
    except Exception as error:  # a template may raise anything; it runs in a sandbox
        raise WorkError(f"The chat template of the checkpoint cannot be rendered: {error}") from error
    return str(rendered[0])


def cut_template(checkpoint: Checkpoint, tokenizer: TextTokenizer) -> Template:
    """The template as token ids. What it puts behind an answer stops one, whether or not the checkpoint names it.

    Raises ``WorkError`` when an answer would never end, or would be stopped by an id that the model does not have.
    """
    pieces = {name: tokenizer.encode_template(text) for name, text in template_texts(checkpoint).items()}
    ends = [token for token in pieces["turn_end"] if token in tokenizer.special_ids]
    stops = sorted({*checkpoint.stop_ids(), *ends[:1]})
    if not stops or not 0 <= stops[0] <= stops[-1] < checkpoint.config.vocab_size:
        raise WorkError(
            f"The stop ids of the checkpoint are {stops}; ids from 0 to {checkpoint.config.vocab_size - 1} are needed. Look at "
            "eos_token_id in config.json and generation_config.json."
        )
    return Template(**pieces, stop_ids=stops)
