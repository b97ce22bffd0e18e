"""``chat``: questions from flags, pipes and a terminal."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tiny_models import Run, names, start

from runtime_py.bundle import Bundle

pytest_plugins = ["tiny_fixtures"]

ANSWER_KEYS = {"question", "answer", "episode", "similarities", "reason", "tokens", "tokens_per_s", "engine"}


def test_chat_prints_one_json_object_an_answer(small_bundle: Bundle, run: Run) -> None:
    words = ["chat", small_bundle.path, "--question", "Who?", "--question", "And when? 한국어 🙂", "--max-tokens", "3", "--json"]
    ran = run(*words)
    answers = [json.loads(line) for line in ran.out.splitlines()]
    assert ran.code == 0
    assert [a["question"] for a in answers] == ["Who?", "And when? 한국어 🙂"]
    for answer in answers:
        assert set(answer) >= ANSWER_KEYS
        assert len(answer["similarities"]) == small_bundle.manifest.plan.episodes
        assert answer["episode"] == max(range(4), key=answer["similarities"].__getitem__)
        assert answer["reason"] in ("max_tokens", "stop")
        assert len(answer["tokens"]) <= 3
        assert answer["tokens_per_s"] > 0


def test_both_engines_give_the_same_tokens(small_bundle: Bundle, run: Run) -> None:
    words = ["chat", small_bundle.path, "--question", "What did Tobiah pay?", "--question", "Why?", "--max-tokens", "6", "--json"]
    found = {}
    for engine in ("onnx", "torch"):
        ran = run(*words, "--engine", engine, "--threads", "1")
        found[engine] = [(a["episode"], a["tokens"]) for a in map(json.loads, ran.out.splitlines())]
        assert ran.code == 0
    assert found["onnx"] == found["torch"]
    assert all(tokens for _, tokens in found["onnx"])


def test_chat_for_people_streams_the_answer_and_sums_it_up(tiny_bundle: Path, run: Run) -> None:
    ran = run("chat", tiny_bundle, "--question", "Who?", "--max-tokens", "4", "--recall", "2")
    assert ran.code == 0
    assert ran.out.startswith("> Who?\n")
    assert "tokens/s, ended by max_tokens]" in ran.out


WRONG_CHATS: dict[str, tuple[list[str], str]] = {
    "empty question": (["--question", ""], "The question is empty"),
    "blank question": (["--question", "  \t"], "The question is empty"),
    "control characters": (["--question", "\x01\x02"], "The question is empty"),
    "no tokens": (["--question", "Who?", "--max-tokens", "0"], "max-tokens 0"),
    "recall below 0": (["--question", "Who?", "--recall", "-1"], "recall -1"),
    "recall too much": (["--question", "Who?", "--recall", "65"], "0 to 64"),
    "unknown engine": (["--question", "Who?", "--engine", "tpu"], "tpu"),
}


@pytest.mark.parametrize("kind", WRONG_CHATS)
def test_a_wrong_chat_is_refused(tiny_bundle: Path, run: Run, kind: str) -> None:
    words, message = WRONG_CHATS[kind]
    ran = run("chat", tiny_bundle, *words)
    assert ran.code == 2
    assert message in ran.err


def test_an_empty_question_begins_no_store(tiny_bundle: Path, run: Run, tmp_path: Path) -> None:
    assert run("chat", tiny_bundle, "--store", tmp_path / "s", "--question", " ").code == 2
    assert not names(tmp_path)


def test_a_store_keeps_what_was_said(tiny_bundle: Path, run: Run, tmp_path: Path) -> None:
    words = ["chat", tiny_bundle, "--store", tmp_path / "store", "--max-tokens", "3", "--question"]
    assert run(*words, "Where is the boat?").code == 0
    assert run(*words, "And the cat?").code == 0
    with Bundle.open(tiny_bundle).session(store=tmp_path / "store") as session:
        texts = [u.text for u in session.utterances()]
    assert len(texts) == 24 + 4
    assert (texts[24], texts[26]) == ("Where is the boat?", "And the cat?")


def test_questions_come_from_a_pipe(tiny_bundle: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("First?\n\n   \nSecond?"))
    ran = run("chat", tiny_bundle, "--json", "--max-tokens", "2")
    assert ran.code == 0
    assert [json.loads(line)["question"] for line in ran.out.splitlines()] == ["First?", "Second?"]


def test_a_piped_question_that_fails_is_told_and_the_next_one_answered(
    tiny_bundle: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\x01\nSecond?\n"))
    ran = run("chat", tiny_bundle, "--json", "--max-tokens", "2")
    assert ran.code == 2
    assert "The question is empty" in ran.err
    assert [json.loads(line)["question"] for line in ran.out.splitlines()] == ["Second?"]


def test_bytes_that_are_no_text_are_asked_as_well_as_they_can_be(tiny_bundle: Path) -> None:
    words = ["chat", tiny_bundle, "--json", "--max-tokens", "2"]
    process = start(*words, stdin=subprocess.PIPE, encoding="utf-8", errors="surrogateescape")
    out, err = process.communicate("caf\udce9?\n", timeout=120)  # the byte E9, which begins no character
    assert process.returncode == 0, err
    assert json.loads(out)["question"] == "caf\ufffd?"


def test_a_broken_pipe_ends_quietly(tiny_bundle: Path) -> None:
    process = start("chat", tiny_bundle, "--question", "Who?", "--question", "Why?", "--max-tokens", "100")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "> Who?\n"
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=120) == 1
    assert err == ""


def _answered(pieces: list[bytes], controller: int, wanted: bytes, seconds: float = 120) -> bytes:
    """Read a terminal until ``wanted`` is on it."""
    deadline = time.monotonic() + seconds
    while wanted not in b"".join(pieces):
        assert time.monotonic() < deadline, b"".join(pieces)
        pieces.append(os.read(controller, 4096))
    return b"".join(pieces)


def test_ctrl_c_at_a_terminal_ends_the_answer_and_then_the_program(small_bundle: Bundle) -> None:
    controller, terminal = os.openpty()
    process = start("chat", small_bundle.path, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    try:
        _answered([], controller, b"> ")
        os.write(controller, b"What did Tobiah pay for the nucleus?\n")
        _answered([], controller, b"> What did Tobiah pay for the nucleus?\r\n")
        pieces = [os.read(controller, 1)]  # the answer has begun
        process.send_signal(signal.SIGINT)
        _answered(pieces, controller, b"ended by cancelled]\r\n> ")
        os.write(controller, b"Who?\n")
        _answered([], controller, b"tokens/s, ended by ")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(controller)
