"""Which file of a sharded checkpoint holds which tensor, as model.safetensors.index.json promises (transformers' format)."""

from __future__ import annotations

from pathlib import Path

from exporter.checkpoints.json_file import JsonObject
from runtime_py.errors import WorkError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name; empty without an index. Raises ``WorkError`` for one that cannot be used."""
    path = folder / INDEX
    if not path.exists():
        return {}
    found = JsonObject.read(path).data.get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(v, str) and Path(v).name == v for v in found.values()):
        raise WorkError(f"{path} has no usable weight_map. Copy or download it again.")
    return {str(name): str(file) for name, file in found.items()}
