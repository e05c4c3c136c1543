"""Stage 1: partials[s] = a[:, K range s] @ b[K range s, :], one program per output tile and split."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from decompose_k.config import Config
from decompose_k.kernels.launch import (
    LAUNCH_CODES,
    STATIC_B,
    Launch,
    launch_options,
    let_dependents_start,
    needs_wide_offsets,
    prefetch_l2,
    wait_for_predecessor,
)
from decompose_k.kernels.multiply import all_finite, multiply, unscale
from decompose_k.kernels.residency import reserve_shared, reserved_stages


# No code of its own for an M that is 1 or divisible by 16: a row's bits may not depend on M.
@triton.jit(do_not_specialize=["M"])
def partial_kernel(
    a,
    b,
    partials,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    k_per_split,
    k_prefetched,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr,
    A_AXIS: tl.constexpr,
    B_AXIS: tl.constexpr,
    PREFETCH_A: tl.constexpr,
    PREFETCH_B: tl.constexpr,
    RESERVED_STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """One tile of one split.

    A_AXIS and B_AXIS name the contiguous dimension of an operand, along which it is prefetched. RESERVED_STAGES is
    explained in `residency`. WIDE makes offsets 64-bit. LAUNCH is one of the codes in `launch`; with STATIC_B a program
    has a single K block: `legality` sees to it.
    """
    let_dependents_start(LAUNCH)
    if RESERVED_STAGES:
        reserve_shared(a, partials, K, RESERVED_STAGES)
    tile_m, tile_n = _tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    split = tl.program_id(1)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    if WIDE:
        rows, columns, ks, split = rows.to(tl.int64), columns.to(tl.int64), ks.to(tl.int64), split.to(tl.int64)
    start = split * k_per_split
    k_left = tl.minimum(K - start, k_per_split)
    k_early = tl.minimum(k_left, k_prefetched)
    if PREFETCH_A:
        _prefetch_split(a, rows, M, stride_am, stride_ak, start, k_early, BLOCK_M, BLOCK_K, A_AXIS == 1)
    if PREFETCH_B:
        _prefetch_split(b, columns, N, stride_bn, stride_bk, start, k_early, BLOCK_N, BLOCK_K, B_AXIS == 0)

    a_block = a + rows[:, None] * stride_am + (start + ks)[None, :] * stride_ak
    b_block = b + (start + ks)[:, None] * stride_bk + columns[None, :] * stride_bn
    in_rows, in_columns = rows[:, None] < M, columns[None, :] < N
    total = tl.zeros((BLOCK_M, BLOCK_N), partials.dtype.element_ty)
    if LAUNCH == STATIC_B:
        # One K block a program: the weight is in registers before the predecessor has finished.
        b_values = tl.load(b_block, (ks < k_left)[:, None] & in_columns, 0.0, eviction_policy="evict_first")
        wait_for_predecessor(LAUNCH)
        a_values = tl.load(a_block, in_rows & (ks < k_left)[None, :], 0.0)
        total = multiply(a_values, b_values, total, PRECISION)
    else:
        wait_for_predecessor(LAUNCH)
        for k in range(0, k_left, BLOCK_K):
            in_k = ks < k_left - k
            a_values = tl.load(a_block, in_rows & in_k[None, :], 0.0)
            b_values = tl.load(b_block, in_k[:, None] & in_columns, 0.0)
            total = multiply(a_values, b_values, total, PRECISION)
            a_block += BLOCK_K * stride_ak
            b_block += BLOCK_K * stride_bk
    if PRECISION == "tf32x3":
        if all_finite(total):
            total = unscale(total, a.dtype.element_ty, b.dtype.element_ty)
        else:
            total = _plain_product(
                a, b, rows, columns, M, N, stride_am, stride_ak, stride_bk, stride_bn, start, k_left, total
            )
    out = partials + split * M * N + rows[:, None] * N + columns[None, :]
    tl.store(out, total, in_rows & in_columns)


@triton.jit
def _tile(program, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Row and column of a tile in group-major order: GROUP_M tiles down, then one to the right, to share b in L2."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = program // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = program % (GROUP_M * tiles_n)
    return group * GROUP_M + within % height, within // height


@triton.jit
def _plain_product(a, b, rows, columns, M, N, stride_am, stride_ak, stride_bk, stride_bn, start, k_left, total):
    """One split's tile in plain fp32, an outer product per k: slow, but it costs the fast path no registers.

    Unrolling it by four made the whole kernel take 254 registers instead of 160, and 1 us longer.
    """
    a_column = a + rows * stride_am + start * stride_ak
    b_row = b + columns * stride_bn + start * stride_bk
    total = tl.zeros_like(total)
    for _ in range(k_left):
        a_values = tl.load(a_column, rows < M, 0.0).to(tl.float32)
        b_values = tl.load(b_row, columns < N, 0.0).to(tl.float32)
        total += a_values[:, None] * b_values[None, :]
        a_column += stride_ak
        b_row += stride_bk
    return total


@triton.jit
def _prefetch_split(
    matrix,
    outer,
    size,
    stride_outer,
    stride_k,
    start,
    length,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_IS_CONTIGUOUS: tl.constexpr,
):
    """Prefetch the first `length` of one operand's split into L2, a pointer per 64 bytes.

    Indices past the end repeat the last.
    """
    STEP: tl.constexpr = 64 // (matrix.dtype.element_ty.primitive_bitwidth // 8)
    last = length - 1
    for k in range(0, length, BLOCK_K):
        if K_IS_CONTIGUOUS:
            lines = tl.minimum(k + tl.arange(0, BLOCK_K // STEP) * STEP, last)
            prefetch_l2(
                matrix + tl.minimum(outer, size - 1)[:, None] * stride_outer + (start + lines)[None, :] * stride_k
            )
        else:
            ROW_STEP: tl.constexpr = STEP if STEP < BLOCK else BLOCK
            first = tl.min(outer)
            lines = tl.minimum(first + tl.arange(0, BLOCK // ROW_STEP) * ROW_STEP, size - 1)
            ks = tl.minimum(k + tl.arange(0, BLOCK_K), last)
            prefetch_l2(matrix + lines[None, :] * stride_outer + (start + ks)[:, None] * stride_k)


def split_length(k: int, split_k: int, block_k: int) -> int:
    """K elements of each split: K / split_k rounded up to whole blocks, so the last split may be shorter or absent."""
    return triton.cdiv(triton.cdiv(k, split_k), block_k) * block_k


def count_splits(k: int, config: Config) -> int:
    """How many of the config's splits hold any of K."""
    return triton.cdiv(k, split_length(k, config.split_k, config.block_k))


