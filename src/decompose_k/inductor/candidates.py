"""The ways to compute a product that torch's custom-operator autotuning measures against each other.

Each is a function of the two operands alone, with a name of its own: torch 2.11 lets the call's arguments win over a
candidate's, and groups the winners of several ranges by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from decompose_k.arguments import Options
from decompose_k.device import Device
from decompose_k.dtypes import HALVES, accumulate_dtype
from decompose_k.epilogue import apply_activation
from decompose_k.execute import default_precision
from decompose_k.inductor.sizes import hint_of
from decompose_k.ops import operator_values
from decompose_k.plan import plan
from decompose_k.problem import Problem, accumulates_fp32_operand, layout_of

if TYPE_CHECKING:
    from decompose_k.config import Config

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

MOST_SPLITS = 6
MOST_CONFIGS = 4
# A shorter chunk leaves a batched product nothing to amortise; Inductor's own rule is the same.
LEAST_CHUNK = 128
# Larger buffers of partial products never won in a sweep.
MOST_WORKSPACE_BYTES = 8 << 20


def candidates(a: torch.Tensor, b: torch.Tensor, activation: str | None) -> list[Compute]:
    """What to measure for two operands, fake or real, of any sizes: never empty, and right for every M they may have.

    torch's own product; the product over chunks of K, summed in the accumulate dtype, for each number of chunks that
    divides K; this library's engine with the config it would choose when it runs; and, where all sizes are fixed, with
    the first few configs of its plan.
    """
    found = [_named("mm", functools.partial(_whole, activation))]
    found += [_named(f"split_{count}", functools.partial(_split, count, activation)) for count in splits_of(a, b)]
    found.append(_named("decompose_k", functools.partial(_engine, activation, None)))
    for index, config in enumerate(_configs(a, b, activation)):
        found.append(_named(f"decompose_k_{index}", functools.partial(_engine, activation, config)))
    return found


def splits_of(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """Numbers of chunks worth measuring: they divide a fixed K, leave chunks long enough and partials small enough.

    >>> splits_of(torch.empty(16, 8192, device="meta"), torch.empty(8192, 16, device="meta"))
    (2, 4, 8, 16, 32, 64)
    >>> splits_of(torch.empty(16, 8191, device="meta"), torch.empty(8191, 16, device="meta"))
    ()
    """
    k: Any = a.shape[1]
    m, n = hint_of(a.shape[0]), hint_of(b.shape[1])
    if not isinstance(k, int) or n is None:
        return ()
    bytes_a_split = accumulate_dtype(a.dtype, b.dtype).itemsize * max(m or 1, 1) * max(n, 1)
    most = min(k // LEAST_CHUNK, MOST_WORKSPACE_BYTES // bytes_a_split)
    found = [count for count in range(2, most + 1) if k % count == 0]
    # Powers of two keep chunks aligned.
    aligned = [count for count in found if count & (count - 1) == 0]
    others = [count for count in found if count & (count - 1) != 0]
    chosen = _spread(aligned, MOST_SPLITS)
    return tuple(sorted(chosen + _spread(others, MOST_SPLITS - len(chosen))))


def _spread(counts: list[int], most: int) -> list[int]:
    """At most so many of ascending counts, the first and the last among them."""
    if len(counts) <= most or most < 2:
        return counts[:most]
    return [counts[round(index * (len(counts) - 1) / (most - 1))] for index in range(most)]


def _named(name: str, compute: Any) -> Compute:
    def candidate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = compute(a, b)
        return result

    candidate.__name__ = candidate.__qualname__ = name
    return candidate


def _whole(activation: str | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return apply_activation(torch.mm(a, b), activation)


def _split(count: int, activation: str | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """activation(sum over s of a[:, s] @ b[s]), rounded once: compiled, a batched product and one kernel after it."""
    wide = accumulate_dtype(a.dtype, b.dtype)
    a_chunks = torch.unflatten(a, 1, (count, a.shape[1] // count)).transpose(0, 1)
    b_chunks = torch.unflatten(b, 0, (count, b.shape[0] // count))
    if a.is_cuda and a.dtype in HALVES:
        partials = torch.bmm(a_chunks, b_chunks, out_dtype=wide)
    else:
        partials = torch.bmm(a_chunks.to(wide), b_chunks.to(wide))
    return apply_activation(partials.sum(0), activation).to(a.dtype)


def _engine(activation: str | None, config: Config | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    options = Options(activation=activation, config=config)
    result: torch.Tensor = torch.ops.decompose_k.matmul(a, b, None, *operator_values(options))
    return result


def _configs(a: torch.Tensor, b: torch.Tensor, activation: str | None) -> tuple[Config, ...]:
    """The first configs of the plan, torch's own product left out; none where a size may still change."""
    sizes: tuple[Any, ...] = (*a.shape, b.shape[1])
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return ()
    problem = Problem(
        a.shape[0],
        b.shape[1],
        a.shape[1],
        a.dtype,
        b.dtype,
        a.dtype,
        a_layout=layout_of(a),
        b_layout=layout_of(b),
        activation=activation,
        precision=default_precision() if accumulates_fp32_operand(a.dtype, b.dtype) else None,
        device_type=a.device.type,
    )
    chosen = plan(problem, Device.of(a.device))
    configs = dict.fromkeys(config for config in (chosen.config, *chosen.alternatives) if config.kernel != "mm")
    return tuple(configs)[:MOST_CONFIGS]
