"""What a lowered program does outside its delegates, and that no method copies a cache inside or outside of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from runtime_py.errors import WorkError

# Decode and query may read a cache in a product only; prefill rebuilds its caches by design.
READ_ONLY_METHODS = ("query", "decode")
_PRODUCTS = ("bmm", "matmul")


def operators_outside(module: GraphModule) -> dict[str, int]:
    """Operators left to portable kernels with their counts, and ``delegate``, the number of XNNPACK calls."""
    counts: Counter[str] = Counter()
    for node in module.graph.nodes:
        if node.op == "call_function":
            name = _name(node)
            if name == "executorch_call_delegate":
                counts["delegate"] += 1
            elif name != "getitem":
                counts[name] += 1
    return dict(sorted(counts.items()))


def check_no_cache_copy(module: GraphModule, method: str) -> None:
    """Refuse a query or decode method in which an operator other than a product takes a cache.

    Caches are the inputs ``k``, ``v``, ``tail_k`` and ``tail_v``. Raises ``WorkError`` naming the operator.
    """
    if method not in READ_ONLY_METHODS:
        return
    for consumer in cache_consumers(module):
        raise WorkError(
            f"The method {method!r} copies a cache: {_name(consumer)} reads {consumer.args}. This is a lowering fault."
        )


def cache_consumers(module: GraphModule) -> Iterator[Node]:
    """Every operator that takes a whole cache and is no product, in the graph and in its delegates."""
    caches = {node for node in module.graph.nodes if node.op == "placeholder" and _is_cache(node)}
    yield from _consumers(module, caches)


def _is_cache(node: Node) -> bool:
    name = node.name.rsplit("_", 1)[0]
    return name in ("k", "v", "tail_k", "tail_v")


def _consumers(module: GraphModule, caches: set[Node]) -> Iterator[Node]:
    for node in module.graph.nodes:
        if node.op != "call_function" or not caches & set(node.all_input_nodes):
            continue
        name = _name(node)
        if name == "executorch_call_delegate":
            lowered = getattr(module, str(node.args[0].target))
            inner = lowered.original_module.graph_module
            inputs = [n for n in inner.graph.nodes if n.op == "placeholder"]
            # Constants of the delegate come first among its placeholders; the call's arguments fill the last ones.
            given = node.args[1:]
            yield from _consumers(inner, {i for i, g in zip(inputs[-len(given) :], given, strict=True) if g in caches})
        elif not any(product in name for product in _PRODUCTS):
            yield node


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))
