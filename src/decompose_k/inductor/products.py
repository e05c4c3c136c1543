"""Which nodes of a graph are matrix products, and of what."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from decompose_k.dtypes import FLOATS, HALVES, dtype_name
from decompose_k.inductor.nodes import (
    SHAPE_OPERATORS,
    aten,
    call,
    converted_dtype,
    evaluate,
    is_call,
    is_plain_factor,
    is_widening,
    replay,
    value_of,
)
from decompose_k.inductor.sizes import are_same, describe_shape, is_same

if TYPE_CHECKING:
    from torch.fx import Graph, Node

_PRODUCTS = (aten.mm.default, aten.mm.dtype)
_BIASED = (aten.addmm.default, aten.addmm.dtype)
_BATCHED = (aten.bmm.default, aten.baddbmm.default)


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix of the product: `source` behind `shape_calls`, in order, which have yet to be made where there are any.

    `value` is its fake tensor. An operand that the graph widens first is taken before that, by `conversion`: the sums
    keep its values.
    """

    source: Node
    value: torch.Tensor
    shape_calls: tuple[Node, ...] = ()
    conversion: Node | None = None

    def build(self, graph: Graph) -> Node:
        """The node of the matrix."""
        node = self.source
        for shape_call in self.shape_calls:
            node = replay(graph, shape_call, node)
        return node


@dataclass(frozen=True, slots=True)
class Product:
    """alpha * (a @ b) + beta * bias, as the result of `node`.

    `inner` are the nodes before it that compute nothing else. `is_sum` says that the compiler had written the product
    as a sum of products, over operands widened for that alone.
    """

    node: Node
    a: Operand
    b: Operand
    bias: Node | None = None
    alpha: float = 1.0
    beta: float = 1.0
    inner: tuple[Node, ...] = ()
    is_sum: bool = False

    @property
    def value(self) -> torch.Tensor:
        """The fake tensor of the result."""
        value = value_of(self.node)
        if value is None:
            raise ValueError(f"node must have a value; got {self.node}")
        return value

    @property
    def reads(self) -> tuple[Node, ...]:
        """The nodes that read the operands as the graph has them."""
        conversions = (operand.conversion for operand in (self.a, self.b))
        return (self.node, *self.inner, *(node for node in conversions if node is not None))

    @property
    def operator(self) -> str:
        """torch's name of the product."""
        return "mm" if self.is_sum else str(self.node.target).removeprefix("aten.").partition(".")[0]

    @property
    def operands(self) -> str:
        """Shapes and dtypes, as a report shows them."""
        a, b = self.a.value, self.b.value
        return f"{describe_shape(a.shape)} {_name(a.dtype)} @ {describe_shape(b.shape)} {_name(b.dtype)}"


def product_of(node: Node) -> Product | None:
    """The product that a node computes; None where it computes none, or torch says too little about it."""
    if is_call(node, *_PRODUCTS) and len(node.args) >= 2:
        return _make(node, node.args[0], node.args[1])
    if is_call(node, *_BIASED) and len(node.args) >= 3:
        return _make(node, node.args[1], node.args[2], bias=node.args[0])
    if is_call(node, aten.sum.dim_IntList):
        return _sum_of_products(node)
    return None


def is_batched_product(node: Node) -> bool:
    """Whether a node multiplies a batch of matrices, which is another problem."""
    return is_call(node, *_BATCHED)


def objection(product: Product) -> str | None:
    """Why a product cannot be rewritten to the same meaning; None where it can."""
    a, b, out = product.a.value, product.b.value, product.value
    if any(tensor.dtype not in FLOATS for tensor in (a, b, out)):
        return f"the operator fuses real floating products, and this one is {_name(a.dtype)} x {_name(b.dtype)}"
    if not is_plain_factor(product.alpha) or not is_plain_factor(product.beta):
        return f"alpha = {product.alpha} or beta = {product.beta} is 0, not finite or not constant"
    if product.bias is not None:
        bias = value_of(product.bias)
        if bias is None or bias.dtype not in FLOATS or bias.device != a.device:
            return "the bias is no real floating tensor on the operands' device"
    if len({a.device, b.device, out.device}) > 1 or any(tensor.layout != torch.strided for tensor in (a, b)):
        return "the operands are not dense tensors of one device"
    return None


