"""The programs under the C++ ``Module`` API, called as the stock Android class calls it, against the Python engine's numbers."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import executorch_bundles
import numpy as np
import pytest
from cpp_build import LIBRARIES, build_runner, wheel_folder

from runtime_py.bundle import Bundle
from runtime_py.engines.base import Array, Engine
from runtime_py.engines.executorch import _REASONS
from runtime_py.episodes.history import History
from runtime_py.language_model import LanguageModel
from runtime_py.selftest import run_chain, selftest_file
from runtime_py.tensor_files import map_tensors

# The wheel's kernels are the same under both APIs; what is measured is 0.
SAME = 1e-5
METHODS = {"prefill": "prefill", "query": "query", "decode": "decode", "embed": "forward"}


@dataclass(frozen=True)
class Call:
    """One call of a graph with copies of its tensors, in the order of the signature."""

    graph: str
    inputs: list[Array]
    outputs: list[Array]


class Recorder:
    """Passes calls on to a real engine and keeps copies: the host writes into the tails it passes."""

    name = "executorch"

    def __init__(self, engine: Engine, bundle: Bundle) -> None:
        self._engine, self._signatures = engine, bundle.manifest.signatures
        self.calls: list[Call] = []

    def run(self, graph: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        signature = self._signatures[graph]
        given = [np.array(inputs[spec.name]) for spec in signature.inputs]
        outputs = self._engine.run(graph, inputs)
        self.calls.append(Call(graph, given, [np.array(outputs[spec.name]) for spec in signature.outputs]))
        return outputs

    def close(self) -> None:
        self._engine.close()


@dataclass(frozen=True)
class Recorded:
    """The self-test chain of a bundle: two prefills, without and with a prompt, a query, a decode, an embedding."""

    bundle: Bundle
    calls: list[Call]

    def program(self, graph: str) -> Path:
        return self.bundle.path / self.bundle.manifest.targets["executorch"].graphs[graph]

    def model_calls(self) -> list[Call]:
        return [call for call in self.calls if call.graph != "embed"]

    def embed_calls(self) -> list[Call]:
        return [call for call in self.calls if call.graph == "embed"]


@pytest.fixture(scope="module", params=["fp32", "int4"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, small_history: History) -> Recorded:
    bundle = executorch_bundles.executorch_bundle(request.param, tmp_path_factory.getbasetemp(), small_history)
    recorder = Recorder(bundle.engine("executorch"), bundle)
    vectors, _ = map_tensors(bundle.path / selftest_file("executorch"))
    run_chain(LanguageModel(recorder, bundle.manifest.shape, bundle.manifest.plan), recorder, vectors)
    recorder.close()
    return Recorded(bundle, recorder.calls)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_runner(tmp_path_factory.mktemp("runner") / "runner", wheel_folder())


def write_calls(folder: Path, calls: Sequence[Call]) -> list[str]:
    """The runner's CALLS and DATA for ``calls``, as arguments."""
    lines: list[str] = []
    with (folder / "data").open("wb") as data:
        for call in calls:
            lines.append(f"call {METHODS[call.graph]}")
            for kind, arrays in (("in", call.inputs), ("out", call.outputs)):
                for array in arrays:
                    data.write(b"\0" * (-data.tell() % 64))
                    lines.append(f"{kind} {array.dtype.name} {data.tell()} {' '.join(map(str, array.shape))}")
                    data.write(np.ascontiguousarray(array).tobytes())
    (folder / "calls").write_text("\n".join(lines) + "\n", encoding="ascii")
    return [str(folder / "calls"), str(folder / "data")]


def run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300, check=False)


@dataclass(frozen=True)
class Measured:
    """One line that the runner prints."""

    calls: int
    absolute: float
    relative: float
    wrong: int
    integers: int


LINE = r"(\w+): calls (\d+), largest difference (\S+), relative (\S+), int32 that differ (\d+) of (\d+)"


def measured(output: str) -> dict[str, Measured]:
    found = {}
    for line in output.splitlines():
        match = re.fullmatch(LINE, line)
        assert match, line
        calls, absolute, relative, wrong, integers = match.groups()[1:]
        found[match[1]] = Measured(int(calls), float(absolute), float(relative), int(wrong), int(integers))
    return found


