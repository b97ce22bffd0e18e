"""Writes selftest/: what a phone replays to see that its engine computes what was verified."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime_py.bundle import Bundle
from runtime_py.engines.base import Engine
from runtime_py.language_model import LanguageModel
from runtime_py.selftest import run_chain, selftest_file
from runtime_py.tensor_files import write_tensors

QUESTION = "What was decided, and when?"


def write_selftest(bundle: Bundle, target: str, reference: Engine, text_ids: Sequence[int]) -> None:
    """Run the chain on the PyTorch engine of ``target`` and store inputs and outputs.

    ``text_ids`` are tokens of a long text: what is read before the first eviction, one block more, and a prompt.
    """
    manifest = bundle.manifest
    text, n_text = bundle.sentence_tokenizer().encode(manifest.embedder.query_prompt + QUESTION)
    end = manifest.plan.min_budget + manifest.plan.block
    inputs = {
        "tokens": np.array(text_ids[:end], np.int32),
        "prompt": np.array(text_ids[end : end + manifest.plan.prompt // 2], np.int32),
        "question": np.array(bundle.text_tokenizer().encode(QUESTION), np.int32),
        "text": text,
        "n_text": np.array([n_text], np.int32),
    }
    expected = run_chain(LanguageModel(reference, manifest.shape, manifest.plan), reference, inputs)
    path = bundle.path / selftest_file(target)
    path.parent.mkdir(exist_ok=True)
    write_tensors(path, {**inputs, **expected}, {"reference": "PyTorch, weights as the target stores them"})
