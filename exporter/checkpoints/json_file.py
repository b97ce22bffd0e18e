"""A JSON file of a checkpoint, its values checked as they are read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime_py.errors import WorkError


@dataclass(frozen=True)
class JsonObject:
    """A JSON object of the file ``path``, whose values are checked as they are read."""

    path: Path
    data: dict[str, Any]

    @staticmethod
    def read(path: Path) -> JsonObject:
        """The object that is the whole of a file. Raises ``WorkError`` naming the file."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise WorkError(f"{path} is missing; the folder is not a complete checkpoint.") from None
        except (OSError, ValueError) as error:
            raise WorkError(f"{path} cannot be read ({error}). Copy or download it again.") from error
        if not isinstance(data, dict):
            raise WorkError(f"{path} holds no JSON object. Copy or download it again.")
        return JsonObject(path, data)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above 0; ``default`` stands for an absent or null value. Raises ``WorkError`` otherwise."""
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise WorkError(f"{self.path}: {key} is {value!r}; a positive whole number is expected.")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number above 0; ``default`` stands for an absent or null value. Raises ``WorkError`` otherwise."""
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise WorkError(f"{self.path}: {key} is {value!r}; a number above 0 is expected.")
        return float(value)
