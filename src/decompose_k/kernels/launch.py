"""Programmatic dependent launch and L2 prefetch, the two ways in which a kernel starts before its turn.

A kernel launched with PDL may start while its predecessor in the stream still runs. `gdc_wait` returns once every
earlier kernel has finished and its writes are visible; nothing that a predecessor may write is loaded before it. An L2
prefetch is the exception that is always safe: it moves lines to where the device keeps its memory coherent and returns
no value, so a later store by the predecessor updates the very line that was fetched. Measured on an H200: dependent
launch makes the pair of kernels 1.24 to 1.4x faster, prefetching the activations before the wait another 1.05 to 1.25x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decompose_k.problem import bucket_of

PLAIN: tl.constexpr = tl.constexpr(0)
WAIT_FIRST: tl.constexpr = tl.constexpr(1)
STATIC_B: tl.constexpr = tl.constexpr(2)

LAUNCH_CODES = {"plain": 0, "wait_first": 1, "static_b": 2}


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch, spelled out: the pointer arguments, the plain ones after them, the compile-time ones."""

    kernel: Any
    grid: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    scalars: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> Any:
        """Launch through Triton, which compiles where it must; returns the compiled kernel (None when interpreted)."""
        return self.kernel[self.grid](*self.tensors, *self.scalars, **self.constants, **self.options)

    @property
    def trailing(self) -> tuple[Any, ...]:
        """All arguments after the pointers, in the order in which a compiled kernel takes them."""
        names = self.kernel.arg_names[len(self.tensors) + len(self.scalars) :]
        return (*self.scalars, *(self.constants[name] for name in names))


def launch_options(launch: str) -> dict[str, bool]:
    """Keyword arguments of a kernel launch: empty for `plain`, since only NVIDIA's backend knows the option."""
    return {} if launch == "plain" else {"launch_pdl": True}


def needs_wide_offsets(*tensors: torch.Tensor, workspace: tuple[int, int, int] = (0, 0, 0)) -> bool:
    """Whether an offset into one of the tensors, masked lanes included, or into partials [S, M, N], can pass 2^31.

    Sizes count rounded up to a power of two: a kernel compiled for one M then serves every M of its bucket.
    """
    # A tile may start up to a block before the end, so its masked lanes reach beyond the last element.
    slack = 512
    spans = (sum((bucket_of(size) + slack) * stride for size, stride in _axes(tensor)) for tensor in tensors)
    splits, m, n = workspace
    return max(*spans, (splits + 1) * (bucket_of(m) + slack) * n) >= 2**31


def _axes(tensor: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip(tensor.shape, tensor.stride(), strict=True))


@triton.jit
def let_dependents_start(LAUNCH: tl.constexpr):
    """Allow the successor's programs onto the multiprocessors; it still waits for this kernel before it reads."""
    if LAUNCH != PLAIN:
        gdc_launch_dependents()


@triton.jit
def wait_for_predecessor(LAUNCH: tl.constexpr):
    """Block until all earlier kernels have finished and their writes are visible."""
    if LAUNCH != PLAIN:
        gdc_wait()


@triton.jit
def prefetch_l2(pointers):
    """Fetch the lines behind `pointers` into L2. The fetch is of 64 bytes, so pointers are spaced by that much."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )
