"""manifest.json: what a runtime must know of a bundle. Unknown keys are ignored, so that newer optional ones may appear."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import reprlib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from runtime_py.errors import BundleError

SCHEMA_VERSION = 2
GRAPHS = ("prefill", "query", "decode", "embed")
MAX_EPISODES = 64
T = TypeVar("T")
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
_MAX_CACHE = 1 << 32  # numbers in the keys of one episode and its tail


@dataclass(frozen=True)
class ModelShape:
    """Shape of the decoder. ``inv_freq [head_dim/2]`` are the RoPE frequencies in radians per token, scaling included."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden: int
    vocab_size: int
    context: int
    inv_freq: list[float]


@dataclass(frozen=True)
class GraphPlan:
    """The numbers baked into the graphs; counts are tokens (rows), per layer and KV head where caches are meant."""

    budget: int
    block: int
    prompt: int
    tail: int
    query: int
    embed_length: int
    episodes: int
    alpha: float
    granularity: int
    layer_budgets: list[int]
    n_sinks: int
    weights: str
    cache: str
    medoids: int = 2

    @property
    def max_budget(self) -> int:
        """Mmax, the largest layer budget."""
        return max(self.layer_budgets)

    @property
    def min_budget(self) -> int:
        """The smallest layer budget: a history up to this length is kept whole."""
        return min(self.layer_budgets)


@dataclass(frozen=True)
class Template:
    """Pieces of the chat template as token ids of the language model."""

    prefix: list[int]
    question_prefix: list[int]
    question_suffix: list[int]
    turn_end: list[int]
    recall_prefix: list[int]
    stop_ids: list[int]


@dataclass(frozen=True)
class EmbedderInfo:
    """The sentence encoder: ``dimension`` of its vectors, ids of the tokens around a text, padding id, and prompts.

    The query prompt is put in front of questions, the document prompt in front of everything that is searched.
    """

    model: str
    dimension: int
    length: int
    prefix_ids: list[int]
    suffix_ids: list[int]
    pad_id: int
    query_prompt: str = ""
    document_prompt: str = ""
    weights: str = "int8"


def graph_weights(plan: GraphPlan, embedder: EmbedderInfo) -> dict[str, str]:
    """How the weights of each graph are stored."""
    return dict.fromkeys(("prefill", "query", "decode"), plan.weights) | {"embed": embedder.weights}


@dataclass(frozen=True)
class Routing:
    """A question whose best cosine to a centroid is below ``threshold`` asks for an episode of its own."""

    threshold: float


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph."""

    name: str
    dtype: str
    shape: list[int]


@dataclass(frozen=True)
class GraphSignature:
    """Inputs and outputs of a graph, in order."""

    inputs: list[TensorSpec]
    outputs: list[TensorSpec]


@dataclass(frozen=True)
class Target:
    """One runtime's files. ``graphs`` maps a graph to its file; ``parity`` is "pass", "fail" or "not run"."""

    graphs: dict[str, str]
    minimum_runtime: str
    parity: str = "not run"
    checks: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """Where the weights came from: enough to find the same ones again, without a path of the build machine."""

    model: str
    revision: str
    format: str
    file: str
    weights_sha256: str
    licence: str


