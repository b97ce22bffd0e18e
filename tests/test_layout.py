"""Rules of the source tree that no other test would notice: who imports whom, sizes, docstrings, forbidden calls."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("exporter", "runtime_py", "calibration")
MAX_CODE_LINES, MAX_TEST_LINES, MAX_FUNCTION_LINES = 400, 450, 60
# What the reference runtime may import at the top of a module; an engine may import its own library inside itself.
RUNTIME_LIBRARIES = {"numpy", "onnxruntime", "tokenizers", "safetensors"}
ENGINE_LIBRARIES = {"runtime_py/engines/executorch.py": {"executorch", "torch"}, "runtime_py/engines/coreml.py": {"coremltools"}}


def _sources(*folders: str) -> list[Path]:
    found = [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]
    assert found
    return found


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


CODE = _sources(*PACKAGES)
EVERYTHING = CODE + _sources("tests")


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """Absolute names of imported modules, with their lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)}:{node.lineno}: relative import"
            yield node.module or "", node.lineno


def _found(folders: tuple[str, ...], *banned: str) -> list[str]:
    return [
        f"{_name(path)}:{line} imports {module}"
        for path in _sources(*folders)
        for module, line in _imports(path)
        if any(module == name or module.startswith(name + ".") for name in banned)
    ]


def test_the_runtime_imports_numpy_and_three_libraries_only() -> None:
    strangers = []
    for path in _sources("runtime_py"):
        allowed = RUNTIME_LIBRARIES | {"runtime_py"} | ENGINE_LIBRARIES.get(_name(path), set())
        strangers += [
            f"{_name(path)}:{line} imports {module}"
            for module, line in _imports(path)
            if module.split(".")[0] not in allowed | sys.stdlib_module_names
        ]
    assert strangers == []


