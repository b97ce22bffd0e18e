"""The safetensors files of a Hugging Face folder, one file or shards with an index, read one tensor at a time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from exporter.checkpoints.weight_index import INDEX, WHOLE, weight_index
from runtime_py.errors import WorkError

_FLOATS = ("F32", "F16", "BF16", "F64")


class WeightFolder:
    """Weights by tensor name. Raises ``WorkError`` for a folder whose files are missing, cut short or do not fit each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise WorkError(f"{folder} does not exist. Name a .gguf file, a Hugging Face folder, or a preset.")
        promised = weight_index(folder)
        self.files = _files(folder, promised)
        self._where: dict[str, Path] = {}
        for file in self.files:
            names = _names(file)
            twice = sorted(names & self._where.keys())
            if twice:
                raise WorkError(f"{twice[0]!r} is in {file.name} and in {self._where[twice[0]].name}: {folder} mixes two models.")
            self._where |= dict.fromkeys(names, file)
        wrong = sorted(name for name, file in promised.items() if self._where.get(name) != folder / file)
        if wrong:
            raise WorkError(
                f"{folder / INDEX} says that {wrong[0]!r} is in {promised[wrong[0]]}, where it is not ({len(wrong)} such). "
                "Index and shards do not belong together: copy or download them again."
            )

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def tensor(self, name: str) -> Tensor:
        """One tensor as float32. Raises ``WorkError`` when it is missing or no floating-point tensor."""
        if name not in self._where:
            files = ", ".join(f.name for f in self.files)
            raise WorkError(f"{self.folder} has no tensor {name!r} in {files}; a shard may be missing.")
        with safe_open(self._where[name], framework="pt") as handle:
            kind = handle.get_slice(name).get_dtype()
            if kind not in _FLOATS:
                raise WorkError(
                    f"{self._where[name]}: {name} is stored as {kind}; supported are {', '.join(_FLOATS)}. Take the checkpoint "
                    "that is not quantised; this exporter quantises by itself."
                )
            found: Tensor = handle.get_tensor(name)
        return found.to(torch.float32)


def _files(folder: Path, promised: dict[str, str]) -> list[Path]:
    """The weight files: those of the index, or model.safetensors, or all there are; adapters and copies beside them are not."""
    if promised:
        counts = Counter(promised.values())
        lost = sorted(name for name in counts if not (folder / name).is_file())
        if lost:
            raise WorkError(
                f"{folder} lacks {', '.join(lost)}, with {sum(counts[name] for name in lost)} of {len(promised)} tensors: "
                "a shard is missing. Copy or download the checkpoint again."
            )
        return [folder / name for name in sorted(counts)]
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(p.name for kind in ("*.bin", "*.pth", "*.pt") for p in folder.glob(kind))
        why = f" {pickles[0]} is a pickle, which can run code when read;" if pickles else ""
        raise WorkError(f"{folder} has no .safetensors file.{why} convert the weights with transformers' save_pretrained().")
    return files


def _names(file: Path) -> set[str]:
    try:
        with safe_open(file, framework="pt") as handle:
            return set(handle.keys())
    except (SafetensorError, OSError) as error:
        raise WorkError(f"{file} is damaged or cut short ({error}). Copy or download it again.") from error