@dataclass(frozen=True)
class Manifest:
    """The whole of manifest.json. ``trial`` says what makes a bundle's answers meaningless; empty for one of use."""

    schema_version: int
    name: str
    exporter_version: str
    libraries: dict[str, str]
    source: Source
    embedder_source: Source
    shape: ModelShape
    plan: GraphPlan
    template: Template
    embedder: EmbedderInfo
    routing: Routing
    signatures: dict[str, GraphSignature]
    targets: dict[str, Target]
    memory: dict[str, Any]
    quality: dict[str, Any] = field(default_factory=dict)
    trial: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """Serialise, keys in declaration order."""
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"

    @staticmethod
    def read(path: Path) -> Manifest:
        """Read and check a manifest. Raises ``BundleError`` naming the file and the field."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BundleError(
                f"{path.parent} is not a bundle: it has no manifest.json. Build one with `python -m exporter build`."
            ) from None
        except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise BundleError(f"{path} cannot be read as JSON ({error}). Copy or build the bundle again.") from None
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise BundleError(
                f"{path}: schema_version is {reprlib.repr(version)}; this runtime reads {SCHEMA_VERSION}. "
                "Build the bundle again with the exporter of this version."
            )
        manifest = parse_dataclass(Manifest, data, str(path))
        _check_values(manifest, path)
        return manifest


def parse_dataclass(cls: type[T], data: Any, where: str, joint: str = ": ") -> T:
    """Build ``cls`` from decoded JSON, checking types to the leaves. Raises ``BundleError`` naming the field.

    ``where`` is the file; ``joint`` stands between it and the name of a field.
    """
    if not isinstance(data, dict):
        raise BundleError(f"{where}: an object is expected, found {type(data).__name__}.")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        if item.name in data:
            values[item.name] = _parse_value(hints[item.name], data[item.name], f"{where}{joint}{item.name}")
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise BundleError(f"{where}: the field {item.name!r} is missing.")
    return cls(**values)


def _parse_value(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is types.UnionType:
        if value is None and type(None) in arguments:
            return None
        return _parse_value(next(a for a in arguments if a is not type(None)), value, where)
    if origin is list:
        if not isinstance(value, list):
            raise BundleError(f"{where}: a list is expected, found {type(value).__name__}.")
        return [_parse_value(arguments[0], each, f"{where}[{i}]") for i, each in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise BundleError(f"{where}: an object is expected, found {type(value).__name__}.")
        return {str(k): _parse_value(arguments[1], each, f"{where}.{k}") for k, each in value.items()}
    if dataclasses.is_dataclass(hint):
        return parse_dataclass(typing.cast(type, hint), value, where, ".")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1 << 53 else math.inf
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise BundleError(f"{where}: {hint.__name__} is expected, found {reprlib.repr(value)}.")
    if hint is float and not math.isfinite(value):
        raise BundleError(f"{where}: a finite number below 2^53 is expected, found {value}.")
    return value


def is_inside_path(name: str) -> bool:
    """Whether ``name`` is a plain relative path: no "..", no root, no drive, no character that a system reads otherwise."""
    return bool(_PATH.fullmatch(name))


def _check_values(manifest: Manifest, path: Path) -> None:
    """Refuse numbers that would make a runtime allocate without bound or index outside a table, and paths that lead out."""
    problem = (
        _shape_problem(manifest.shape)
        or _plan_problem(manifest.plan, manifest.shape)
        or _template_problem(manifest)
        or _embedder_problem(manifest)
        or _target_problem(manifest.targets)
        or _signature_problem(manifest)
    )
    if problem:
        raise BundleError(f"{path}: {problem} Copy the bundle again, or build it anew.")


def _shape_problem(shape: ModelShape) -> str | None:
    for name in ("n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden", "vocab_size", "context"):
        if problem := _outside(f"shape.{name}", getattr(shape, name), 1, 1 << 24):
            return problem
    if shape.n_heads % shape.n_kv_heads:
        return f"shape.n_heads is {shape.n_heads}; a multiple of n_kv_heads, {shape.n_kv_heads}, is expected."
    if len(shape.inv_freq) * 2 != shape.head_dim or min(shape.inv_freq) < 0:
        return f"shape.inv_freq has {len(shape.inv_freq)} numbers; head_dim / 2 = {shape.head_dim / 2:g} from 0 up are expected."
    return None


def _plan_problem(plan: GraphPlan, shape: ModelShape) -> str | None:
    for name in ("block", "prompt", "tail", "query", "granularity", "budget"):
        if problem := _outside(f"plan.{name}", getattr(plan, name), 1, shape.context):
            return problem
    for name in ("episodes", "medoids"):
        if problem := _outside(f"plan.{name}", getattr(plan, name), 1, MAX_EPISODES):
            return problem
    if len(plan.layer_budgets) != shape.n_layers:
        return f"plan.layer_budgets has {len(plan.layer_budgets)} numbers for {shape.n_layers} layers."
    for layer, rows in enumerate(plan.layer_budgets):
        if problem := _outside(f"plan.layer_budgets[{layer}]", rows, 1, shape.context):
            return problem
    if problem := _outside("plan.n_sinks", plan.n_sinks, 0, plan.min_budget):
        return problem
    longest = plan.max_budget + max(plan.block + plan.prompt, plan.tail)
    if longest > shape.context:
        return f"plan.layer_budgets with block and prompt, or tail, need {longest} positions; the context is {shape.context}."
    numbers = shape.n_kv_heads * shape.head_dim * sum(rows + plan.tail for rows in plan.layer_budgets)
    if numbers > _MAX_CACHE:
        return f"plan.layer_budgets and tail make {numbers} numbers; at most {_MAX_CACHE} are allowed."
    return None


def _template_problem(manifest: Manifest) -> str | None:
    template, tail = manifest.template, manifest.plan.tail
    for name, ids in dataclasses.asdict(template).items():
        for i, token in enumerate(ids):
            if problem := _outside(f"template.{name}[{i}]", token, 0, manifest.shape.vocab_size - 1):
                return problem
    if not template.stop_ids:
        return "template.stop_ids is empty; without one no answer ends."
    # A question of half the tail and the start of an answer must fit behind the sealed cache.
    around = len(template.turn_end) + len(template.question_prefix) + len(template.question_suffix)
    if around >= tail - tail // 2:
        return f"template: {around} tokens around a question leave no room in a tail of {tail}."
    return None


def _embedder_problem(manifest: Manifest) -> str | None:
    embedder = manifest.embedder
    if embedder.length != manifest.plan.embed_length:
        return f"embedder.length is {embedder.length}, plan.embed_length {manifest.plan.embed_length}; they must be equal."
    around = len(embedder.prefix_ids) + len(embedder.suffix_ids)
    limits = {"length": (around + 1, 1 << 16), "dimension": (1, 1 << 16), "pad_id": (0, 1 << 24)}
    for name, (low, high) in limits.items():
        if problem := _outside(f"embedder.{name}", getattr(embedder, name), low, high):
            return problem
    for name in ("prefix_ids", "suffix_ids"):
        for i, token in enumerate(getattr(embedder, name)):
            if problem := _outside(f"embedder.{name}[{i}]", token, 0, 1 << 24):
                return problem
    if not -1.0 <= manifest.routing.threshold <= 1.0:
        return f"routing.threshold is {manifest.routing.threshold}; a cosine from -1 to 1 is expected."
    return None


def _target_problem(targets: dict[str, Target]) -> str | None:
    for name, target in targets.items():
        if missing := [graph for graph in GRAPHS if graph not in target.graphs]:
            return f"targets.{name}.graphs has no {missing[0]!r}."
        for graph, file in target.graphs.items():
            if not is_inside_path(file):
                return f"targets.{name}.graphs.{graph} is {reprlib.repr(file)}; a plain path inside the bundle is expected."
    return None


def _signature_problem(manifest: Manifest) -> str | None:
    """What of the I/O signatures contradicts the plan; what only a target adds is compared with the graph by its engine."""
    for graph, expected in _planned_shapes(manifest).items():
        if graph not in manifest.signatures:
            return f"signatures has no {graph!r}."
        signature = manifest.signatures[graph]
        found = {spec.name: spec.shape for spec in [*signature.inputs, *signature.outputs]}
        for name, shape in expected.items():
            if found.get(name) != shape:
                return f"signatures.{graph}: {name} is {reprlib.repr(found.get(name))}; the plan makes it {shape}."
    return None


def _planned_shapes(manifest: Manifest) -> dict[str, dict[str, list[int]]]:
    shape, plan, embedder = manifest.shape, manifest.plan, manifest.embedder
    layers = range(shape.n_layers)
    rows = [[shape.n_kv_heads, m, shape.head_dim] for m in plan.layer_budgets]
    caches = {f"{name}_{i}": rows[i] for name in ("k", "v") for i in layers}
    kept = {f"kept_{name}": size for name, size in caches.items()}
    free = [shape.n_kv_heads, plan.tail, shape.head_dim]
    tails = {f"tail_{name}_{i}": free for name in ("k", "v") for i in layers}

    def answering(length: int) -> dict[str, list[int]]:
        fresh = {f"new_{name}_{i}": [shape.n_kv_heads, length, shape.head_dim] for name in ("k", "v") for i in layers}
        return {"tokens": [1, length], "logits": [1, shape.vocab_size], **caches, **tails, **fresh}

    return {
        "prefill": {"tokens": [1, plan.block], "prompt": [1, plan.prompt], **caches, **kept},
        "query": answering(plan.query),
        "decode": answering(1),
        "embed": {"tokens": [1, embedder.length], "vector": [embedder.dimension]},
    }


def _outside(name: str, value: int, low: int, high: int) -> str | None:
    return None if low <= value <= high else f"{name} is {_shortened(value)}; allowed are {low} to {high}."


def _shortened(value: int) -> str:
    return str(value) if abs(value) < 10**20 else f"a number of {value.bit_length()} bits"
