"""How many programs of stage 1 share a multiprocessor: fewer, if each reserves shared memory that it does not use.

With dependent launch the programs of several calls to come wait on the multiprocessors. They take whatever room is
left, so the programs of one call gather three at a time on some multiprocessors while others have none, and whether
they do differs from one captured graph to the next: on an H200, 64 x 256 x 7168 took 4.5 us where all 92 programs had a
multiprocessor to themselves, and 6.7 us where 34 multiprocessors shared them. With room for one program on each, it
takes 4.6 us every time; 16 x 128 x 2880 takes 2.4 us instead of 2.7 to 3.3.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decompose_k.config import RESERVE_STEP_KIB

# A pipelined stage of a [16, K] and a [K, 128] tile of halves, which is where the shared memory is asked for.
_STAGE_K = tl.constexpr(128)


@triton.jit
def reserve_shared(a, unused, K, STAGES: tl.constexpr):
    """Reserve (STAGES - 1) * 36 KiB of shared memory.

    A kernel is launched with the shared memory that the neediest of its loops takes, also if that loop never runs: K is
    never negative. A pipeline of so many stages has one less in memory, the last one being multiplied. The loop has its
    registers too, up to 168 with one warp, which only bound how many programs share a multiprocessor.
    """
    if K < 0:
        words = a.to(tl.pointer_type(tl.bfloat16), bitcast=True)
        rows, ks, columns = tl.arange(0, 16), tl.arange(0, _STAGE_K), tl.arange(0, 128)
        total = tl.zeros((16, 128), tl.float32)
        for k in tl.range(0, -K, num_stages=STAGES):
            narrow = tl.load(words + k * _STAGE_K + rows[:, None] * _STAGE_K + ks[None, :])
            wide = tl.load(words + k * _STAGE_K + ks[:, None] * 128 + columns[None, :])
            total = tl.dot(narrow, wide, total)
        sums = unused.to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(sums + rows[:, None] * 128 + columns[None, :], total)


def reserved_stages(reserve_kib: int) -> int:
    """The STAGES of a config's reserve."""
    return 1 + reserve_kib // RESERVE_STEP_KIB if reserve_kib else 0
