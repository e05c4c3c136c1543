"""The read floor: every byte of two matrices read once, and nothing else, in each launch mode.

No product of the two can take less time launched the same way, so its distance to this kernel is what remains to be
gained. Each program folds its share into one word by exclusive or, which keeps the loads and proves that none is
missing: the words together are the exclusive or of all that was read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decompose_k.kernels.launch import (
    LAUNCH_CODES,
    STATIC_B,
    Launch,
    launch_options,
    let_dependents_start,
    wait_for_predecessor,
)

# Words that a thread has in flight: twice as many spill where four warps share a multiprocessor's registers.
_MOST_WORDS_A_THREAD = 32
_LEAST_BLOCK = 256


@triton.jit
def read_kernel(
    a,
    b,
    out,
    a_words,
    b_words,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    let_dependents_start(LAUNCH)
    if LAUNCH != STATIC_B:
        wait_for_predecessor(LAUNCH)
    b_word = _fold(b, b_words, BLOCK_B)
    if LAUNCH == STATIC_B:
        wait_for_predecessor(LAUNCH)
    a_word = _fold(a, a_words, BLOCK_A)
    tl.store(out + tl.program_id(0), a_word ^ b_word)


@triton.jit
def _fold(words, count, BLOCK: tl.constexpr):
    """The exclusive or of this program's words: blocks dealt out to the programs in turn."""
    lanes = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    folded = tl.zeros((BLOCK,), tl.int32)
    for start in range(first, count, step):
        folded ^= tl.load(words + start + lanes, start + lanes < count, 0, eviction_policy="evict_first")
    return tl.xor_sum(folded, 0)


def words_of(matrix: torch.Tensor) -> torch.Tensor:
    """The bytes of a matrix without gaps, in the order of its memory, as int32 words; raises ValueError for others."""
    dense = matrix if matrix.is_contiguous() else matrix.T
    if not dense.is_contiguous():
        raise ValueError(f"matrix must be dense in memory to be read as words; got strides {tuple(matrix.stride())}")
    flat = dense.reshape(-1)
    if flat.numel() * flat.itemsize % 4:
        raise ValueError(f"matrix must have a multiple of 4 bytes to be read as words; got {flat.numel()} elements")
    return flat.view(torch.int32)


def read_launch(
    a_words: torch.Tensor, b_words: torch.Tensor, out: torch.Tensor, *, launch: str, num_warps: int
) -> Launch:
    """The launch that reads both and writes one word for each program: out [programs] of int32."""
    programs = out.shape[0]
    return Launch(
        read_kernel,
        (programs,),
        (a_words, b_words, out),
        (a_words.shape[0], b_words.shape[0]),
        {
            "BLOCK_A": _block(a_words.shape[0], programs, num_warps),
            "BLOCK_B": _block(b_words.shape[0], programs, num_warps),
            "LAUNCH": LAUNCH_CODES[launch],
        },
        {"num_warps": num_warps, **launch_options(launch)},
    )


def read_both(a: torch.Tensor, b: torch.Tensor, *, launch: str, programs: int, num_warps: int) -> torch.Tensor:
    """One int32 word for each program, whose exclusive or is that of all words of a [M, K] and b [K, N].

    Raises ValueError for matrices with gaps in memory.
    """
    a_words, b_words = words_of(a), words_of(b)
    out = torch.empty(programs, dtype=torch.int32, device=a.device)
    read_launch(a_words, b_words, out, launch=launch, num_warps=num_warps).run()
    return out


def _block(words: int, programs: int, num_warps: int) -> int:
    share = triton.next_power_of_2(triton.cdiv(words, programs))
    return int(min(32 * num_warps * _MOST_WORDS_A_THREAD, max(_LEAST_BLOCK, share)))
