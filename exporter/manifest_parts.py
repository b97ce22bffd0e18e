"""Parts of the manifest that follow from the models and the plan."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from exporter.models.config import DecoderConfig
from runtime_py.manifest import GraphPlan, ModelShape

_LIBRARIES = (
    "torch",
    "onnx",
    "onnxscript",
    "onnx-ir",
    "onnxruntime",
    "executorch",
    "torchao",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
)


def model_shape(config: DecoderConfig) -> ModelShape:
    """The decoder's shape as a runtime needs it."""
    return ModelShape(
        config.n_layers,
        config.n_heads,
        config.n_kv_heads,
        config.head_dim,
        config.hidden,
        config.vocab_size,
        config.context,
        config.inv_freq(),
    )


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that a bundle may depend on."""
    installed = {d.name.lower() for d in importlib.metadata.distributions()}
    return {name: importlib.metadata.version(name) for name in _LIBRARIES if name in installed}


def memory_figures(shape: ModelShape, plan: GraphPlan) -> dict[str, Any]:
    """Bytes by part. A row is one token's key or value of one KV head; caches are float32 here."""
    row = 4 * shape.head_dim
    per_rows = 2 * shape.n_kv_heads * row  # keys and values of one token in one layer
    layers = [m * per_rows for m in plan.layer_budgets]
    token = shape.n_layers * per_rows
    return {
        "sealed_cache_per_episode": sum(layers),
        "sealed_cache_per_layer": layers,
        "tail": plan.tail * token,
        "full_cache_per_token": token,
        "full_cache_at": {str(n): n * token for n in (10_000, 30_000, 90_000)},
        "episode_on_disk": sum(layers) * 3 // 2 + 4 * shape.n_kv_heads * sum(plan.layer_budgets),
    }
