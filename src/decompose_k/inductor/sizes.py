"""What is known of a size that may be symbolic, without a guard: reading it must not narrow what the graph serves."""

from __future__ import annotations

import math
from typing import Any

from decompose_k.problem import bucket_of

# Beyond so many rows no bucket is asked about: a product that wins anywhere has won at fewer.
MOST_ROWS = 1 << 15


def hint_of(size: Any) -> int | None:
    """The size, or the one that the graph is being compiled with; None where it depends on data.

    >>> hint_of(7)
    7
    """
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return None if hint is None else int(hint)


def is_same(one: Any, other: Any) -> bool:
    """Whether two sizes are known to be equal for every call of the graph."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    if isinstance(one, int) or isinstance(other, int):
        return False
    return bool(one.node.expr == other.node.expr)


def are_same(some: Any, others: Any) -> bool:
    """Whether two shapes are known to be equal for every call of the graph."""
    return len(some) == len(others) and all(is_same(one, other) for one, other in zip(some, others, strict=True))


def bounds_of(size: Any) -> tuple[int, int]:
    """The least and the largest value that a size can have, the latter at most `MOST_ROWS`.

    >>> bounds_of(16)
    (16, 16)
    """
    if isinstance(size, int):
        return size, size
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    low = max(0, _finite(bounds.lower, 0))
    return low, max(low, min(MOST_ROWS, _finite(bounds.upper, MOST_ROWS)))


def buckets_of(size: Any) -> tuple[int, ...]:
    """The powers of two that stand for the values which a size can have, 0 left out.

    >>> buckets_of(48)
    (64,)
    """
    low, high = bounds_of(size)
    buckets = []
    bucket = bucket_of(max(low, 1))
    while bucket <= bucket_of(high):
        buckets.append(bucket)
        bucket *= 2
    return tuple(buckets)


def describe_shape(shape: Any) -> str:
    """A shape as text, its symbolic sizes by their expressions.

    >>> describe_shape((16, 7168))
    '[16, 7168]'
    """
    return "[" + ", ".join(str(size) if isinstance(size, int) else str(size.node.expr) for size in shape) + "]"


def _finite(bound: Any, otherwise: int) -> int:
    """A bound as an integer; torch writes an open one as an infinity of its own, or as a float."""
    try:
        value = float(bound)
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return int(value) if math.isfinite(value) else otherwise
