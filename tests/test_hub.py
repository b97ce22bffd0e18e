"""Weights from the hub: downloaded, resumed, found again offline, and a sentence with the remedy for whatever goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, Hub, serving
from tiny_models import ROOT, Ran

from exporter.checkpoints.hub import find_snapshot, missing_files
from exporter.checkpoints.hub_model import HubModel
from exporter.checkpoints.tiny_folder import write_tiny_checkpoint
from runtime_py.errors import UsageError

REPO = "someone/tiny-qwen3"
FIND = """
import sys
from pathlib import Path
from exporter.checkpoints.locating import ModelRequest, locate_decoder
from exporter.checkpoints.opening import open_decoder
from runtime_py.errors import EpiCacheError
model, revision, offline = sys.argv[1:]
try:
    located = locate_decoder(ModelRequest(model, revision=revision or None, offline=bool(offline)), lambda text: print(text))
    checkpoint = open_decoder(located)
except EpiCacheError as error:
    sys.exit(f"{error}")
source = checkpoint.source()
print("FOUND", located.revision, source.model, source.revision, checkpoint.config.n_layers)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A table of 49,152 x 128 numbers: more than the 10 MB that a client reads before it writes.
    folder = write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("hub") / "tiny", hidden_size=128)
    assert (folder / "model.safetensors").stat().st_size > 24 << 20
    (folder / "pytorch_model.bin").write_bytes(b"not for us")
    return folder


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    with serving(REPO, folder) as hub:
        yield hub


def start(hub: Hub, home: Path, model: str, revision: str, offline: bool, **more: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": hub.endpoint, "PYTHONPATH": str(ROOT), **more}
    words = [sys.executable, "-c", FIND, model, revision, "yes" if offline else ""]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=environment, **pipes)  # type: ignore[call-overload]


def find(hub: Hub, home: Path, model: str = REPO, revision: str = "", offline: bool = False, **more: str) -> Ran:
    process = start(hub, home, model, revision, offline, **more)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err
    return Ran(process.returncode, out, err)


def test_a_model_is_downloaded_once_and_found_offline(hub: Hub, tmp_path: Path) -> None:
    first = find(hub, tmp_path)
    assert first.code == 0 and f"FOUND {COMMIT} {REPO} {COMMIT} 2" in first.out, first.err
    assert "downloading model.safetensors" in first.out
    asked = {path.rsplit("/", 1)[-1] for _, path, _ in hub.requests}
    assert "config.json" in asked and "pytorch_model.bin" not in asked
    hub.requests.clear()
    for revision in ("", COMMIT):
        again = find(hub, tmp_path, revision=revision, offline=True)
        assert again.code == 0 and f"FOUND {COMMIT}" in again.out, again.err
    assert find(hub, tmp_path, revision=COMMIT).code == 0  # a commit never changes
    assert hub.requests == []
    assert "downloading" not in find(hub, tmp_path).out and not [r for r in hub.requests if r[0] == "GET" and "resolve" in r[1]]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_file_goes_on_where_it_ended(hub: Hub, tmp_path: Path, number: int) -> None:
    hub.stall_after = 22 << 20
    process = start(hub, tmp_path, REPO, "", False)
    assert hub.stalled.wait(60)
    parts: list[Path] = []
    deadline = time.monotonic() + 30
    while not (parts and parts[0].stat().st_size) and time.monotonic() < deadline:
        parts = list(tmp_path.rglob("*.part"))
        time.sleep(0.1)
    process.send_signal(number)
    process.communicate(timeout=60)
    kept = parts[0].stat().st_size
    assert kept >= 10 << 20
    hub.stall_after = 0
    hub.requests.clear()
    again = find(hub, tmp_path)
    assert again.code == 0 and "FOUND" in again.out, again.err
    ranges = [wanted for method, path, wanted in hub.requests if method == "GET" and path.endswith("model.safetensors")]
    assert ranges == [f"bytes={kept}-"]
    assert not list(tmp_path.rglob("*.part"))


def test_bytes_that_are_not_the_file_s_are_removed(hub: Hub, tmp_path: Path) -> None:
    hub.stall_after = 22 << 20
    process = start(hub, tmp_path, REPO, "", False)
    assert hub.stalled.wait(60)
    time.sleep(0.5)
    process.kill()
    process.communicate()
    part = next(iter(tmp_path.rglob("*.part")))
    part.write_bytes(b"\0" * max(part.stat().st_size, 1))
    hub.stall_after = 0
    ran = find(hub, tmp_path)
    assert ran.code == 1 and "arrived damaged and was removed" in ran.err
    assert find(hub, tmp_path).code == 0


