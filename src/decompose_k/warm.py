"""Compiling ahead: every kernel that a problem will need, before a server answers or a CUDA graph is captured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from decompose_k.accuracy import make_operands, own_product
from decompose_k.plan import Plan, plan
from decompose_k.problem import Problem, bucket_of
from decompose_k.tuner import place_of


def warmup(
    problem: Problem,
    *,
    m_values: Iterable[int] | None = None,
    device: torch.device | str | None = None,
) -> tuple[Plan, ...]:
    """Compile what `matmul` runs for a problem, for a range of M, by running it once for each kernel there is.

    Kernels are made for buckets of M, powers of two: for M from 1 to 512 there are ten, of two kernels at most. Where a
    is stored by columns, M is its stride, and a bucket needs up to three variants: M = 1, multiples of 16, and others.

    Args:
        problem: what will be computed; its m counts only where `m_values` is None.
        m_values: the M that will come, such as `range(1, 513)`.
        device: where; by default the current device of the problem's type.

    Returns:
        One plan for each M that was run.

    Raises:
        TypeError, ValueError: a wrong argument, or a problem that the device cannot compute.

    >>> plans = warmup(Problem.make(1, 4, 64, torch.float32, device_type="cpu"), m_values=range(1, 9))
    >>> [plan.problem.m for plan in plans]
    [1, 2, 4, 8]
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"problem must be a decompose_k.Problem; got {type(problem).__name__}")
    place = place_of([problem], device)
    chosen = [replace(problem, m=m) for m in _one_of_each_kind(_checked(problem, m_values), problem.a_layout)]
    plans = tuple(plan(one, place) for one in chosen)
    generator = torch.Generator(place).manual_seed(0)
    for one in chosen:
        own_product(one)(*make_operands(one, place, generator))
    return plans


def _one_of_each_kind(m_values: Iterable[int], a_layout: str) -> list[int]:
    """The largest M of each bucket, and where M is a stride also of each kind that code is made for."""
    kinds: dict[tuple[int, bool], int] = {}
    for m in sorted(m_values):
        kinds[bucket_of(m), a_layout == "column" and m % 16 == 0] = m
    return sorted(set(kinds.values()))


def _checked(problem: Problem, m_values: Any) -> list[int]:
    if m_values is None:
        return [problem.m]
    if not isinstance(m_values, Iterable):
        raise TypeError(f"m_values must be None or several integers; got {m_values!r}")
    found = list(m_values)
    for m in found:
        if not isinstance(m, int) or isinstance(m, bool):
            raise TypeError(f"m_values must hold integers; got {m!r}")
        if m < 0:
            raise ValueError(f"m_values must be >= 0; got {m}")
    if not found:
        raise ValueError("m_values must hold at least one M; got none")
    return found
