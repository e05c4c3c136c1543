"""Kernels with known faults, to see that the harness finds them."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from targets import Target


@triton.jit
def sum_kernel(x, out, BLOCK: tl.constexpr):
    values = tl.load(x + tl.arange(0, BLOCK))
    tl.store(out, tl.sum(values, 0))


@triton.jit
def dot_kernel(a, b, out, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    offsets = index[:, None] * BLOCK + index[None, :]
    tl.store(out + offsets, tl.dot(tl.load(a + offsets), tl.load(b + offsets)))


def _tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_sum(target: object, grid: int = 1) -> None:
    sum_kernel[(1, grid)](_tensor(1024), _tensor(1), BLOCK=1024)


def launch_spilling(target: Target) -> None:
    """More accumulators in one warp than it has registers."""
    operand = _tensor(128, 128, dtype=torch.float32 if target.backend == "hip" else torch.bfloat16)
    dot_kernel[(1,)](operand, operand, _tensor(128, 128), BLOCK=128, num_warps=1)


def launch_unknown_option(target: object) -> None:
    sum_kernel[(1,)](_tensor(1024), _tensor(1), BLOCK=1024, no_such_option=1)


def abort(target: object) -> None:
    """What LLVM does to an instruction that it cannot select."""
    os.abort()
