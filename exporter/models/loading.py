"""A checkpoint's tensors into a module, one by one and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from runtime_py.errors import WorkError


def load_weights(module: nn.Module, names: Mapping[str, str], tensor: Callable[[str], Tensor]) -> None:
    """Give the parameters ``names`` (ours -> checkpoint's) of a module built on the meta device their values.

    Raises ``WorkError`` when a tensor's shape is not the one the configuration asks for.
    """
    expected = module.state_dict()
    state: dict[str, Tensor] = {}
    for ours, theirs in names.items():
        state[ours] = tensor(theirs)
        found, wanted = list(state[ours].shape), list(expected[ours].shape)
        if found != wanted:
            raise WorkError(
                f"The tensor {theirs} has the shape {found}; by the checkpoint's configuration it is {wanted}. "
                "Configuration and weights do not belong together: copy or download the checkpoint again."
            )
    module.load_state_dict(state, strict=False, assign=True)