def test_a_gated_model_says_what_to_do(hub: Hub, tmp_path: Path) -> None:
    hub.gated = True
    ran = find(hub, tmp_path)
    assert ran.code == 1 and "is gated" in ran.err and "hf auth login" in ran.err and "--checkpoint PATH" in ran.err
    assert f"https://huggingface.co/{REPO}" in ran.err
    assert "is gated" in find(hub, tmp_path, HF_TOKEN="wrong").err
    assert find(hub, tmp_path, HF_TOKEN="secret").code == 0


@pytest.mark.parametrize(
    ("model", "revision", "found"),
    [
        ("someone/else", "", "no repository 'someone/else'"),
        (REPO, "v9", "has no revision 'v9'"),
        (REPO, "a..b", "is no branch, tag or commit"),
    ],
)
def test_names_that_the_hub_does_not_know(hub: Hub, tmp_path: Path, model: str, revision: str, found: str) -> None:
    ran = find(hub, tmp_path, model, revision)
    assert ran.code == 1 and found in ran.err


def test_files_that_are_missing_in_the_cache_are_named(hub: Hub, tmp_path: Path) -> None:
    assert find(hub, tmp_path).code == 0
    lost = next(iter(tmp_path.rglob("snapshots/*/model.safetensors")))
    lost.unlink()
    ran = find(hub, tmp_path, offline=True)
    assert ran.code == 1 and "is not complete on this machine" in ran.err and "looked for   model.safetensors\n" in ran.err
    assert str(lost.parent) in ran.err
    assert find(hub, tmp_path).code == 0


def test_without_a_network_what_is_cached_is_used_and_the_rest_is_said_at_once(hub: Hub, tmp_path: Path) -> None:
    started = time.monotonic()
    ran = find(hub, tmp_path, "llama3.2-3b", HF_ENDPOINT="http://127.0.0.1:9")
    assert time.monotonic() - started < 30  # it takes a second; this only catches retries that go on for minutes
    assert ran.code == 1
    for part in (
        "the hub cannot be reached",
        "config.json, tokenizer.json, model.safetensors",
        str(tmp_path / "hub" / "models--meta-llama--Llama-3.2-3B-Instruct" / "snapshots"),
        "https://huggingface.co/meta-llama/Llama-3.2-3B-Instruct",
        "hf auth login",
        "--checkpoint PATH",
        "--weights-source random",
    ):
        assert part in ran.err, part
    assert find(hub, tmp_path).code == 0
    cached = find(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert cached.code == 0 and "the hub cannot be reached; using commit" in cached.out
    assert "HF_HUB_OFFLINE" in find(hub, tmp_path / "other", HF_HUB_OFFLINE="1").err


def test_a_download_that_cannot_fit_does_not_begin(hub: Hub, tmp_path: Path) -> None:
    hub.declared["model.safetensors"] = 1 << 50
    ran = find(hub, tmp_path)
    assert ran.code == 1 and "The download needs 1,125,899.9 GB" in ran.err and "HF_HOME" in ran.err
    assert not [path for _, path, _ in hub.requests if "resolve" in path]


def test_a_disk_that_fills_up_is_named(hub: Hub, tmp_path: Path) -> None:
    # A limit on the size of files stands for the disk: the write fails with an error number of the same kind.
    process = subprocess.run(
        ["bash", "-c", 'ulimit -f 12000; trap "" XFSZ; exec "$0" "$@"', sys.executable, "-c", FIND, REPO, "", ""],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 1 and "The disk is full while model.safetensors is downloaded" in process.stderr
    assert find(hub, tmp_path).code == 0


def test_a_repository_of_pickles_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}", encoding="utf-8")
    (source / "pytorch_model.bin").write_bytes(b"x")
    with serving(REPO, source) as hub:
        ran = find(hub, tmp_path / "home")
    assert ran.code == 1 and "pytorch_model.bin is a pickle, which can run code" in ran.err


def test_what_a_folder_lacks_is_named_by_file(tmp_path: Path) -> None:
    assert missing_files(tmp_path) == ["config.json", "tokenizer.json", "model.safetensors"]
    for name in ("config.json", "tokenizer.json", "model-2.safetensors"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}', encoding="utf-8")
    assert missing_files(tmp_path) == ["model-1.safetensors"]
    index.write_text("[", encoding="utf-8")
    assert missing_files(tmp_path) == ["model.safetensors.index.json"]


@pytest.mark.parametrize("revision", ["../x", "-x", "a b", "", "x" * 300])
def test_a_revision_that_cannot_be_one_is_wrong_use(revision: str) -> None:
    with pytest.raises(UsageError, match="is no branch, tag or commit"):
        find_snapshot(HubModel(REPO, "mit"), revision or "/", offline=True)
