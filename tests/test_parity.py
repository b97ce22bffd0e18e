"""Every check of ``verify`` can fail: each is shown a bundle in which the thing it measures is wrong."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tiny_models import Tiny

from exporter.cli.main import main
from exporter.parity.checks import Check, kl_divergence, relative_difference, worst
from exporter.parity.text import embedder_checks
from exporter.parity.verify import Models, load_models, verify_bundle
from runtime_py.bundle import Bundle
from runtime_py.errors import BundleError
from runtime_py.integrity import check_sums, write_sums
from runtime_py.tensor_files import map_tensors, write_tensors

pytest_plugins = ["tiny_fixtures"]

Damage = Callable[[Path], None]


def edit_json(name: str, change: Callable[[Any], None]) -> Damage:
    """Change a JSON file of the bundle."""

    def damage(folder: Path) -> None:
        path = folder / name
        data = json.loads(path.read_text(encoding="utf-8"))
        change(data)
        path.write_text(json.dumps(data), encoding="utf-8")

    return damage


def edit_tensors(name: str, change: Callable[[dict[str, np.ndarray]], None], **metadata: str) -> Damage:
    """Change tensors, and perhaps the metadata, of a file in episodes/."""

    def damage(folder: Path) -> None:
        path = folder / "episodes" / name
        mapped, old = map_tensors(path)
        tensors = {key: np.array(value) for key, value in mapped.items()}
        change(tensors)
        path.unlink()  # the mapping keeps the old file
        write_tensors(path, tensors, old | metadata)

    return damage


def weight(parameter: str, factor: float = 1.01) -> Damage:
    """Multiply one number of a stored parameter, its largest one, in onnx/weights.bin."""

    def damage(folder: Path) -> None:
        model = onnx.load(folder / "onnx" / "decode.onnx", load_external_data=False)
        where = next({e.key: e.value for e in i.external_data} for i in model.graph.initializer if i.name == parameter)
        stored = np.memmap(
            folder / "onnx" / "weights.bin", np.float32, "r+", int(where["offset"]), shape=int(where["length"]) // 4
        )
        stored[int(np.abs(stored).argmax())] *= factor
        stored.flush()

    return damage


def graph(file: str, pattern: str, change: Callable[[np.ndarray], np.ndarray]) -> Damage:
    """Change the constants inside one graph file whose name contains ``pattern``; the shared weights stay right."""

    def damage(folder: Path) -> None:
        model = onnx.load(folder / "onnx" / file, load_external_data=False)
        found = [i for i in model.graph.initializer if pattern in i.name and not i.external_data]
        assert found
        for initializer in found:
            array = numpy_helper.to_array(initializer)
            initializer.CopyFrom(numpy_helper.from_array(np.asarray(change(array), array.dtype), initializer.name))
        onnx.save(model, folder / "onnx" / file)

    return damage


def no_sinks(folder: Path) -> None:
    """Let prefill keep its rows by score alone: the constant 4 is the number of sinks."""
    graph("prefill.onnx", "scalar_tensor", lambda a: np.where(a == 4, 0, a))(folder)


def swap(tensors: dict[str, np.ndarray], name: str) -> None:
    tensors[name][[0, 1]] = tensors[name][[1, 0]]


def raise_at(tensors: dict[str, np.ndarray], name: str) -> None:
    tensors[name].reshape(-1)[-1] += np.array(0.01).astype(tensors[name].dtype)


def swap_rows(tensors: dict[str, np.ndarray]) -> None:
    tensors["src_1"][:, [-1, -2]] = tensors["src_1"][:, [-2, -1]]


def edit_piece(name: str) -> Damage:
    return edit_json("manifest.json", lambda m: m["template"][name].insert(0, 5))


def edit_label(history: dict[str, Any]) -> None:
    """Move a segment that is no medoid to the other episode."""
    medoids = {m for episode in history["episodes"] for m in episode["medoids"]}
    segment = next(s for i, s in enumerate(history["segments"]) if i not in medoids)
    segment["episode"] = 1 - segment["episode"]


ANSWERS = {"answer_tokens"}
LOGITS = {"query logits", "decode logits", "full_attention"}
# name -> damage, checks that must fail, checks that may fail besides. A name that graphs share is written with its graph.
FLOAT: dict[str, tuple[Damage, set[str], set[str]]] = {
    "a weight of the head": (weight("decoder.head.weight"), LOGITS, ANSWERS),
    "a weight of keys": (weight("decoder.layers.1.k_proj.weight"), {"keys", *LOGITS}, {"kept_rows", *ANSWERS}),
    "a weight of values": (weight("decoder.layers.1.v_proj.weight"), {"values", *LOGITS}, {"kept_rows", *ANSWERS}),
    "a weight of the first layer": (
        weight("decoder.layers.0.down_proj.weight", 1.1),
        {"keys", "values", *LOGITS},
        {"kept_rows", *ANSWERS},
    ),
    "a norm of prefill": (
        graph("prefill.onnx", "layers.0.attn_norm", lambda a: a * 1.01),
        {"keys", "values", "full_attention"},
        {"kept_rows", "answer_tokens"},
    ),
    "sinks of prefill": (no_sinks, {"kept_rows"}, ANSWERS),
    "a norm of query": (
        graph("query.onnx", "layers.1.ffn_norm", lambda a: a * 1.01),
        {"query logits", "full_attention"},
        ANSWERS,
    ),
    "a norm of decode": (graph("decode.onnx", "layers.0.attn_norm", lambda a: -a), {"decode logits", "answer_tokens"}, set()),
    "a norm of the embedder": (
        graph("embedder.onnx", "norm.weight", lambda a: a * np.linspace(0.99, 1.01, a.size)),
        {"vector"},
        {"cosine_distance", "routing_misses", "routing_margin"},
    ),
    "the embedder": (
        graph("embedder.onnx", "norm.weight", lambda a: -a * np.linspace(-1, 3, a.size)),
        {"vector", "cosine_distance", "routing_misses"},
        {"routing_margin", *ANSWERS},
    ),
    "not a number in the embedder": (
        graph("embedder.onnx", "norm.weight", lambda a: a * np.nan),
        {"vector"},
        {"cosine_distance", "routing_misses", "routing_margin"},
    ),
    "centroids": (edit_tensors("centroids.safetensors", lambda t: swap(t, "centroids")), {"centroids"}, set()),
    "medoids": (edit_tensors("centroids.safetensors", lambda t: swap(t, "medoids")), {"prompts"}, set()),
    "a segment's episode": (edit_json("episodes/episodes.json", edit_label), {"centroids"}, set()),
    "a prompt": (edit_json("episodes/episodes.json", lambda h: h["episodes"][1]["prompt"].pop()), {"prompts"}, set()),
    "a sealed key": (
        edit_tensors("episode-1.sealed.safetensors", lambda t: raise_at(t, "k_0")),
        {"sealed_keys"},
        set(),
    ),
    "tokens sealed": (edit_tensors("episode-0.sealed.safetensors", lambda t: None, n_seen="9"), {"behind"}, set()),
    "a value of an episode": (edit_tensors("episode-0.safetensors", lambda t: raise_at(t, "v_0")), {"first_layer"}, set()),
    "a key of an episode": (
        edit_tensors("episode-0.safetensors", lambda t: raise_at(t, "k_0")),
        {"first_layer", "sealed_keys"},
        set(),
    ),
    "the order of rows": (edit_tensors("episode-1.safetensors", swap_rows), {"rows"}, set()),
    "a vector of text": (edit_json("tokenizer/vectors.json", lambda v: v["text"][3]["ids"].pop()), {"text_vectors"}, set()),
    "a vector of sentences": (
        edit_json("tokenizer/vectors.json", lambda v: v["embedder"][3]["ids"].append(7)),
        {"embedder_vectors"},
        set(),
    ),
    "a piece of the template": (edit_piece("question_suffix"), {"pieces"}, set()),
    "stop ids": (edit_piece("stop_ids"), {"pieces"}, set()),
    "memory figures": (edit_json("manifest.json", lambda m: m["memory"].update(tail=1)), {"derived"}, set()),
    "a RoPE frequency": (
        edit_json("manifest.json", lambda m: m["shape"]["inv_freq"].__setitem__(1, 0.4)),
        {"derived", "full_attention", "sealed_keys"},
        {"kept_rows", *ANSWERS},
    ),
}
ROUNDED: dict[str, tuple[Damage, set[str], set[str]]] = {
    "scales of weights": (
        graph("query.onnx", "layers.1.ffn_norm", lambda a: -a * np.linspace(0, 4, a.size)),
        {"query logits_kl", "full_attention_kl"},
        {"other_choices"},
    ),
    "scales of decode": (
        graph("decode.onnx", "layers.1.ffn_norm", lambda a: -a * np.linspace(0, 4, a.size)),
        {"decode logits_kl", "other_choices"},
        set(),
    ),
}

# Damages that do not touch what another one's check reads: together they fail what each fails alone.
TOGETHER = {
    "files beside the graphs": [
        "a vector of text",
        "a vector of sentences",
        "stop ids",
        "memory figures",
        "medoids",
        "tokens sealed",
        "a sealed key",
        "a value of an episode",
        "the order of rows",
    ],
    "clusters and queries": ["a segment's episode", "a norm of query"],
    "answers": ["a norm of decode"],
    "rows and vectors": ["a weight of keys", "sinks of prefill", "the embedder"],
    "values": ["a weight of values"],
}


def label(check: Check) -> str:
    """The check's name; ``logits`` and the like with the graph, which several have."""
    return f"{check.graph} {check.name}" if check.name.startswith("logits") else check.name