def kept_rows(bundle: Bundle) -> int:
    """The int32 outputs of one prefill: the index of every kept row."""
    return bundle.manifest.shape.n_kv_heads * sum(bundle.manifest.plan.layer_budgets)


def test_the_chain_gives_the_python_engines_numbers(recorded: Recorded, runner: Path, tmp_path: Path) -> None:
    calls = recorded.model_calls()
    assert [call.graph for call in calls] == ["prefill", "prefill", "query", "decode"]
    assert [int(call.inputs[3][0]) > 0 for call in calls[:2]] == [False, True]  # n_prompt: the second one evicts
    done = run([runner, recorded.program("prefill"), *write_calls(tmp_path, calls), str(SAME)])
    assert done.returncode == 0, done.stdout + done.stderr
    found = measured(done.stdout)
    assert {name: (each.calls, each.integers) for name, each in found.items()} == {
        "prefill": (2, 2 * kept_rows(recorded.bundle)),
        "query": (1, 0),
        "decode": (1, 0),
    }
    assert all(each.wrong == 0 and each.relative <= SAME for each in found.values())


def test_the_embedder_gives_the_python_engines_numbers(recorded: Recorded, runner: Path, tmp_path: Path) -> None:
    calls = write_calls(tmp_path, recorded.embed_calls())
    done = run([runner, recorded.program("embed"), *calls, str(SAME)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert measured(done.stdout)["forward"].calls == 1


def test_methods_do_not_disturb_each_other(recorded: Recorded, runner: Path, tmp_path: Path) -> None:
    """Any order gives the same numbers, and outputs last until their own method runs again."""
    first, second, query, decode = recorded.model_calls()
    order = [decode, second, decode, first, query, second, second, decode, query, first, decode]
    done = run([runner, recorded.program("decode"), *write_calls(tmp_path, order), str(SAME)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name: each.calls for name, each in measured(done.stdout).items()} == {"prefill": 5, "query": 2, "decode": 4}


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("recorded", ["fp32"], indirect=True)
def test_the_runner_sees_one_wrong_number(recorded: Recorded, runner: Path, tmp_path: Path, dtype: str) -> None:
    call = recorded.model_calls()[1]
    index = max(i for i, array in enumerate(call.outputs) if array.dtype == dtype)
    changed = call.outputs[index].astype(np.dtype(dtype))
    changed.flat[-1] += 1
    outputs = [*call.outputs[:index], changed, *call.outputs[index + 1 :]]
    done = run([runner, recorded.program("prefill"), *write_calls(tmp_path, [Call(call.graph, call.inputs, outputs)]), str(SAME)])
    assert done.returncode == 1, done.stdout + done.stderr
    found = measured(done.stdout)["prefill"]
    assert (found.wrong == 1) == (dtype == "int32")
    assert (found.relative > SAME) == (dtype == "float32")


def refusal(done: subprocess.CompletedProcess[str]) -> tuple[int, int]:
    """Exit code of the runner and the runtime's error code in its last line."""
    match = re.search(r"error (0x[0-9a-f]{2}) \w+::\w+\n$", done.stderr)
    assert match, done.stdout + done.stderr
    return done.returncode, int(match[1], 16)


LOAD_ERRORS = {
    "missing": (0x22, "the path is wrong"),
    "empty": (0x12, "fewer than 64 bytes"),
    "garbage": (0x23, "is no ExecuTorch program"),
    "cut": (0x23, "is cut short"),
}


def damaged(kind: str, program: Path, folder: Path) -> Path:
    """A copy of ``program`` with this damage."""
    path = folder / "program.pte"
    data = program.read_bytes()
    if kind != "missing":
        path.write_bytes({"empty": b"", "garbage": b"not a program. " * 10_000, "cut": data[: len(data) // 2]}[kind])
    return path


@pytest.mark.parametrize("kind", LOAD_ERRORS)
@pytest.mark.parametrize("recorded", ["fp32"], indirect=True)
def test_a_program_that_cannot_be_loaded_is_told_from_others(recorded: Recorded, runner: Path, tmp_path: Path, kind: str) -> None:
    path = damaged(kind, recorded.program("embed"), tmp_path)
    code, reason = LOAD_ERRORS[kind]
    assert refusal(run([runner, path, *write_calls(tmp_path, recorded.embed_calls()), str(SAME)])) == (3, code)
    assert reason in _REASONS[code]


@pytest.mark.parametrize("recorded", ["fp32"], indirect=True)
def test_calls_that_the_program_does_not_know_are_refused(recorded: Recorded, runner: Path, tmp_path: Path) -> None:
    def refused(call: Call) -> tuple[int, int]:
        return refusal(run([runner, recorded.program("embed"), *write_calls(tmp_path, [call]), str(SAME)]))

    (good,) = recorded.embed_calls()
    tokens, n_tokens = good.inputs
    assert refused(recorded.model_calls()[-1]) == (4, 0x12)
    assert refused(dataclasses.replace(good, inputs=[np.concatenate([tokens, tokens], axis=1), n_tokens])) == (5, 0x10)
    assert refused(dataclasses.replace(good, inputs=[tokens.astype(np.float32), n_tokens])) == (5, 0x12)
    assert refused(dataclasses.replace(good, inputs=[tokens])) == (5, 0x12)
    for code, reason in ((0x10, "another shape"), (0x12, "missing or of another type"), (0x12, "no such method")):
        assert reason in _REASONS[code]


@pytest.mark.parametrize(
    ("left_out", "code", "reason"),
    [
        ("kernels_quantized", 0x14, "link the quantised and optimised kernels"),
        ("kernels_optimized", 0x14, "link the quantised and optimised kernels"),
        ("backend_xnnpack", 0x20, "built without XNNPACK"),
    ],
)
@pytest.mark.parametrize("recorded", ["int4"], indirect=True)
def test_a_library_left_out_has_its_own_error(recorded: Recorded, tmp_path: Path, left_out: str, code: int, reason: str) -> None:
    libraries = [name for name in LIBRARIES if name != left_out]
    runner = build_runner(tmp_path / "runner", wheel_folder(), libraries=libraries)
    calls = write_calls(tmp_path, recorded.model_calls()[-1:])
    assert refusal(run([runner, recorded.program("decode"), *calls, str(SAME)])) == (4, code)
    assert reason in _REASONS[code]


# arm64 has other kernels: sums run in another order, and now and then an 8-bit activation rounds to the other side, which the
# six layers of the embedder (8 bits in both bundles) carry on. Measured: fp32 and int4 8e-7, embedder 0.06, all rows the same.
ARM64 = {"fp32": 1e-5, "int4": 0.02, "embed": 0.15}


@pytest.fixture(scope="module")
def arm64_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The executorch package of the aarch64 wheel of the installed version, unpacked."""
    from importlib.metadata import version

    wheel_folder()
    for program, package in (("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu"), ("qemu-aarch64-static", "qemu-user-static")):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt-get install {package}")
    folder = tmp_path_factory.mktemp("arm64")
    done = run(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", folder),
            *("--platform", "manylinux_2_28_aarch64", "--python-version", "311", f"executorch=={version('executorch')}"),
        ]
    )
    if done.returncode != 0:
        pytest.skip(f"the aarch64 wheel of executorch cannot be downloaded: {done.stderr.strip()[-300:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return folder / "executorch"


@pytest.mark.slow
def test_arm64_gives_the_same_numbers(recorded: Recorded, arm64_wheel: Path, tmp_path: Path) -> None:
    compiler = "aarch64-linux-gnu-g++"
    runner = build_runner(tmp_path / "runner", arm64_wheel, compiler, "g++-aarch64-linux-gnu")
    # Without SME, which few phones have: under the emulated one the embedder's 8-bit products come out wrong (cosine 0.06).
    emulated: list[str | Path] = ["qemu-aarch64-static", "-cpu", "max,sme=off", "-L", "/usr/aarch64-linux-gnu", runner]
    for limit, calls in (
        (ARM64[recorded.bundle.manifest.plan.weights], recorded.model_calls()),
        (ARM64["embed"], recorded.embed_calls()),
    ):
        done = run([*emulated, recorded.program(calls[0].graph), *write_calls(tmp_path, calls), str(limit)])
        assert done.returncode == 0, done.stdout + done.stderr
