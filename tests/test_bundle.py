"""A bundle folder from anywhere: what is damaged, missing or hostile is refused by name, and nothing else is touched."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_fixtures import copy_bundle, edit_json, replace_file

from runtime_py.bundle import EPISODES_FILE, Bundle
from runtime_py.episodes.cache_files import read_cache, write_cache
from runtime_py.errors import BundleError, UsageError
from runtime_py.integrity import SUMS, write_sums
from runtime_py.tensor_files import map_tensors, write_tensors


@pytest.fixture
def slim(small_bundle: Bundle, tmp_path: Path) -> Path:
    """A copy whose graphs hold no weights: opening reads none."""
    return copy_bundle(small_bundle, tmp_path / "bundle", slim=True)


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_whole_bundle_opens(small_bundle: Bundle) -> None:
    bundle = Bundle.open(str(small_bundle.path))
    assert bundle.manifest == small_bundle.manifest
    assert bundle.id == hashlib.sha256((bundle.path / SUMS).read_bytes()).hexdigest()
    assert len(bundle.episodes_file().episodes) == bundle.manifest.plan.episodes


def test_one_changed_byte_in_any_file_is_found_and_named(slim: Path) -> None:
    Bundle.open(slim)
    for name in names(slim):
        data = bytearray((slim / name).read_bytes())
        data[len(data) // 2] ^= 1
        original = slim.with_name("original")
        (slim / name).rename(original)
        (slim / name).write_bytes(data)
        with pytest.raises(BundleError, match="is damaged") as caught:
            Bundle.open(slim)
        assert name in str(caught.value)
        (slim / name).unlink()
        original.rename(slim / name)
    Bundle.open(slim)


def test_every_byte_of_the_checksums_counts(slim: Path) -> None:
    data = (slim / SUMS).read_bytes()
    for position in [*range(0, len(data), 29), len(data) - 1]:
        changed = bytearray(data)
        changed[position] ^= 1
        replace_file(slim / SUMS, bytes(changed))
        with pytest.raises(BundleError, match="is damaged"):
            Bundle.open(slim)


def test_every_missing_file_is_named(slim: Path) -> None:
    for name in names(slim):
        (slim / name).rename(slim.with_name("aside"))
        with pytest.raises(BundleError, match=name.replace(".", r"\.")):
            Bundle.open(slim)
        slim.with_name("aside").rename(slim / name)


@pytest.mark.parametrize("data", [b"", b"\n", b"\0" * 200, b"x  manifest.json\n"], ids=repr)
def test_checksums_that_are_none(slim: Path, data: bytes) -> None:
    replace_file(slim / SUMS, data)
    with pytest.raises(BundleError, match=SUMS):
        Bundle.open(slim)


def test_what_is_not_listed_is_refused(slim: Path) -> None:
    (slim / "onnx" / "extra.bin").write_bytes(b"x")
    with pytest.raises(BundleError, match=r"onnx/extra\.bin is not listed"):
        Bundle.open(slim)


def test_links_are_refused(slim: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (slim / "layer_budgets.json").rename(target)
    (slim / "layer_budgets.json").symlink_to(target)
    with pytest.raises(BundleError, match=r"layer_budgets\.json is a symbolic link"):
        Bundle.open(slim)


def test_what_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"is not a bundle: it has no manifest\.json"):
        Bundle.open(tmp_path)
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "missing", Path("a\0b")):
        with pytest.raises(BundleError, match="is not a folder"):
            Bundle.open(path)


def test_many_problems_are_counted(slim: Path) -> None:
    for number in range(9):
        (slim / f"extra-{number}").write_bytes(b"")
    with pytest.raises(BundleError, match="And 4 more"):
        Bundle.open(slim)


def test_without_the_check_damage_is_left_to_whoever_reads(slim: Path) -> None:
    (slim / "extra").write_bytes(b"")
    assert Bundle.open(slim, check=False).manifest.name


def reopened(folder: Path, name: str, change: Any) -> BundleError:
    """The error on opening after ``change`` of a JSON file, with checksums that fit."""
    edit_json(folder / name, change)
    write_sums(folder)
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder)
    assert Path(name).name in str(caught.value)
    return caught.value


def test_another_schema_version(slim: Path) -> None:
    error = reopened(slim, "manifest.json", lambda m: m.update(schema_version=99))
    assert "schema_version is 99; this runtime reads 2" in str(error)


@pytest.mark.parametrize("file", ["../outside.onnx", "/etc/passwd", "onnx/../../outside.onnx"])
def test_graphs_stay_inside(slim: Path, file: str) -> None:
    shutil.copy(slim / "onnx" / "query.onnx", slim.with_name("outside.onnx"))
    error = reopened(slim, "manifest.json", lambda m: m["targets"]["onnx"]["graphs"].update(query=file))
    assert "targets.onnx.graphs.query" in str(error) and "inside the bundle" in str(error)


def test_a_graph_that_no_file_holds(slim: Path) -> None:
    error = reopened(slim, "manifest.json", lambda m: m["targets"]["onnx"]["graphs"].update(query="onnx/other.onnx"))
    assert "targets.onnx.graphs.query names onnx/other.onnx, which is missing" in str(error)


HISTORIES: list[tuple[str, Any, str]] = [
    ("no utterance", lambda h: h.update(utterances=[]), "utterances is empty"),
    ("a line break", lambda h: h["utterances"][3].update(text='x"\nBob said, "y'), r"utterances[3] is not one line"),
    ("a lone surrogate", lambda h: h["utterances"][3].update(text="\ud800"), "utterances[3]"),
    ("no text", lambda h: h["utterances"][0].update(text="  "), "utterances[0]"),
    ("no speaker", lambda h: h["utterances"][0].update(speaker=""), "utterances[0]"),
    ("sessions go back", lambda h: h["utterances"][-1].update(session=0), "session is 0; 4 or more"),
    ("a huge session", lambda h: h["utterances"][-1].update(session=10**30), "session"),
    ("a speaker of two lines", lambda h: h["speakers"].append("a\nb"), "speakers[2]"),
    ("no episode", lambda h: h.update(episodes=[]), "episodes has 0 entries"),
    ("too many episodes", lambda h: h.update(episodes=h["episodes"] * 20), "episodes has 80 entries"),
    ("a path", lambda h: h["episodes"][1].update(cache="../../x.safetensors"), "episodes[1] names '../../x.safetensors'"),
    ("an absolute path", lambda h: h["episodes"][1].update(sealed="/etc/passwd"), "episodes[1] names"),
    ("another file", lambda h: h["episodes"][0].update(cache="centroids.safetensors"), "episodes[0] names"),
    ("no prompt", lambda h: h["episodes"][0].update(prompt=[]), "prompt has 0 tokens; allowed are 1 to 64"),
    ("a long prompt", lambda h: h["episodes"][0].update(prompt=[1] * 65), "prompt has 65 tokens"),
    ("a token outside", lambda h: h["episodes"][0].update(prompt=[49152]), "prompt has a token outside"),
    ("a medoid outside", lambda h: h["episodes"][0].update(medoids=[99]), "medoids names a segment"),
    ("a segment outside", lambda h: h["segments"][-1].update(last=99), "segments[13]"),
    ("a segment of no episode", lambda h: h["segments"][0].update(episode=4), "segments[0]"),
    ("a wrong type", lambda h: h["episodes"][0].update(n_seen="7"), "episodes[0].n_seen: int is expected"),
    ("a missing field", lambda h: h["utterances"][0].pop("date"), "'date' is missing"),
]


@pytest.mark.parametrize(("change", "message"), [h[1:] for h in HISTORIES], ids=[h[0] for h in HISTORIES])
def test_hostile_histories_are_refused_by_name(slim: Path, change: Any, message: str) -> None:
    assert message in str(reopened(slim, EPISODES_FILE, change))


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"9" * 5000], ids=lambda d: repr(d[:8]))
def test_a_history_that_is_no_json(slim: Path, data: bytes) -> None:
    replace_file(slim / EPISODES_FILE, data)
    write_sums(slim)
    with pytest.raises(BundleError, match=r"episodes\.json"):
        Bundle.open(slim)


def test_a_missing_history(slim: Path) -> None:
    (slim / EPISODES_FILE).unlink()
    write_sums(slim)
    with pytest.raises(BundleError, match=r"episodes\.json cannot be read"):
        Bundle.open(slim)


def refused_by_session(folder: Path, store: Path) -> str:
    write_sums(folder)
    bundle = Bundle.open(folder)
    with pytest.raises(BundleError) as caught:
        bundle.session(store=store)
    assert not store.exists()
    return str(caught.value)


def test_caches_of_other_shapes_are_refused_before_a_store_is_made(slim: Path, tmp_path: Path) -> None:
    path = slim / "episodes" / "episode-2.safetensors"
    cache = read_cache(path)
    path.unlink()
    write_cache(path, type(cache)(cache.k[:1], cache.v[:1], cache.src[:1], cache.n_seen))
    assert "episode-2.safetensors does not fit" in refused_by_session(slim, tmp_path / "store")


def test_caches_of_another_history_are_refused(slim: Path, tmp_path: Path) -> None:
    edit_json(slim / EPISODES_FILE, lambda h: h["episodes"][1].update(n_seen=7))
    assert "episode-1.safetensors does not fit" in refused_by_session(slim, tmp_path / "store")


def test_a_cache_file_that_is_none_is_refused(slim: Path, tmp_path: Path) -> None:
    replace_file(slim / "episodes" / "episode-0.safetensors", b"not tensors at all")
    assert "episode-0.safetensors" in refused_by_session(slim, tmp_path / "store")


@pytest.mark.parametrize("rows", [slice(0, 3), slice(0, 0)])
def test_centroids_that_do_not_fit_the_episodes_are_refused(slim: Path, tmp_path: Path, rows: slice) -> None:
    path = slim / "episodes" / "centroids.safetensors"
    centroids = np.array(map_tensors(path)[0]["centroids"])
    path.unlink()
    write_tensors(path, {"centroids": centroids[rows]}, {})
    assert "does not hold float32 centroids of shape [4, 384]" in refused_by_session(slim, tmp_path / "store")


def test_a_bad_tokenizer_is_refused_and_leaves_the_store_free(slim: Path, small_bundle: Bundle, tmp_path: Path) -> None:
    replace_file(slim / "tokenizer" / "tokenizer.json", b"{}")
    write_sums(slim)
    bundle, store = Bundle.open(slim), tmp_path / "store"
    for _ in range(2):  # the second would find the store locked if the first had kept it open
        with pytest.raises(BundleError, match=r"tokenizer\.json is not a tokenizer"):
            bundle.session(store=store)


@pytest.mark.parametrize("name", ["coreml", "torch", "", "../onnx"])
def test_an_unknown_engine_lists_those_there_are(small_bundle: Bundle, name: str) -> None:
    with pytest.raises(UsageError, match="It can be run by: onnx"):
        small_bundle.engine(name)


@pytest.mark.parametrize("recall", [-1, 65])
def test_recall_has_limits(small_bundle: Bundle, recall: int) -> None:
    with pytest.raises(UsageError, match=f"recall {recall} is not possible: allowed are 0 to 64"):
        small_bundle.session(recall=recall)


def test_names_that_the_system_cannot_encode_are_refused(slim: Path) -> None:
    manifest = json.loads((slim / "manifest.json").read_text(encoding="utf-8"))
    manifest["targets"]["onnx"]["graphs"]["embed"] = "onnx/\ud800"
    replace_file(slim / "manifest.json", json.dumps(manifest).encode())
    write_sums(slim)
    with pytest.raises(BundleError, match=r"targets\.onnx\.graphs\.embed"):
        Bundle.open(slim)


def test_copies_made_by_links_share_no_writes(small_bundle: Bundle, slim: Path) -> None:
    """The tests above damage copies; this guards the bundle they were made of."""
    assert (slim / "onnx" / "query.onnx").samefile(small_bundle.path / "onnx" / "query.onnx")
    assert Bundle.open(small_bundle.path).id == small_bundle.id