def _constants(a: torch.Tensor, b: torch.Tensor, partials: torch.Tensor, config: Config) -> dict[str, Any]:
    a_is_dense, b_is_dense = 1 in a.stride(), 1 in b.stride()
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "PRECISION": config.input_precision,
        "A_AXIS": 1 if a.stride(1) == 1 else 0,
        "B_AXIS": 1 if b.stride(1) == 1 else 0,
        "PREFETCH_A": "a" in config.prefetch and a_is_dense,
        "PREFETCH_B": "b" in config.prefetch and b_is_dense,
        "RESERVED_STAGES": reserved_stages(config.reserve_kib),
        "WIDE": needs_wide_offsets(a, b, workspace=(partials.shape[0], partials.shape[1], partials.shape[2])),
        "LAUNCH": LAUNCH_CODES[config.launch],
    }


def partial_launch(a: torch.Tensor, b: torch.Tensor, partials: torch.Tensor, config: Config) -> Launch:
    """The launch that fills partials [S, M, N] (fp32, or fp64 for fp64 operands) from a [M, K] and b [K, N]."""
    (m, k), n = a.shape, b.shape[1]
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    length = split_length(k, config.split_k, config.block_k)
    prefetched = min(config.prefetch_blocks * config.block_k or length, length)
    return Launch(
        partial_kernel,
        (tiles, partials.shape[0]),
        (a, b, partials),
        (m, n, k, *a.stride(), *b.stride(), length, prefetched),
        _constants(a, b, partials, config),
        {"num_warps": config.num_warps, "num_stages": config.num_stages, **launch_options(config.launch)},
    )
