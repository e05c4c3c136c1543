"""The graph pass: products that Decompose-K computes faster become one operator each, with what follows them.

It runs on the joint graph, before the compiler splits it into forward and backward and before its own passes: there
products are still `mm` and `addmm`, functional, with autocast's conversions written out, and the backward's products
are in sight too. In training an activation is fused where its derivative needs its result alone (relu, sigmoid, tanh);
the others need the value before it, which is then a second use.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from decompose_k import cache
from decompose_k._version import __version__
from decompose_k.dtypes import dtype_name
from decompose_k.inductor.decide import judge
from decompose_k.inductor.nodes import call, is_mutating, place_of, replay, strides_of
from decompose_k.inductor.products import (
    Product,
    before_widening,
    build_bias,
    is_batched_product,
    objection,
    product_of,
)
from decompose_k.inductor.report import Decision
from decompose_k.inductor.slots import SlotPass
from decompose_k.inductor.static import is_static, static_inputs
from decompose_k.inductor.tails import Tail, tails_of
from decompose_k.problem import accumulates_fp32_operand
from decompose_k.settings import default_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Graph, Node

# Whether a node may be computed again in the backward: what is said of the product counts, not of its tail.
_RECOMPUTE_KEYS = ("recompute", "ac_graph_id")


class DecomposeKPass(SlotPass):
    """Rewrites the products of a graph that Decompose-K computes faster, or with `everywhere` all that it can."""

    def __init__(self, where: str, *, static_weights: bool = False) -> None:
        super().__init__()
        self.where = where
        self.static_weights = static_weights

    def rewrite(self, graph: Graph) -> list[Decision]:
        """One operator for each product that pays."""
        return rewrite(graph, self.where, static_inputs(graph) if self.static_weights else frozenset())

    def key(self) -> str:
        """This package's code, the settings, the backend that `auto` stands for, and what is remembered."""
        settings = f"{self.where}-{self.static_weights}-{default_backend()}"
        return f"{__version__}-{fingerprint()}-{settings}-{cache.fingerprint()}"


def rewrite(graph: Graph, where: str, static: frozenset[Node] = frozenset()) -> list[Decision]:
    """Rewrite the products of a graph in place; the decisions, in the order of the products.

    `static` are inputs that nothing writes: a weight among them is loaded before earlier kernels have finished.
    """
    decisions = []
    erased: set[Node] = set()
    for node in list(graph.nodes):
        if node in erased:
            continue
        if is_batched_product(node):
            decisions.append(_left(node, "", "it is a batch of products"))
            continue
        product = product_of(node)
        if product is not None:
            decisions.append(_rewrite_product(graph, product, where, static, erased))
    return decisions


def _rewrite_product(
    graph: Graph, product: Product, where: str, static: frozenset[Node], erased: set[Node]
) -> Decision:
    obstacle = objection(product)
    if obstacle is not None:
        return _left(product.node, product.operands, obstacle, product.operator)
    reason = ""
    for candidate in (before_widening(product), product):
        if candidate is None:
            continue
        static_b = is_static(candidate.b, static)
        for tail in tails_of(candidate):
            if spans_a_write(candidate, tail):
                continue
            verdict = judge(candidate, tail, where, static_b=static_b)
            reason = reason or verdict.reason
            if verdict.rewrite and _replace(graph, candidate, tail, erased, static_b=static_b):
                return Decision(
                    candidate.operator,
                    candidate.operands,
                    place_of(product.node),
                    True,
                    verdict.reason,
                    tail.fused,
                    tail.ended,
                )
    return _left(
        product.node, product.operands, reason or "its place in the graph allows no rewriting", product.operator
    )


def _replace(graph: Graph, product: Product, tail: Tail, erased: set[Node], *, static_b: bool) -> bool:
    def make() -> Node:
        a, b = product.a.build(graph), product.b.build(graph)
        bias = None
        if tail.bias is not None:
            bias = build_bias(graph, tail.bias, product.value.shape[0], tail.last)
        # A sum of products is exact fp32, whatever torch's setting allows a product.
        is_exact = product.is_sum and accumulates_fp32_operand(product.a.value.dtype, product.b.value.dtype)
        options: tuple[Any, ...] = ("ieee",) if is_exact else ()
        if static_b:
            options = ("ieee" if is_exact else None, False, True)
        args = (a, b, bias, tail.alpha, tail.beta, tail.activation, dtype_name(tail.out_dtype), *options)
        return make_result(graph, product, tail, torch.ops.decompose_k.matmul.default, args)

    return put_in_place(graph, tail, make, erased)


def make_result(graph: Graph, product: Product, tail: Tail, target: Any, args: tuple[Any, ...]) -> Node:
    """The node of an operator that computes a product and its tail, [M, N] of the tail's dtype."""
    # The value is made here rather than by the operator, which would heed an autocast of the compiling thread.
    value = product.a.value.new_empty(tuple(product.value.shape), dtype=tail.out_dtype)
    result = call(graph, tail.last, target, args, value)
    for key in _RECOMPUTE_KEYS:
        if key in product.node.meta:
            result.meta[key] = product.node.meta[key]
    return result


def put_in_place(graph: Graph, tail: Tail, make: Callable[[], Node], erased: set[Node]) -> bool:
    """Put the node that `make` makes in the place of a product and its tail, seen through the tail's changes of shape.

    False where its strides would not be the graph's. What is superfluous then is erased and added to `erased`.
    """
    with graph.inserting_before(tail.last):
        made = [make()]
        for shape_call in tail.shape_calls:
            made.append(replay(graph, shape_call, made[-1]))
    if strides_of(made[-1].meta["val"]) != strides_of(tail.last.meta["val"]):
        for node in reversed(made):
            graph.erase_node(node)
        return False
    tail.last.replace_all_uses_with(made[-1])
    for node in reversed(tail.nodes):
        if not node.users:
            graph.erase_node(node)
            erased.add(node)
    return True


def spans_a_write(product: Product, tail: Tail) -> bool:
    """Whether memory is written after the graph reads an operand and before the operator would, at the tail's end."""
    return any(_writes_between(node, tail.last) for node in product.reads)


def _writes_between(node: Node, last: Node) -> bool:
    while node is not last:
        node = node.next
        if is_mutating(node):
            return True
    return False


def _left(node: Node, operands: str, reason: str, operator: str = "") -> Decision:
    name = operator or str(node.target).removeprefix("aten.").partition(".")[0]
    return Decision(name, operands, place_of(node), False, reason)


@functools.cache
def fingerprint() -> str:
    """A hash of this package's code and data, so that a graph cached by other code is never taken for one of this."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.json")]):
        if file.relative_to(folder).parts[0] != "bench":
            digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