@pytest.fixture(scope="module")
def models(tiny: Tiny, tiny_bundle: Path) -> Models:
    """The checkpoints, loaded once."""
    return load_models(Bundle.open(tiny_bundle).manifest, str(tiny.decoder), str(tiny.encoder))


@pytest.fixture(scope="module")
def int8_bundle(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verified bundle of int8 weights; read-only."""
    out = tmp_path_factory.mktemp("bundles") / "int8"
    assert main(tiny.build(out, weights="int8")) == 0
    return out


def failed(folder: Path, damage: Damage, bundle: Path, models: Models) -> set[str]:
    """Names of the checks that fail on a damaged copy whose SHA256SUMS are right."""
    copy = Path(shutil.copytree(bundle, folder / "copy"))
    damage(copy)
    assert check_sums(copy)
    write_sums(copy)
    return {label(c) for c in verify_bundle(Bundle.open(copy), models) if not c.passed}


@pytest.mark.parametrize("group", TOGETHER)
def test_each_wrong_thing_fails_its_own_check(tmp_path: Path, tiny_bundle: Path, models: Models, group: str) -> None:
    chosen = [FLOAT[kind] for kind in TOGETHER[group]]

    def damage(folder: Path) -> None:
        for each, _, _ in chosen:
            each(folder)

    must = {name for _, names, _ in chosen for name in names}
    may = {name for _, _, names in chosen for name in names}
    found = failed(tmp_path, damage, tiny_bundle, models)
    assert must <= found <= must | may


@pytest.mark.slow
@pytest.mark.parametrize("kind", FLOAT)
def test_what_is_wrong_fails_its_own_check(tmp_path: Path, tiny_bundle: Path, models: Models, kind: str) -> None:
    damage, must, may = FLOAT[kind]
    found = failed(tmp_path, damage, tiny_bundle, models)
    assert must <= found <= must | may


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROUNDED)
def test_what_is_wrong_in_int8_fails_its_own_check(tmp_path: Path, int8_bundle: Path, models: Models, kind: str) -> None:
    damage, must, may = ROUNDED[kind]
    found = failed(tmp_path, damage, int8_bundle, models)
    assert must <= found <= must | may


def test_an_undamaged_bundle_fails_nothing_and_every_check_is_seen_to_fail(tiny_bundle: Path, models: Models) -> None:
    checks = verify_bundle(Bundle.open(tiny_bundle), models)
    assert all(c.passed for c in checks)
    assert len({(c.target, c.graph, c.name) for c in checks}) == len(checks)
    seen = {name for kinds in TOGETHER.values() for kind in kinds for name in FLOAT[kind][1]}
    assert {label(c) for c in checks} - seen == {"routing_margin"}  # its own test is below


@pytest.mark.slow
def test_the_same_holds_for_int8(int8_bundle: Path, models: Models) -> None:
    checks = verify_bundle(Bundle.open(int8_bundle), models)
    assert all(c.passed for c in checks)
    seen = {name for table in (FLOAT, ROUNDED) for _, must, _ in table.values() for name in must}
    assert {label(c) for c in checks} - seen == {"routing_margin"}


def test_routing_far_from_the_float_model_is_told(tmp_path: Path, tiny_bundle: Path) -> None:
    bundle = Bundle.open(shutil.copytree(tiny_bundle, tmp_path / "copy"))
    first, second = np.eye(2, bundle.manifest.embedder.dimension, dtype=np.float32)
    edit_tensors("centroids.safetensors", lambda t: t.update(centroids=np.stack([first, second])))(bundle.path)
    exact = np.tile(first, (40, 1))
    near = np.array(exact)
    near[0] = (0.99 * first + 1.0 * second) / np.linalg.norm(0.99 * first + 1.0 * second)
    far = np.array(exact)
    far[0] = second
    names = {}
    for kind, found in {"near": near, "far": far}.items():
        checks = embedder_checks(bundle, "onnx", found, found, exact, frozenset())
        names[kind] = {c.name: c for c in checks}
        assert names[kind]["routing_misses"].value == 1 / 40
    assert names["far"]["routing_margin"].value == pytest.approx(1.0)
    assert not names["far"]["routing_margin"].passed


def test_a_bundle_without_a_target_is_not_verified(tmp_path: Path, tiny_bundle: Path, models: Models) -> None:
    copy = Bundle.open(shutil.copytree(tiny_bundle, tmp_path / "copy"))
    without = Bundle(copy.path, dataclasses.replace(copy.manifest, targets={}))
    with pytest.raises(BundleError, match="no target"):
        verify_bundle(without, models)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"text": [], "embedder": []}', '{"text": [{"text": "a"}], "embedder": []}'])
def test_golden_vectors_that_are_none_are_named(tmp_path: Path, tiny_bundle: Path, models: Models, text: str) -> None:
    copy = Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))
    (copy / "tokenizer" / "vectors.json").write_text(text)
    write_sums(copy)
    with pytest.raises(BundleError, match=r"vectors\.json holds no golden vectors"):
        verify_bundle(Bundle.open(copy), models)


def test_nothing_but_a_number_within_its_limit_passes() -> None:
    values = {0.0: True, 1.0: True, 1.1: False, float("nan"): False, float("inf"): False}
    assert {v: Check("t", "g", "n", v, 1.0, "").passed for v in values} == values
    assert Check("t", "g", "n", float("nan"), 1.0, "").to_json()["value"] is None


def test_differences_are_parts_of_the_largest_magnitude() -> None:
    expected = np.array([[4.0, -8.0]], np.float32)
    assert relative_difference(expected + np.float32(0.5), expected) == pytest.approx(0.5 / 8)
    assert relative_difference(expected, expected) == 0
    for found in (expected[:, :1], expected * np.float32(np.nan), expected * np.float32(np.inf)):
        assert np.isnan(relative_difference(found, expected))
    assert np.isnan(relative_difference(expected[:0], expected[:0]))
    assert np.isnan(worst([0.0, float("nan"), 1.0]))
    assert worst([]) == float("inf")


def test_kl_is_that_of_the_distributions() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    value = kl_divergence(np.log(p).astype(np.float32) + 3, np.log(q).astype(np.float32) - 70)
    assert value == pytest.approx(float((p * np.log(p / q)).sum()), abs=1e-6)
    assert np.isnan(kl_divergence(np.log(p).astype(np.float32), np.full(3, np.nan, np.float32)))