def before_widening(product: Product) -> Product | None:
    """The product with an operand as it was before the graph widened it; None where it widened none.

    Of two widened operands one stays wide, so that the product remains one of the wide dtype. Where the compiler
    widened both for a sum of its own making, both are taken back.
    """
    a = _narrow_source(product.a)
    b = _narrow_source(product.b) if product.is_sum or a is None else None
    if a is None and b is None:
        return None
    return replace(product, a=a or product.a, b=b or product.b)


def _make(node: Node, a: Any, b: Any, bias: Any = None) -> Product | None:
    values = value_of(a), value_of(b), value_of(node)
    if any(value is None or value.dim() != 2 for value in values):
        return None
    factors = {name: _argument(node, name, 1.0) for name in ("alpha", "beta")}
    return Product(node, Operand(a, values[0]), Operand(b, values[1]), bias, **factors)  # type: ignore[arg-type]


def _argument(node: Node, name: str, default: Any) -> Any:
    """An argument by the name that the operator's schema gives it."""
    if name in node.kwargs:
        return node.kwargs[name]
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index(name) if name in names else len(node.args)
    return node.args[place] if place < len(node.args) else default


def _sum_of_products(node: Node) -> Product | None:
    """sum over K of a[:, :, None] * b[None]: how Inductor writes a product with one row or column when it tunes."""
    args: Any = node.args
    if len(args) != 2 or list(args[1]) != [1] or node.kwargs:
        return None
    multiply = args[0]
    if not is_call(multiply, aten.mul.Tensor) or len(multiply.users) != 1:
        return None
    left, right = multiply.args
    if not _is_unsqueeze(left, 2) or not _is_unsqueeze(right, 0):
        return None
    product = _make(node, left.args[0], right.args[0])
    if product is None or not are_same(product.value.shape, (product.a.value.shape[0], product.b.value.shape[1])):
        return None
    if not is_same(product.a.value.shape[1], product.b.value.shape[0]):
        return None
    return replace(product, inner=(multiply, left, right), is_sum=True)


def _is_unsqueeze(node: Any, dim: int) -> TypeGuard[Node]:
    if not is_call(node, aten.unsqueeze.default):
        return False
    source, place = node.args
    return value_of(source) is not None and place % node.meta["val"].dim() == dim


def _narrow_source(operand: Operand) -> Operand | None:
    """An operand before its conversion from a half dtype; None where there is none behind its changes of shape."""
    node: Any = operand.source
    shape_calls: list[Node] = []
    while is_call(node, *SHAPE_OPERATORS):
        shape_calls.append(node)
        node = node.args[0]
    if converted_dtype(node) != operand.value.dtype:
        return None
    source = node.args[0]
    value = value_of(source)
    if value is None or value.dtype not in HALVES or not is_widening(value.dtype, operand.value.dtype):
        return None
    shape_calls.reverse()
    try:
        for shape_call in shape_calls:
            value = evaluate(shape_call.target, (value, *torch.fx.map_arg(shape_call.args[1:], _value_or_none)))
    except (RuntimeError, ValueError, TypeError):
        # The conversion made a dense copy, and a view of the original does not exist.
        return None
    return Operand(source, value, tuple(shape_calls), node)


def _value_or_none(node: Node) -> Any:
    return node.meta.get("val")


def _name(dtype: torch.dtype) -> str:
    return dtype_name(dtype) if dtype in FLOATS else str(dtype).removeprefix("torch.")


def build_bias(graph: Graph, bias: Node, rows: Any, like: Node) -> Node:
    """A bias in the two dimensions of the product: its last one alone where all rows share it, else [M, N]."""
    value = bias.meta["val"]
    if value.dim() <= 2:
        return bias
    shape = (value.shape[-1],) if all(is_same(size, 1) for size in value.shape[:-1]) else (rows, value.shape[-1])
    return call(graph, like, aten.reshape.default, (bias, shape))
