"""SHA256SUMS: every change of one byte is found, and nothing in the list leads outside the folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from runtime_py.errors import BundleError, WorkError
from runtime_py.integrity import SUMS, bundle_id, check_sums, sha256_file, write_sums


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "bundle"
    for name, content in {
        "manifest.json": b"{}\n",
        "onnx/decode.onnx": bytes(range(256)) * 5000,
        "onnx/empty": b"",
        "a b/ü 한국.txt": b"text",
        "sub/SHA256SUMS": b"an ordinary file",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    write_sums(root)
    return root


def test_sha256sum_agrees(folder: Path) -> None:
    assert check_sums(folder) == []
    assert write_sums(folder) == bundle_id(folder) == hashlib.sha256((folder / SUMS).read_bytes()).hexdigest()
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", SUMS], cwd=folder, check=True)
        names = [line[66:] for line in (folder / SUMS).read_text(encoding="utf-8").splitlines()]
        assert names == sorted(names) and len(names) == 5
        output = subprocess.run(["sha256sum", *names], cwd=folder, check=True, capture_output=True).stdout
        assert output == (folder / SUMS).read_bytes()


def test_a_change_of_any_byte_of_the_list_is_found(folder: Path) -> None:
    data = (folder / SUMS).read_bytes()
    for position in range(len(data)):
        for flip in (0x01, 0x20, data[position] ^ 0x0A):
            if flip:
                changed = bytearray(data)
                changed[position] ^= flip
                (folder / SUMS).write_bytes(changed)
                assert check_sums(folder), (position, flip)


def test_a_change_of_any_byte_of_a_small_file_is_found(folder: Path) -> None:
    for name in ("manifest.json", "a b/ü 한국.txt", "sub/SHA256SUMS"):
        data = (folder / name).read_bytes()
        for position in range(len(data)):
            changed = bytearray(data)
            changed[position] ^= 1
            (folder / name).write_bytes(changed)
            problems = check_sums(folder)
            assert len(problems) == 1 and name in problems[0] and "has changed" in problems[0]
        (folder / name).write_bytes(data)
    assert check_sums(folder) == []


def test_missing_extra_and_unreadable_files_are_named(folder: Path) -> None:
    (folder / "onnx" / "empty").unlink()
    (folder / "new.bin").write_bytes(b"")
    os.mkfifo(folder / "pipe")
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()
    problems = "\n".join(check_sums(folder))
    for text in (
        "onnx/empty is missing",
        "new.bin is not listed",
        "pipe is not a plain file",
        "manifest.json is missing",
    ):
        assert text in problems


def test_links_are_refused(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    shutil.copy(folder / "manifest.json", outside / "manifest.json")
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to(outside / "manifest.json")
    (folder / "sub2").symlink_to(outside)
    problems = "\n".join(check_sums(folder))
    assert "manifest.json is a symbolic link" in problems and "sub2 is a symbolic link" in problems
    with pytest.raises(WorkError, match="symbolic link"):
        write_sums(folder)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{h}  /etc/passwd", "outside the folder"),
        ("{h}  ../outside", "outside the folder"),
        ("{h}  onnx/../../x", "outside the folder"),
        ("{h}  ./manifest.json", "not the plain path"),
        ("{h}  onnx//decode.onnx", "not the plain path"),
        ("{h}  SHA256SUMS", "not the plain path"),
        ("{h} *manifest.json", "malformed"),
        ("{H}  manifest.json", "malformed"),
        ("{h}  ", "malformed"),
        ("", "malformed"),
        ("\\{h}  a", "malformed"),
        ("{h}  manifest.json", "listed twice"),
        ("{h}  zzz", "zzz is missing"),
        ("{h}  \x1b[2J", "'\\x1b[2J' is missing"),
    ],
)
def test_bad_lines_are_told(folder: Path, line: str, words: str) -> None:
    digest = sha256_file(folder / "manifest.json")
    with (folder / SUMS).open("a") as file:
        file.write(line.replace("{h}", digest).replace("{H}", digest.upper()) + "\n")
    assert any(words in problem for problem in check_sums(folder))


def test_an_unordered_cut_or_empty_list_is_told(folder: Path) -> None:
    data = (folder / SUMS).read_bytes()
    (folder / SUMS).write_bytes(b"".join(reversed(data.splitlines(keepends=True))))
    assert any("out of order" in problem for problem in check_sums(folder))
    (folder / SUMS).write_bytes(data[:-1])
    assert any("does not end" in problem for problem in check_sums(folder))
    (folder / SUMS).write_bytes(b"")
    assert any("is empty" in problem for problem in check_sums(folder))
    (folder / SUMS).unlink()
    assert len(check_sums(folder)) == 1 and "SHA256SUMS cannot be read" in check_sums(folder)[0]
    with pytest.raises(BundleError, match="SHA256SUMS"):
        bundle_id(folder)


@pytest.mark.parametrize("name", ["a\nb", "a\\b", b"a\xff".decode("utf-8", "surrogateescape")])
def test_names_the_list_cannot_hold_are_refused(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"")
    with pytest.raises(WorkError, match="in its name"):
        write_sums(folder)
    assert any("not listed" in problem and problem.isprintable() for problem in check_sums(folder))


def test_progress_counts_every_byte(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    assert check_sums(folder, lambda done, total: calls.append((done, total))) == []
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path != folder / SUMS)
    assert calls[-1] == (size, size) and len(calls) > 3
    assert calls == sorted(calls)
    again: list[int] = []
    write_sums(folder, lambda done, total: again.append(done))
    assert again[-1] == size