def test_the_runtime_runs_where_exporter_and_torch_cannot_be_imported() -> None:
    modules = [_name(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in _sources("runtime_py")]
    probe = f"""
import importlib, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("exporter", "torch", "transformers", "calibration", "onnx", "executorch", "coremltools"):
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Blocked())
for name in {[m for m in modules if m != "runtime_py.engines.executorch"]!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("folder", "banned"),
    [
        (
            "exporter/models",
            ("exporter.cli", "exporter.build", "exporter.checkpoints", "exporter.graphs", "exporter.targets", "exporter.parity"),
        ),
        ("exporter/checkpoints", ("exporter.cli", "exporter.build", "exporter.graphs", "exporter.targets", "exporter.parity")),
        ("exporter/scoring", ("exporter.cli", "exporter.build", "exporter.graphs", "exporter.targets", "exporter.parity")),
        ("exporter/graphs", ("exporter.cli", "exporter.build", "exporter.targets", "exporter.parity")),
        ("exporter/quantization", ("exporter.cli", "exporter.build", "exporter.targets", "exporter.parity")),
        ("exporter/targets", ("exporter.cli", "exporter.build", "exporter.parity")),
        ("exporter/parity", ("exporter.cli", "exporter.build")),
        ("exporter/bundle_writer", ("exporter.cli", "exporter.build")),
        ("calibration", ("exporter.cli", "exporter.build", "exporter.targets")),
    ],
)
def test_arrows_point_one_way(folder: str, banned: tuple[str, ...]) -> None:
    assert _found((folder,), *banned) == []


def test_files_and_functions_are_short() -> None:
    long = []
    for path in EVERYTHING:
        text = path.read_text(encoding="utf-8")
        if (lines := len(text.splitlines())) > (MAX_CODE_LINES if path in CODE else MAX_TEST_LINES):
            long.append(f"{_name(path)} has {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{_name(path)}:{node.lineno} {node.name} has {lines} lines")
    assert long == []


# The protocols say what these do: exporter.checkpoints.base.Checkpoint.
PROTOCOL_METHODS = {"tensor", "chat_template", "special_tokens", "stop_ids", "tokenizer_json", "source"}


def _public(body: list[ast.stmt], owner: ast.ClassDef | None = None) -> Iterator[tuple[str, ast.AST]]:
    """Public functions, classes and methods that must be documented; a method that a base class explains need not be."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if owner is None or not (owner.bases or node.name in PROTOCOL_METHODS):
            yield f"{owner.name}.{node.name}" if owner else node.name, node
        if isinstance(node, ast.ClassDef):
            yield from _public(node.body, node)


def test_every_public_name_of_the_packages_is_documented() -> None:
    bare = []
    for path in CODE:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if tree.body and ast.get_docstring(tree) is None:
            bare.append(f"{_name(path)} has no docstring")
        for name, node in _public(tree.body):
            assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if ast.get_docstring(node) is None:
                bare.append(f"{_name(path)}:{node.lineno} {name} has no docstring")
    assert bare == []


def test_every_function_is_typed() -> None:
    bare = []
    for path in EVERYTHING:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            untyped = [a.arg for a in every if a.annotation is None and a.arg not in ("self", "cls")]
            if untyped or node.returns is None:
                bare.append(f"{_name(path)}:{node.lineno} {node.name} {untyped}")
    assert bare == []


def test_nothing_is_pickled_and_nothing_is_executed() -> None:
    assert _found(PACKAGES, "pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib") == []
    calls = []
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            pickled = called in ("torch.save", "torch.load", "np.load", "np.save", "numpy.load", "os.system")
            shell = any(k.arg == "shell" for k in node.keywords)
            if called in ("eval", "exec", "compile") or pickled or shell:
                calls.append(f"{_name(path)}:{node.lineno} {called}")
    assert calls == []


# Written in two pieces, so that this file does not hold them.
MACHINE = re.compile("|".join(("/ro" + "ot/", "/ho" + "me/", "/wo" + "rk/", "/tm" + "p/", "/Us" + "ers/", "py" + "env")))


def test_no_path_of_a_machine_is_written_down() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("this tree is not a git repository, so its own files cannot be listed")
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            found += [f"{name}:{number}: {line}" for number, line in enumerate(lines, 1) if MACHINE.search(line)]
    assert found == []


@pytest.mark.parametrize("name", ["install", "quickstart", "test"])
def test_scripts_are_valid_bash_and_stop_at_the_first_error(name: str) -> None:
    path = ROOT / "scripts" / name
    assert path.stat().st_mode & 0o111
    text = path.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What scripts/install reads, with an environment that counts as installed for the tests."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/install", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    files = ("pyproject.toml", "constraints.txt", "scripts/install")
    digest = hashlib.sha256(b"".join((tmp_path / name).read_bytes() for name in files)).hexdigest()
    (tmp_path / ".venv" / "installed-test").write_text(digest + "\n")
    return tmp_path


def _install(checkout: Path, *words: str, tools: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) if tools is None else {"PATH": str(tools)}
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.run(
        [bash, str(checkout / "scripts" / "install"), *words], capture_output=True, text=True, env=environment, timeout=60
    )


@pytest.mark.parametrize("words", [[], ["test"]])
def test_what_is_installed_is_not_installed_again(checkout: Path, words: list[str]) -> None:
    done = _install(checkout, *words)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_changed_pin_is_installed_and_without_a_python_it_says_what_is_needed(checkout: Path) -> None:
    tools = checkout / "tools"
    tools.mkdir()
    for name in ("dirname", "cat", "sha256sum", "cut"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    assert _install(checkout, tools=tools).returncode == 0
    with (checkout / "constraints.txt").open("a") as file:
        file.write("# another pin\n")
    done = _install(checkout, tools=tools)
    assert done.returncode == 2
    assert "Python 3.11 is needed" in done.stderr
    assert "apt-get install" in done.stderr
    assert _install(checkout, "tests").returncode == 2
