"""Reading and rebuilding nodes of a compiler's graph, in the few forms that the pass knows."""

from __future__ import annotations

import contextlib
import math
import re
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from decompose_k.dtypes import FLOATS

if TYPE_CHECKING:
    from torch.fx import Graph, Node

aten: Any = torch.ops.aten
prims: Any = torch.ops.prims

# They give every element a new place and no new value, so that elementwise work may come before them instead.
SHAPE_OPERATORS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.alias.default,
        aten.detach.default,
    }
)
# Of these the last dimension may still be the product's columns afterwards.
ROW_OPERATORS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.alias.default,
        aten.detach.default,
    }
)


def value_of(node: Any) -> torch.Tensor | None:
    """The fake tensor that stands for a node's result; None for anything else."""
    value = getattr(node, "meta", {}).get("val")
    return value if isinstance(value, torch.Tensor) else None


def is_node(thing: Any) -> TypeGuard[Node]:
    """Whether an argument is a node rather than a constant."""
    return isinstance(thing, torch.fx.Node)


def is_number(thing: Any) -> bool:
    """Whether an argument is a constant real number."""
    return isinstance(thing, (int, float)) and not isinstance(thing, bool)


def is_plain_factor(thing: Any) -> bool:
    """Whether a constant can scale fp32 sums and be divided by: finite, not 0, and neither is its reciprocal."""
    return is_number(thing) and 1e-30 < abs(thing) < 1e30 and math.isfinite(thing)


def is_call(node: Any, *targets: Any) -> TypeGuard[Node]:
    """Whether a node calls one of the operators."""
    return is_node(node) and node.op == "call_function" and node.target in targets


def converted_dtype(node: Any) -> torch.dtype | None:
    """The dtype that a node converts its first argument to, if it does nothing else."""
    if is_call(node, prims.convert_element_type.default):
        dtype = node.args[1]
    elif is_call(node, aten._to_copy.default) and set(node.kwargs) == {"dtype"}:
        dtype = node.kwargs["dtype"]
    else:
        return None
    return dtype if isinstance(dtype, torch.dtype) else None


def is_widening(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether a conversion of real floats keeps every value.

    >>> is_widening(torch.bfloat16, torch.float32), is_widening(torch.bfloat16, torch.float16)
    (True, False)
    """
    return narrow in FLOATS and wide in FLOATS and torch.promote_types(narrow, wide) == wide


def is_mutating(node: Node) -> bool:
    """Whether a node writes to memory that others read."""
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    return bool(schema.is_mutable) if schema is not None else "mutation" in str(node.target)


def strides_of(tensor: torch.Tensor) -> tuple[int | None, ...]:
    """Strides by their hints, which asks the compiler for no guard."""
    from decompose_k.inductor.sizes import hint_of

    return tuple(hint_of(stride) for stride in tensor.stride())


def place_of(node: Node) -> str:
    """`file.py:12` of the model's line that a node comes from; empty where the compiler does not say."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', str(node.meta.get("stack_trace") or ""))
    return f"{frames[-1][0].rsplit('/', 1)[-1]}:{frames[-1][1]}" if frames else ""


def call(graph: Graph, like: Node, target: Any, args: tuple[Any, ...], value: Any = None) -> Node:
    """A new node with the description of `like`; its value is computed from its arguments' unless it is given."""
    node = graph.call_function(target, args)
    kept = {name: entry for name, entry in like.meta.items() if name not in ("val", "tensor_meta")}
    node.meta.update(kept)
    node.meta["val"] = _compute(target, args) if value is None else value
    return node


def replay(graph: Graph, shape_call: Node, source: Node) -> Node:
    """The same change of shape of another node."""
    return call(graph, shape_call, shape_call.target, (source, *shape_call.args[1:]))


def _compute(target: Any, args: tuple[Any, ...]) -> Any:
    values = torch.fx.map_arg(args, lambda node: node.meta["val"])
    return evaluate(target, values)


def evaluate(target: Any, values: Any) -> Any:
    """An operator's result for fake tensors, in the fake mode of the first."""
    mode = getattr(values[0], "fake_mode", None)
    with contextlib.nullcontext() if mode is None else mode:
        return target(*values)
