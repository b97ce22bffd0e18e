"""Fixtures around ``tiny_models``; a test module that wants them says ``pytest_plugins = ["tiny_fixtures"]``."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import Ran, Run, Tiny, save_decoder, save_encoder, save_history

from exporter.cli.main import main
from runtime_py.errors import WorkError


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``run("inspect", folder, ...)``: a command in this process. Whatever it does, no traceback is printed."""

    def command(*words: object) -> Ran:
        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Ran(code, out, err)

    return command


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The tiny checkpoints; read-only."""
    folder = tmp_path_factory.mktemp("tiny")
    try:
        return Tiny(save_decoder(folder / "llama"), save_encoder(folder / "bert"), save_history(folder / "history.json"))
    except WorkError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tiny_bundle(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verified bundle of the tiny models; read-only."""
    out = tmp_path_factory.mktemp("bundles") / "tiny"
    assert main(tiny.build(out)) == 0
    return out
