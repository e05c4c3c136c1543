"""Modelled time of torch's own product: microseconds on an H200, an order elsewhere."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from decompose_k.legality import is_long

if TYPE_CHECKING:
    from decompose_k.device import Device
    from decompose_k.problem import Problem

# Elements of a row that torch's kernels for halves load at once; rows that are no multiple take them four times as long
# and more: 2 x 13 x 20569856 takes 1.6 ms, and its bytes 0.13 ms.
_VECTOR = 8


def predict_torch(problem: Problem, device: Device) -> float:
    """torch.mm on an H200, of halves within 9 % for five of six: to begin with, bytes, arithmetic, the length of K."""
    unique, multiplies = device.microseconds_to_move(problem.bytes), problem.m * problem.n * problem.k
    octaves = math.log2(max(1, problem.k) / 1024)
    length = max(0.0, octaves)
    activation = 0.8 if problem.activation else 0.0
    # Of a long K, a narrow result takes as long as one of 16: 8 x 8 x 8000000 in fp64 0.43 ms, its bytes 0.21 ms.
    padding = max(1.0, 16 / min(problem.m, problem.n)) if is_long(problem) and _is_matrix(problem) else 1.0
    if problem.accumulate_dtype == torch.float64:
        # By hand: 16 x 16 x 16384 takes 10.7 us, 16 x 256 x 7168 14.7 and 64 x 64 x 16384 13.6.
        return 4.8 + 1.2 * length + max(1.1 * padding * unique, multiplies / 30e6) + activation
    if problem.precision in (None, "tf32") and is_long(problem):
        # By hand: 16 x 16 x 2^20 takes 29 us with both operands row-major and 35 with a transposed, 64 x 64 x 2^20 70.
        ragged = 4.0 if _is_matrix(problem) and _is_ragged(problem) else 1.0
        return 12.0 + max(1.05 * ragged * unique, multiplies / 500e6) + 1.6 * activation
    if problem.precision in (None, "tf32"):
        beyond = max(0.0, length - 3)
        tall = max(0, max(problem.m, problem.n) - 256) * problem.k * 1e-6
        # By hand: 1024 x 64 x K takes 3.7, 4.5 and 5.9 us with K of 512, 1024 and 2048.
        short = max(0.0, 1.0 - octaves)
        steps = 0.73 * max(1.0, length) - 0.46 * beyond - 1.25 * min(2.5, short)
        # By hand: 1024 x 16 x 28672, 60 MB, takes 19.6 us.
        memory = 0.43 * unique + 0.04 * max(0.0, problem.bytes * 1e-6 - 40.0)
        return 5.06 + memory + multiplies / 630e6 + steps + 0.18 * tall + 1.6 * activation
    product = 4.5 + max(2.6 * padding * unique, multiplies / 25e6) + 1.9 * length
    if is_long(problem) and not _is_matrix(problem):
        # By hand: 1 x 16 x 2^20 takes 26 us.
        product = 12.0 + unique
    # Operands of two dtypes are converted first.
    return product * (1.0 if problem.a_dtype == problem.b_dtype else 1.7) + activation


def _is_matrix(problem: Problem) -> bool:
    return min(problem.m, problem.n) > 1


def _is_ragged(problem: Problem) -> bool:
    a_row = problem.k if problem.a_layout == "row" else problem.m
    b_row = problem.n if problem.b_layout == "row" else problem.k
    return bool(a_row % _VECTOR or b_row % _VECTOR)
