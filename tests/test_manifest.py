"""manifest.json from strangers: whatever stands in it, the answer is a manifest or a BundleError that names the field."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime_py.bundle import Bundle
from runtime_py.errors import BundleError
from runtime_py.manifest import Manifest, is_inside_path

Keys = tuple[str | int, ...]


@pytest.fixture
def content(small_bundle: Bundle) -> Any:
    return json.loads((small_bundle.path / "manifest.json").read_text(encoding="utf-8"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "manifest.json"


def read(file: Path, content: Any) -> Manifest:
    file.write_text(json.dumps(content), encoding="utf-8")
    return Manifest.read(file)


def put(content: Any, keys: Keys, value: Any) -> Any:
    """A copy of ``content`` with ``value`` at ``keys``."""
    changed = copy.deepcopy(content)
    place = changed
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return changed


def places(value: Any, keys: Keys = ()) -> Iterator[Keys]:
    """Every field below ``value``, of lists the first and the last entry."""
    inside: list[str | int] = []
    if isinstance(value, dict):
        inside = list(value)
    elif isinstance(value, list) and value:
        inside = sorted({0, len(value) - 1})
    for key in inside:
        yield (*keys, key)
        yield from places(value[key], (*keys, key))


def test_what_was_written_is_read(small_bundle: Bundle, file: Path) -> None:
    file.write_text(small_bundle.manifest.to_json(), encoding="utf-8")
    assert Manifest.read(file) == small_bundle.manifest


def test_unknown_keys_are_ignored(content: Any, file: Path, small_bundle: Bundle) -> None:
    content["from_the_future"] = [1, {"a": None}]
    content["plan"]["another"] = "x"
    assert read(file, content) == small_bundle.manifest


def test_optional_fields_have_defaults(content: Any, file: Path) -> None:
    for section, name in (("plan", "medoids"), ("embedder", "weights"), ("embedder", "query_prompt")):
        del content[section][name]
    del content["trial"], content["quality"], content["targets"]["onnx"]["parity"], content["targets"]["onnx"]["checks"]
    manifest = read(file, content)
    assert (manifest.plan.medoids, manifest.embedder.weights, manifest.quality) == (2, "int8", {})
    assert manifest.targets["onnx"].parity == "not run"


def test_every_missing_field_is_named(content: Any, file: Path) -> None:
    optional = {"medoids", "weights", "parity", "checks", "quality", "trial", "query_prompt", "document_prompt"}
    free = {"memory", "libraries", "quality", "checks", "targets"}
    named = 0
    for keys in places(content):
        name = keys[-1]
        if isinstance(name, int) or name in optional or free & set(keys[:-1]):
            continue
        changed = copy.deepcopy(content)
        place = changed
        for key in keys[:-1]:
            place = place[key]
        del place[name]
        with pytest.raises(BundleError, match=rf"manifest\.json.*{name}"):
            read(file, changed)
        named += 1
    assert named > 60


WRONG: list[Any] = [None, True, "../../x", -1, 0, 1 << 63, -(10**300), 1e300, [["x"]], {"a": {}}]


@pytest.mark.parametrize("value", WRONG, ids=[repr(value)[:12] for value in WRONG])
def test_a_wrong_value_anywhere_is_a_manifest_or_a_bundle_error(content: Any, file: Path, value: Any) -> None:
    refused = 0
    for keys in places(content):
        try:
            read(file, put(content, keys, value))
        except BundleError as error:
            assert "manifest.json" in str(error) and len(str(error)) < 600, str(error)
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("keys", [("routing", "threshold"), ("plan", "alpha"), ("shape", "inv_freq", 3)], ids=str)
def test_numbers_that_are_not_finite_are_refused(content: Any, file: Path, keys: Keys, word: str) -> None:
    text = json.dumps(put(content, keys, "@"))
    file.write_text(text.replace('"@"', word), encoding="utf-8")
    with pytest.raises(BundleError, match="finite"):
        Manifest.read(file)


HOSTILE: list[tuple[Keys, Any, str]] = [
    (("schema_version",), 1, "schema_version is 1; this runtime reads 2"),
    (("schema_version",), "1", "schema_version is '1'"),
    (("schema_version",), 2.0, "schema_version"),
    (("shape", "n_kv_heads"), 2, "n_heads"),
    (("shape", "n_kv_heads"), 1 << 24, "n_heads"),
    (("shape", "context"), 0, "shape.context is 0; allowed are 1 to"),
    (("shape", "vocab_size"), 10**18, "shape.vocab_size"),
    (("shape", "inv_freq"), [], "inv_freq"),
    (("shape", "inv_freq", 0), -1.0, "inv_freq"),
    (("plan", "tail"), 1 << 40, "plan.tail"),
    (("plan", "tail"), 40, "template: 27 tokens around a question"),
    (("plan", "query"), 8, "signatures.query: tokens"),
    (("plan", "block"), 8192, "need 8480 positions; the context is 8192"),
    (("plan", "episodes"), 65, "plan.episodes is 65; allowed are 1 to 64"),
    (("plan", "medoids"), 0, "plan.medoids"),
    (("plan", "n_sinks"), 33, "plan.n_sinks is 33; allowed are 0 to 32"),
    (("plan", "layer_budgets"), [], "plan.layer_budgets has 0 numbers for 2 layers"),
    (("plan", "layer_budgets"), [32, 8193], r"plan.layer_budgets\[1\] is 8193"),
    (("plan", "layer_budgets"), [40, 224], "signatures.prefill: k_0"),
    (("template", "stop_ids"), [], "template.stop_ids is empty"),
    (("template", "prefix"), [49152], r"template.prefix\[0\] is 49152; allowed are 0 to 49151"),
    (("template", "recall_prefix", 0), -1, r"template.recall_prefix\[0\]"),
    (("embedder", "length"), 1 << 40, "embedder.length"),
    (("embedder", "dimension"), 100, "signatures.embed: vector"),
    (("embedder", "pad_id"), -1, "embedder.pad_id"),
    (("embedder", "prefix_ids"), [101, -1], r"embedder.prefix_ids\[1\] is -1"),
    (("embedder", "suffix_ids"), [1 << 40], r"embedder.suffix_ids\[0\] is 1099511627776"),
    (("embedder", "prefix_ids"), [1] * 600, "embedder.length is"),
    (("embedder", "query_prompt"), 3, "embedder.query_prompt"),
    (("trial",), "random", "trial: a list is expected"),
    (("routing", "threshold"), 1.5, "routing.threshold"),
    (("targets", "onnx", "graphs"), {}, "targets.onnx.graphs has no 'prefill'"),
    (("targets", "onnx", "graphs", "query"), "../../x", r"targets.onnx.graphs.query is '../../x'"),
    (("targets", "onnx", "graphs", "query"), "onnx/../../x", "targets.onnx.graphs.query"),
    (("targets", "onnx", "graphs", "query"), "/etc/passwd", "targets.onnx.graphs.query"),
    (("targets", "onnx", "graphs", "query"), "C:\\x", "targets.onnx.graphs.query"),
    (("targets", "onnx", "graphs", "query"), "", "targets.onnx.graphs.query"),
    (("targets", "onnx", "graphs", "query"), "a\0b", "targets.onnx.graphs.query"),
    (("signatures", "decode"), {"inputs": [], "outputs": []}, "signatures.decode: tokens is None"),
]


@pytest.mark.parametrize(("keys", "value", "message"), HOSTILE, ids=[f"{k[-1]}={str(v)[:20]!r}" for k, v, _ in HOSTILE])
def test_hostile_values_are_refused_by_name(content: Any, file: Path, keys: Keys, value: Any, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        read(file, put(content, keys, value))


def test_caches_without_bound_are_refused(content: Any, file: Path) -> None:
    content["shape"].update(n_heads=1 << 20, n_kv_heads=1 << 20)
    with pytest.raises(BundleError, match=f"make {(1 << 20) * 64 * (32 + 224 + 2 * 192)} numbers"):
        read(file, content)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"1",
        b"[" * 100_000,
        b'{"schema_version": ' + b"[" * 400 + b"]" * 400 + b"}",
        b'{"schema_version": ' + b"9" * 5000 + b"}",
        b'{"schema_version": 2, "name": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    ],
    ids=lambda data: repr(data[:24]),
)
def test_what_is_no_manifest_is_refused(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with pytest.raises(BundleError, match=r"manifest\.json"):
        Manifest.read(file)


def test_a_folder_in_its_place_is_refused(file: Path) -> None:
    file.mkdir()
    with pytest.raises(BundleError, match=r"manifest\.json"):
        Manifest.read(file)


def test_int_fields_do_not_take_true(content: Any, file: Path) -> None:
    with pytest.raises(BundleError, match="granularity: int is expected, found True"):
        read(file, put(content, ("plan", "granularity"), True))


def test_a_whole_number_is_a_float(content: Any, file: Path) -> None:
    assert read(file, put(content, ("plan", "alpha"), 2)).plan.alpha == 2.0


@pytest.mark.parametrize("name", ["a", "onnx/prefill.onnx", "coreml/m.mlpackage", "_x/y-1.z", "a..b"])
def test_plain_paths(name: str) -> None:
    assert is_inside_path(name)


OUTSIDE = ["", ".", "..", "/", "/a", "a/", "a//b", "a/..", "../a", "a/./b", "a\\b", "C:a", "a\n", "ä", "~/a"]


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_paths_that_lead_out(name: str) -> None:
    assert not is_inside_path(name)


def test_the_plan_of_a_manifest_can_be_replaced(small_bundle: Bundle, file: Path) -> None:
    """The checks read what is written, not what was measured: a plan that fits its signatures passes."""
    plan = dataclasses.replace(small_bundle.manifest.plan, n_sinks=4, alpha=0.5)
    file.write_text(dataclasses.replace(small_bundle.manifest, plan=plan).to_json(), encoding="utf-8")
    assert Manifest.read(file).plan == plan
