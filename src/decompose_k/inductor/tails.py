"""What follows a product and can be part of it: bias, scale, activation and conversion, through changes of shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from decompose_k.dtypes import FLOATS, accumulate_dtype, dtype_name
from decompose_k.inductor.activations import match_activation
from decompose_k.inductor.nodes import (
    ROW_OPERATORS,
    SHAPE_OPERATORS,
    aten,
    converted_dtype,
    is_call,
    is_node,
    is_number,
    is_plain_factor,
    is_widening,
    value_of,
)
from decompose_k.inductor.sizes import are_same, is_same

if TYPE_CHECKING:
    from torch.fx import Node

    from decompose_k.inductor.products import Product

_ADDITIONS = (aten.add.Tensor, aten.sub.Tensor)
_MULTIPLICATIONS = (aten.mul.Tensor, aten.mul.Scalar)
_DIVISIONS = (aten.div.Tensor, aten.div.Scalar)


@dataclass(frozen=True, slots=True)
class Tail:
    """A product and as much of what follows as one operator can do.

    out = activation(alpha * (a @ b) + beta * bias), converted to `out_dtype` and seen through `shape_calls`, is the
    value of `last`. `nodes` are all that becomes superfluous, in order. `has_columns` says that the last dimension of
    `last` is still the product's columns; `is_final` that a conversion ended it. `ended` is
    what stopped the walk after the longest tail.
    """

    last: Node
    nodes: tuple[Node, ...]
    bias: Node | None
    alpha: float
    beta: float
    out_dtype: torch.dtype
    activation: str | None = None
    shape_calls: tuple[Node, ...] = ()
    has_columns: bool = True
    is_final: bool = False
    fused: tuple[str, ...] = ()
    ended: str = ""


def tails_of(product: Product) -> list[Tail]:
    """Every tail that keeps the product's meaning, longest first; the last one is the product alone.

    Roundings between the product and the end of the tail are left out, which only adds accuracy. A conversion to fewer
    bits that the model asks for ends the tail, except directly after the product and to the operands' own dtype: that
    is the rounding torch's own product makes.
    """
    tail = Tail(
        last=product.node,
        nodes=(*product.inner, product.node),
        bias=product.bias,
        alpha=float(product.alpha),
        beta=float(product.beta),
        out_dtype=product.value.dtype,
        fused=("bias",) if product.bias is not None and not product.is_sum else (),
    )
    found = [tail]
    while True:
        longer = _extend(product, tail)
        if isinstance(longer, str):
            break
        tail = longer
        # A tail that ends in a change of shape does no more than the one before it.
        if tail.fused != found[-1].fused:
            found.append(tail)
    return [replace(tail, ended=longer) for tail in reversed(found)]


def _extend(product: Product, tail: Tail) -> Tail | str:
    """The tail with what follows it, or why it ends here."""
    if tail.is_final:
        return f"the result is converted to {dtype_name(tail.out_dtype)}"
    if tail.activation is None:
        matched = match_activation(tail.last, tail.out_dtype)
        if matched is not None and _is_on_its_side(product, matched[1][-1]):
            return _with_activation(product, tail, *matched)
    users = list(tail.last.users)
    if len(users) != 1:
        return f"{tail.last.name} is used {len(users)} times"
    (user,) = users
    if user.op != "call_function":
        return "it is a result of the graph"
    if not _is_on_its_side(product, user):
        return "only the backward goes on from here"
    for step in (_with_shape, _with_conversion, _with_scale, _with_bias):
        longer = step(product, tail, user)
        if longer is not None:
            return longer
    return f"{user.target} follows"


def _with_activation(product: Product, tail: Tail, activation: str, nodes: tuple[Node, ...]) -> Tail | str:
    value = value_of(nodes[-1])
    if value is None or not _keeps_bits(product, value.dtype):
        return f"{activation} is computed in another dtype than the sums"
    return replace(
        tail,
        last=nodes[-1],
        nodes=(*tail.nodes, *nodes),
        activation=activation,
        out_dtype=value.dtype,
        is_final=not is_widening(tail.out_dtype, value.dtype),
        fused=(*tail.fused, activation),
    )


def _with_shape(product: Product, tail: Tail, user: Node) -> Tail | None:
    value = value_of(user)
    if not is_call(user, *SHAPE_OPERATORS) or user.args[0] is not tail.last or user.kwargs or value is None:
        return None
    columns = product.value.shape[1]
    return replace(
        tail,
        last=user,
        nodes=(*tail.nodes, user),
        shape_calls=(*tail.shape_calls, user),
        has_columns=tail.has_columns
        and is_call(user, *ROW_OPERATORS)
        and value.dim() > 0
        and is_same(value.shape[-1], columns),
    )


def _with_conversion(product: Product, tail: Tail, user: Node) -> Tail | str | None:
    dtype = converted_dtype(user)
    if dtype is None or user.args[0] is not tail.last:
        return None
    if dtype not in FLOATS:
        return f"the result is converted to {str(dtype).removeprefix('torch.')}"
    is_own_rounding = not _is_started(product, tail) and dtype == _own_dtype(product)
    is_final = not is_own_rounding and not (is_widening(tail.out_dtype, dtype) and _keeps_bits(product, dtype))
    return replace(
        tail,
        last=user,
        nodes=(*tail.nodes, user),
        out_dtype=dtype,
        is_final=is_final,
        fused=(*tail.fused, f"to {dtype_name(dtype)}"),
    )


def _with_scale(product: Product, tail: Tail, user: Node) -> Tail | str | None:  # noqa: ARG001 - like the other steps
    factor = _factor(user, tail.last)
    if factor is None:
        return None
    if tail.activation is not None:
        return "the activated result is scaled"
    alpha, beta = tail.alpha * factor, tail.beta * (factor if tail.bias is not None else 1.0)
    if not is_plain_factor(factor) or not is_plain_factor(alpha) or not is_plain_factor(beta):
        return f"the factor {factor} is 0, not finite or extreme"
    value = value_of(user)
    if value is None or value.dtype != tail.out_dtype:
        return "the factor changes the dtype"
    return replace(
        tail, last=user, nodes=(*tail.nodes, user), alpha=alpha, beta=beta, fused=(*tail.fused, f"scale {factor:g}")
    )


def _factor(user: Node, source: Node) -> float | None:
    """The constant that a node multiplies `source` by; None where it does something else."""
    if is_call(user, aten.neg.default) and user.args[0] is source:
        return -1.0
    if len(user.args) != 2 or user.kwargs:
        return None
    left, right = user.args
    if is_call(user, *_DIVISIONS):
        if left is not source or not is_number(right):
            return None
        return 1.0 / float(right) if is_plain_factor(right) else float("inf")  # type: ignore[arg-type]
    if not is_call(user, *_MULTIPLICATIONS):
        return None
    if right is source:
        left, right = right, left
    return float(right) if left is source and is_number(right) else None  # type: ignore[arg-type]


def _with_bias(product: Product, tail: Tail, user: Node) -> Tail | str | None:
    if not is_call(user, *_ADDITIONS) or len(user.args) != 2:
        return None
    scale = user.kwargs.get("alpha", 1)
    left, right = user.args
    bias = right if left is tail.last else left
    obstacle = _bias_obstacle(product, tail, user, bias)
    if obstacle is not None:
        return obstacle
    if not is_plain_factor(scale):
        return f"{user.target} has alpha = {scale}"
    sign = -1.0 if is_call(user, aten.sub.Tensor) else 1.0
    # left + sign * scale * right
    ours, theirs = (1.0, sign * float(scale)) if left is tail.last else (sign * float(scale), 1.0)  # type: ignore[arg-type]
    if not is_plain_factor(tail.alpha * ours):
        return f"{user.target} has alpha = {scale}"
    return replace(
        tail,
        last=user,
        nodes=(*tail.nodes, user),
        bias=bias,  # type: ignore[arg-type]
        alpha=tail.alpha * ours,
        beta=theirs,
        out_dtype=user.meta["val"].dtype,
        fused=(*tail.fused, "bias"),
    )


def _bias_obstacle(product: Product, tail: Tail, user: Node, bias: Any) -> str | None:
    if tail.activation is not None:
        return "something is added to the activated result"
    if tail.bias is not None:
        return "something is added to the biased result"
    value, result, before = value_of(bias), value_of(user), value_of(tail.last)
    if not is_node(bias) or bias is tail.last or value is None or result is None or before is None:
        return "a constant, or the result itself, is added"
    if value.dtype not in FLOATS or value.device != before.device:
        return "what is added is no real floating tensor on the same device"
    if not is_widening(tail.out_dtype, result.dtype) or not _keeps_bits(product, result.dtype):
        return f"the sum is taken in {dtype_name(result.dtype)}"
    if not tail.has_columns or not are_same(result.shape, before.shape):
        return "what is added has another shape"
    if value.dim() > 2 and not _has_rows(value, before):
        return "what is added is shared by some of the rows alone"
    if value.dim() == 2 and before.dim() > 2 and not is_same(value.shape[0], 1):
        return "what is added is shared by some of the rows alone"
    return None


def _has_rows(bias: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether a bias is one row, or as many rows as the result has."""
    return all(is_same(size, 1) for size in bias.shape[:-1]) or are_same(bias.shape, result.shape)


def _is_started(product: Product, tail: Tail) -> bool:
    """Whether anything but changes of shape has been added to the product."""
    return tail.activation is not None or tail.bias is not None or tail.alpha != product.alpha


def _is_on_its_side(product: Product, node: Node) -> bool:
    """Whether a node is in the forward like the product, or in the backward like it.

    Fused across, the operator would move to the backward, which would have to keep its operands instead of its result.
    """
    return bool(node.meta.get("partitioner_tag") == product.node.meta.get("partitioner_tag"))


def _own_dtype(product: Product) -> torch.dtype:
    return torch.promote_types(product.a.value.dtype, product.b.value.dtype)


def _keeps_bits(product: Product, dtype: torch.dtype) -> bool:
    """Whether values of `dtype` are no wider than the sums, so that the epilogue loses nothing in theirs."""
    sums = accumulate_dtype(product.a.value.dtype, product.b.value.dtype)
    return dtype in FLOATS and is_widening(dtype, sums)
