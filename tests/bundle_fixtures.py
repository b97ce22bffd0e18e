"""Small real bundles for tests: two layers of the default model, a part of the sample conversation, built as users build."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from exporter.build import build_bundle
from exporter.console import Stages
from exporter.plan import BuildPlan
from runtime_py.bundle import Bundle
from runtime_py.engines.base import Array, Engine
from runtime_py.episodes.cache import EpisodeCache
from runtime_py.episodes.history import History
from runtime_py.episodes.loaders import load_history
from runtime_py.integrity import write_sums

SIZES = {"budget": 128, "block": 64, "prompt": 64, "tail": 192, "query": 16, "embed_length": 128, "layers": 2}


@pytest.fixture(scope="session")
def small_history() -> History:
    """The first five sessions of the sample conversation."""
    history = load_history(Path(str(files("calibration").joinpath("sample_conversation.json")))).history
    return History(history.speakers, tuple(u for u in history.utterances if u.session < 5))


@pytest.fixture(scope="session")
def build_small(tmp_path_factory: pytest.TempPathFactory, small_history: History) -> Callable[[str], Path]:
    """``build_small("int8")``: a new verified bundle with these weights; the folder must not be changed."""

    def build(weights: str) -> Path:
        out = tmp_path_factory.mktemp("bundles") / f"small-{weights}"
        build_bundle(BuildPlan(out=out, weights=weights, **SIZES), small_history, Stages(quiet=True))  # type: ignore[arg-type]
        return out

    return build


@pytest.fixture(scope="session")
def small_bundle(build_small: Callable[[str], Path]) -> Bundle:
    """A verified float32 bundle; read-only."""
    return Bundle.open(build_small("fp32"))


@pytest.fixture(scope="session")
def small_int8_bundle(build_small: Callable[[str], Path]) -> Bundle:
    """A verified int8 bundle; read-only."""
    return Bundle.open(build_small("int8"))


class RecordingEngine:
    """Passes every call on to a real engine and keeps its graph and inputs; ``close`` keeps the weights for the next test."""

    def __init__(self, engine: Engine, on_run: Callable[[str], None] = lambda _: None) -> None:
        self.name, self._engine = engine.name, engine
        self.on_run = on_run
        self.calls: list[tuple[str, Mapping[str, Array]]] = []
        self.closed = 0

    def run(self, graph: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.calls.append((graph, inputs))
        self.on_run(graph)
        return self._engine.run(graph, inputs)

    def close(self) -> None:
        self.closed += 1

    def blocks(self) -> list[tuple[int, int, int]]:
        """(n_seen, n_tokens, n_prompt) of every prefill so far."""
        names = ("n_seen", "n_tokens", "n_prompt")
        return [tuple(int(i[n][0]) for n in names) for graph, i in self.calls if graph == "prefill"]  # type: ignore[misc]


def copy_bundle(bundle: Bundle, folder: Path, slim: bool = False) -> Path:
    """A copy to damage, of hard links: replace files, never write into them. ``slim`` leaves the graphs' weights out."""
    shutil.copytree(bundle.path, folder, copy_function=os.link)
    if slim:
        for name in ("onnx/weights.bin", "onnx/embedder.onnx"):
            replace_file(folder / name, b"left out for this test")
        write_sums(folder)
    return folder


def replace_file(path: Path, data: bytes) -> None:
    """Put a new file in the place of ``path``, which may be a hard link."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    """Replace a JSON file by what ``change`` makes of its content in place."""
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    replace_file(path, json.dumps(content).encode())


def same_caches(first: EpisodeCache | None, second: EpisodeCache | None) -> bool:
    """Whether two caches are equal, bit for bit."""
    if first is None or second is None:
        return False
    arrays = zip([*first.k, *first.v, *first.src], [*second.k, *second.v, *second.src], strict=True)
    return first.n_seen == second.n_seen and all(a.tobytes() == b.tobytes() for a, b in arrays)
