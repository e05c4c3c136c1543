"""A kernel that lets its successor start at once and stores only much later: what an early read cannot survive."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

BLOCK = 4096
# Each pause is a sleep of about 2 us for every one of a thread's 32 elements.
PAUSES = 2


@triton.jit
def late_store_kernel(target, value, size, pauses, BLOCK: tl.constexpr):
    gdc_launch_dependents()
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(pauses):
        # The offsets pass through the sleep, so that no compiler can move the store before it.
        offsets = tl.inline_asm_elementwise(
            "nanosleep.u32 2000; mov.u32 $0, $1;", "=r,r", [offsets], tl.int32, is_pure=False, pack=1
        )
    valid = offsets < size
    tl.store(target + offsets, tl.load(value + offsets, valid), valid)


def write_late(target: torch.Tensor, value: torch.Tensor) -> None:
    """target = value, dense tensors of the same strides, stored about 100 us after the successor may start."""
    if target.stride() != value.stride() or target.dtype != value.dtype:
        raise ValueError(f"target and value must have one layout; got {target.stride()} and {value.stride()}")
    late_store_kernel[(triton.cdiv(target.numel(), BLOCK),)](target, value, target.numel(), PAUSES, BLOCK=BLOCK)
