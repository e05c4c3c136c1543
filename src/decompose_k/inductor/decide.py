"""Which of a product's tails to rewrite: what `plan` says of the sizes that the graph will serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from decompose_k.device import Device
from decompose_k.execute import default_precision
from decompose_k.inductor.nodes import strides_of, value_of
from decompose_k.inductor.sizes import buckets_of, hint_of
from decompose_k.plan import plan
from decompose_k.problem import Problem, accumulates_fp32_operand

if TYPE_CHECKING:
    from decompose_k.inductor.products import Product
    from decompose_k.inductor.tails import Tail

WINS = "wins"
EVERYWHERE = "everywhere"
WHERE = (WINS, EVERYWHERE)


class Verdict(NamedTuple):
    """Whether to rewrite a product with a tail, and one sentence of why."""

    rewrite: bool
    reason: str


def judge(product: Product, tail: Tail, where: str, *, static_b: bool = False) -> Verdict:
    """Whether one operator for the product and its tail pays.

    With one M, `plan` decides. With a dynamic M the operator chooses again at each call and takes torch's own kernel
    where that is faster. It is then worth having if `plan` prefers Decompose-K at the M being compiled for; or, where
    that M is unknown or too large, at any other M the graph may see, as long as torch's own kernel could take the
    whole tail along, so that a large M costs nothing.
    """
    sizes = product.a.value.shape[0], product.b.value.shape[1], product.a.value.shape[1]
    if any(size == 0 for size in sizes if isinstance(size, int)):
        return Verdict(False, "there is nothing to multiply")
    if where == EVERYWHERE:
        return Verdict(True, "it was asked for everywhere")
    m, n, k = (hint_of(size) for size in sizes)
    if n is None or k is None:
        return Verdict(False, "N or K depends on data, so that no plan can be made")
    if m is not None:
        wins, reason = _ask(product, tail, m, n, k, static_b)
        if wins or isinstance(sizes[0], int):
            return Verdict(wins, reason)
    else:
        reason = "M depends on data"
    return _judge_other_sizes(product, tail, buckets_of(sizes[0]), n, k, static_b, reason)


def _judge_other_sizes(
    product: Product, tail: Tail, buckets: tuple[int, ...], n: int, k: int, static_b: bool, reason: str
) -> Verdict:
    winning = [bucket for bucket in buckets if _ask(product, tail, bucket, n, k, static_b)[0]]
    if not winning:
        return Verdict(False, reason)
    span = f"M up to {max(winning)}" if len(winning) > 1 else f"M about {winning[0]}"
    if len(winning) < len(buckets) and not _is_free(product, tail):
        return Verdict(False, f"it would win for {span}, but torch's own kernel cannot take the tail along elsewhere")
    return Verdict(True, f"M is dynamic, and Decompose-K is expected to win for {span}")


def _ask(product: Product, tail: Tail, m: int, n: int, k: int, static_b: bool) -> tuple[bool, str]:
    problem = problem_of(product, tail, m, n, k, static_b=static_b)
    try:
        chosen = plan(problem, Device.of(product.a.value.device))
    except ValueError as error:
        # A backend that the environment asks for and this problem does not have.
        return False, str(error)
    return chosen.config.kernel != "mm", chosen.reason


def problem_of(product: Product, tail: Tail, m: int, n: int, k: int, *, static_b: bool = False) -> Problem:
    """The problem that the operator will run for these sizes."""
    a, b = product.a.value, product.b.value
    bias = None if tail.bias is None else value_of(tail.bias)
    return Problem(
        m,
        n,
        k,
        a.dtype,
        b.dtype,
        tail.out_dtype,
        bias_dtype=None if bias is None else bias.dtype,
        a_layout=_layout(a),
        b_layout=_layout(b),
        activation=tail.activation,
        precision=default_precision() if accumulates_fp32_operand(a.dtype, b.dtype) else None,
        static_b=static_b,
        device_type=a.device.type,
    )


def _layout(matrix: torch.Tensor) -> str:
    """As `problem.layout_of`, by the hints of symbolic sizes alone."""
    rows, columns = (hint_of(size) for size in matrix.shape)
    down, across = strides_of(matrix)
    if columns in (0, 1) or across == 1:
        return "row"
    if rows in (0, 1) or down == 1:
        return "column"
    return "strided"


def _is_free(product: Product, tail: Tail) -> bool:
    """Whether torch's own kernel computes the tail with at most an in-place ReLU after it."""
    a, b = product.a.value, product.b.value
    if not a.dtype == b.dtype == tail.out_dtype or tail.activation not in (None, "relu"):
        return False
    if tail.bias is None:
        return tail.alpha == 1
    return a.is_cuda and _dtype(tail.bias) == a.dtype


def _dtype(node: Any) -> torch.dtype | None:
    value = value_of(node)
    return None if value is None else value.dtype
