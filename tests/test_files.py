"""Files and folders appear whole or not at all: errors, interrupts, and SIGKILL at every step."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from disk_faults import file_size_limit, kill_at, tree

from runtime_py import files
from runtime_py.errors import WorkError
from runtime_py.files import atomic_file, storage_error, write_atomic, writing_folder

not_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


def test_write_atomic_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, b"one")
    with path.open("rb") as reader:
        write_atomic(path, b"two")
        assert reader.read() == b"one", "whoever reads the old file reads all of it"
    assert tree(tmp_path) == {"a.json": b"two"}
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_body_that_raises_leaves_the_old_file(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a"
    write_atomic(path, b"old")
    with pytest.raises(type(error)), atomic_file(path) as file:
        file.write(b"new")
        raise error
    assert tree(tmp_path) == {"a": b"old"}


def test_an_error_of_the_body_about_another_file_keeps_its_meaning(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "a") as file:
        file.write((tmp_path / "missing").read_bytes())
    assert tree(tmp_path) == {}


def test_a_file_that_does_not_fit_is_a_sentence_with_sizes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomic(path, b"old")
    with file_size_limit(10_000), pytest.raises(WorkError, match=r"20,000 bytes needed, [\d,]+ bytes free"):
        write_atomic(path, bytes(20_000))
    assert tree(tmp_path) == {"a": b"old"}


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "disk or quota is full"),
        (errno.EDQUOT, "disk or quota is full"),
        (errno.EACCES, "does not allow it"),
        (errno.EROFS, "does not allow it"),
        (errno.ENOENT, "not an existing folder"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_each_failure_has_its_sentence(tmp_path: Path, number: int, words: str) -> None:
    text = str(storage_error(OSError(number, os.strerror(number)), tmp_path / "a", 7))
    assert words in text and str(tmp_path / "a") in text
    assert "7 bytes needed" in text or number in (errno.ENOENT, errno.EIO)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="not an existing folder"):
        write_atomic(tmp_path / "no" / "a", b"")


@not_root
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(WorkError, match="does not allow it"):
        write_atomic(tmp_path / "a", b"")


def test_write_atomic_survives_a_kill_at_every_step(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for step in range(1, 20):
        write_atomic(path, b"old")
        finished = kill_at(step, lambda: write_atomic(path, b"new"))
        assert path.read_bytes() in ((b"new",) if finished else (b"old", b"new"))
        if finished:
            break
    assert finished and step > 2


def fill(destination: Path, content: bytes, replace: bool = True) -> None:
    with writing_folder(destination, replace) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_bytes(content)
        (folder / "b").write_bytes(content)


NEW = {"sub/a": b"new", "b": b"new"}
OLD = {"sub/a": b"old", "b": b"old"}


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    destination = tmp_path / "deep" / "bundle"
    with writing_folder(destination) as folder:
        (folder / "b").write_bytes(b"x")
        assert folder.name.startswith(".bundle.building-") and folder.parent == destination.parent
        assert not destination.exists()
    assert tree(tmp_path) == {"deep/bundle/b": b"x"}


def test_an_existing_folder_needs_replace(tmp_path: Path) -> None:
    destination = tmp_path / "bundle"
    fill(destination, b"old")
    with pytest.raises(WorkError, match="exists already"):
        fill(destination, b"new", replace=False)
    assert tree(destination) == OLD
    (destination / "extra").write_bytes(b"goes")
    fill(destination, b"new")
    assert tree(tmp_path) == {f"bundle/{name}": data for name, data in NEW.items()}


def test_a_file_in_the_way_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "bundle").write_bytes(b"mine")
    with pytest.raises(WorkError, match="cannot become a folder"):
        fill(tmp_path / "bundle", b"new")
    assert tree(tmp_path) == {"bundle": b"mine"}
    with pytest.raises(WorkError, match="cannot become a folder"):
        fill(Path("/"), b"new")


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    fill(tmp_path / "real", b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    fill(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and tree(tmp_path / "real") == NEW


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(2)])
def test_an_interrupted_folder_leaves_the_old_one(tmp_path: Path, error: BaseException) -> None:
    fill(tmp_path / "bundle", b"old")
    with pytest.raises(type(error)), writing_folder(tmp_path / "bundle", replace=True) as folder:
        (folder / "b").write_bytes(b"half")
        raise error
    assert tree(tmp_path / "bundle") == OLD and len(list(tmp_path.iterdir())) == 1


def test_no_space_inside_the_body_is_a_sentence(tmp_path: Path) -> None:
    with file_size_limit(10_000), pytest.raises(WorkError, match="file size limit"):
        fill(tmp_path / "bundle", bytes(20_000))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="exists already"), writing_folder(tmp_path / "bundle") as folder:
        (folder / "b").write_bytes(b"new")
        fill(tmp_path / "bundle", b"old")
    assert tree(tmp_path) == {f"bundle/{name}": data for name, data in OLD.items()}


def dead_pid() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def test_only_leftovers_of_dead_processes_for_the_same_name_are_removed(tmp_path: Path) -> None:
    dead = dead_pid()
    for name in (f".bundle.building-{dead}-ab", f".bundle.building-{os.getpid()}-ab", f".bundle.replaced-{dead}-ab"):
        fill(tmp_path / name, b"half")
    kept = {f".bundle.building-{os.getppid()}-ab", f".other.building-{dead}-ab", "bundle.building-1-ab"}
    for name in kept:
        fill(tmp_path / name, b"half")
    fill(tmp_path / "bundle", b"old")
    with writing_folder(tmp_path / "bundle", replace=True) as outer:
        fill(tmp_path / "bundle", b"new")
        assert outer.is_dir(), "a folder this process is still filling was taken for a leftover"
    assert {path.name for path in tmp_path.iterdir()} == kept | {"bundle"}


@pytest.mark.parametrize("with_exchange", [True, False])
def test_a_folder_survives_a_kill_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_exchange: bool) -> None:
    destination = tmp_path / "bundle"
    if with_exchange:
        fill(tmp_path / "one", b"old")
        fill(tmp_path / "two", b"new")
        if not files._exchange(tmp_path / "one", tmp_path / "two"):
            pytest.skip("this file system cannot exchange two folders")
    else:
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    absent = 0
    for step in range(1, 60):
        shutil.rmtree(destination, ignore_errors=True)
        fill(destination, b"old")
        finished = kill_at(step, lambda: fill(destination, b"new"))
        if not destination.exists():
            absent += 1
            files._clear_leftovers(destination)
        assert tree(destination) in ((NEW,) if finished else (OLD, NEW))
        if finished:
            break
    assert finished and step > 8
    # With the exchange there is no moment without the folder; in two steps there is one, which is then mended.
    assert absent == (0 if with_exchange else 1)
    fill(destination, b"new")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_interrupt_between_the_two_steps_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "bundle", b"old")
    monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    rename, calls = Path.rename, 0

    def interrupted(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path / "bundle", b"new")
    assert calls == 3 and tree(tmp_path) == {f"bundle/{name}": data for name, data in OLD.items()}
