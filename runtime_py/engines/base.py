"""What every inference engine offers: pure functions by name, on plain arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


class Engine(Protocol):
    """Runs the graphs of one bundle: ``prefill``, ``query``, ``decode`` and ``embed``.

    A graph is a pure function of its inputs; the caller owns every cache. Names, shapes and dtypes are those of the
    manifest's I/O signature. Inputs are contiguous; an engine must not copy the cache inputs of query and decode.
    """

    name: str

    def run(self, graph: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one graph and return its outputs by name. Raises ``WorkError`` when the engine refuses the inputs."""
        ...

    def close(self) -> None:
        """Release weights and sessions; a later ``run`` loads them again."""
        ...
