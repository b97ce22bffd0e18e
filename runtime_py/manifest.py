"""manifest.json: what a runtime must know of a bundle. Unknown keys are ignored, so that newer optional ones may appear."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from runtime_py.errors import BundleError

SCHEMA_VERSION = 1
T = TypeVar("T")


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
    """The sentence encoder: ``dimension`` of its vectors, ids of the tokens around a text, padding id."""

    model: str
    dimension: int
    length: int
    cls_id: int
    sep_id: int
    pad_id: int
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
    """The whole of manifest.json."""

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
                f"{path}: schema_version is {version!r}; this runtime reads {SCHEMA_VERSION}. "
                "Build the bundle again with the exporter of this version."
            )
        manifest = parse_dataclass(Manifest, data, str(path))
        _check_numbers(manifest, path)
        return manifest


def parse_dataclass(cls: type[T], data: Any, where: str) -> T:
    """Build ``cls`` from decoded JSON, checking types to the leaves. Raises ``BundleError`` naming the field."""
    if not isinstance(data, dict):
        raise BundleError(f"{where}: an object is expected, found {type(data).__name__}.")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        if item.name in data:
            values[item.name] = _parse_value(hints[item.name], data[item.name], f"{where}: {item.name}")
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
        return parse_dataclass(typing.cast(type, hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise BundleError(f"{where}: {hint.__name__} is expected, found {value!r}.")
    return value


def _check_numbers(manifest: Manifest, path: Path) -> None:
    """Refuse numbers that would make a runtime allocate without bound or index outside a table."""
    shape, plan = manifest.shape, manifest.plan
    for name in ("n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden", "vocab_size", "context"):
        value = getattr(shape, name)
        if not 1 <= value <= 1 << 24:
            raise BundleError(f"{path}: shape.{name} is {value}; allowed are 1 to {1 << 24}.")
    for name in ("block", "prompt", "tail", "query", "embed_length", "episodes", "granularity", "budget"):
        value = getattr(plan, name)
        if not 1 <= value <= shape.context:
            raise BundleError(f"{path}: plan.{name} is {value}; allowed are 1 to the context, {shape.context}.")
    if len(plan.layer_budgets) != shape.n_layers or len(shape.inv_freq) * 2 != shape.head_dim:
        raise BundleError(f"{path}: layer_budgets or inv_freq do not fit {shape.n_layers} layers of {shape.head_dim}.")
    if not all(1 <= m <= shape.context for m in plan.layer_budgets) or not 0 <= plan.n_sinks <= plan.min_budget:
        raise BundleError(f"{path}: a layer budget or n_sinks is outside 0 to the context, {shape.context}.")
    ids = [t for piece in dataclasses.asdict(manifest.template).values() for t in piece]
    if not all(0 <= t < shape.vocab_size for t in ids):
        raise BundleError(f"{path}: a template token is outside the vocabulary of {shape.vocab_size}.")
