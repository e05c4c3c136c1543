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
from torch._inductor.custom_graph_pass import CustomGraphPass

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
from decompose_k.inductor.tails import Tail, tails_of
from decompose_k.settings import default_backend

if TYPE_CHECKING:
    from torch.fx import Graph, Node

# Whether a node may be computed again in the backward: what is said of the product counts, not of its tail.
_RECOMPUTE_KEYS = ("recompute", "ac_graph_id")


class DecomposeKPass(CustomGraphPass):
    """Rewrites the products of a graph, after the passes that were in its place before it.

    `decisions` grows by one entry for each product seen. `previous` is what torch's config slot held before: nothing,
    another library's pass, or a sequence of them.
    """

    def __init__(self, where: str, previous: Any) -> None:
        self.where = where
        self.previous = previous
        self.is_active = True
        self.decisions: list[Decision] = []

    def __call__(self, graph: Graph) -> None:
        """Run the earlier passes, then rewrite what pays."""
        for earlier in passes_in(self.previous):
            earlier(graph)
        if self.is_active:
            self.decisions += rewrite(graph, self.where)

    def uuid(self) -> Any:
        """What torch keys its caches of compiled graphs by; None, which turns them off, where an earlier pass has none.

        It changes with this package's code, the settings and the backend that `auto` stands for.
        """
        earlier = [_uuid_of(entry) for entry in passes_in(self.previous)]
        if any(not uuid for uuid in earlier):
            return None
        own = f"{__version__}-{fingerprint()}-{self.where}-{default_backend()}" if self.is_active else "off"
        return ("decompose_k", own, *earlier)


def passes_in(slot: Any) -> tuple[Any, ...]:
    """The passes that a config slot holds: none, one, or, in newer torch, several."""
    if slot is None:
        return ()
    return tuple(slot) if isinstance(slot, (list, tuple)) else (slot,)


def rewrite(graph: Graph, where: str) -> list[Decision]:
    """Rewrite the products of a graph in place; the decisions, in the order of the products."""
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
            decisions.append(_rewrite_product(graph, product, where, erased))
    return decisions


def _rewrite_product(graph: Graph, product: Product, where: str, erased: set[Node]) -> Decision:
    obstacle = objection(product)
    if obstacle is not None:
        return _left(product.node, product.operands, obstacle, product.operator)
    reason = ""
    for candidate in (before_widening(product), product):
        if candidate is None:
            continue
        for tail in tails_of(candidate):
            if _spans_a_write(candidate, tail):
                continue
            verdict = judge(candidate, tail, where)
            reason = reason or verdict.reason
            if verdict.rewrite and _replace(graph, candidate, tail, erased):
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


def _replace(graph: Graph, product: Product, tail: Tail, erased: set[Node]) -> bool:
    """Put one operator in the place of a product and its tail; False where its strides would not be the graph's."""
    with graph.inserting_before(tail.last):
        a, b = product.a.build(graph), product.b.build(graph)
        bias = None
        if tail.bias is not None:
            bias = build_bias(graph, tail.bias, product.value.shape[0], tail.last)
        m, n = product.value.shape
        args = (a, b, bias, tail.alpha, tail.beta, tail.activation, dtype_name(tail.out_dtype))
        # The value is made here rather than by the operator, which would heed an autocast of the compiling thread.
        value = product.a.value.new_empty((m, n), dtype=tail.out_dtype)
        result = call(graph, tail.last, torch.ops.decompose_k.matmul.default, args, value)
        for key in _RECOMPUTE_KEYS:
            if key in product.node.meta:
                result.meta[key] = product.node.meta[key]
        made = [result]
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


def _spans_a_write(product: Product, tail: Tail) -> bool:
    """Whether memory is written between the product and the end of its tail, where the operator will read instead."""
    node = product.node
    while node is not tail.last:
        node = node.next
        if is_mutating(node):
            return True
    return False


def _left(node: Node, operands: str, reason: str, operator: str = "") -> Decision:
    name = operator or str(node.target).removeprefix("aten.").partition(".")[0]
    return Decision(name, operands, place_of(node), False, reason)


def _uuid_of(entry: Any) -> Any:
    return entry.uuid() if isinstance(entry, CustomGraphPass) else None


@functools.cache
def fingerprint() -> str:
    """A hash of this package's Python code, so that a graph cached by other code is never taken for one of this."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        if file.relative_to(folder).parts[0] != "bench":
            digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
