"""One launch for one or two rows: dot products on the plain cores, with no padding, workspace or second stage.

A program owns `block_n` columns of b over the whole of K and keeps them in registers while it goes through the rows of
a. For M = 1 the kernel reads every weight once and stops (H200, N = 256, K = 7168, static weight: 1.8 us, the pair 3.0
us); every further row adds a pass over K by every program, so that from M = 3 the tensor cores win.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decompose_k.config import Config
from decompose_k.kernels.launch import (
    STATIC_B,
    Launch,
    launch_options,
    let_dependents_start,
    needs_wide_offsets,
    prefetch_l2,
    wait_for_predecessor,
)
from decompose_k.kernels.reduce import epilogue_constants, finish


# N is M where the product is transposed: one compiled kernel then serves every M of a bucket.
@triton.jit(do_not_specialize=["N"])
def dot_kernel(
    a,
    b,
    bias,
    out,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    alpha: tl.float64,
    beta: tl.float64,
    stride_cm,
    stride_cn,
    stride_om,
    stride_on,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PREFETCH_B: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WIDE: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    let_dependents_start(LAUNCH)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    if WIDE:
        columns, ks = columns.to(tl.int64), ks.to(tl.int64)
    valid = columns < N
    if PREFETCH_B:
        STEP: tl.constexpr = 64 // (b.dtype.element_ty.primitive_bitwidth // 8)
        lines = tl.minimum(tl.arange(0, BLOCK_K // STEP) * STEP, K - 1)
        prefetch_l2(b + tl.minimum(columns, N - 1)[:, None] * stride_bn + lines[None, :] * stride_bk)
    if LAUNCH != STATIC_B:
        wait_for_predecessor(LAUNCH)
    b_block = b + columns[:, None] * stride_bn + ks[None, :] * stride_bk
    weights = tl.load(b_block, valid[:, None] & (ks < K)[None, :], 0.0, eviction_policy="evict_first").to(ACCUMULATE)
    if LAUNCH == STATIC_B:
        wait_for_predecessor(LAUNCH)
    for m in tl.static_range(M):
        row = tl.load(a + m * stride_am + ks * stride_ak, ks < K, 0.0).to(ACCUMULATE)
        total = tl.sum(weights * row[None, :], 1)
        total = finish(total, bias, m, columns, valid, stride_cm, stride_cn, alpha, beta, BIAS, SCALE, ACTIVATION)
        tl.store(out + m * stride_om + columns * stride_on, total.to(out.dtype.element_ty), valid)


def dot_launch(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    config: Config,
    accumulate: tl.dtype,
    *,
    bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str | None = None,
) -> Launch:
    """The launch that writes out [M, N] from a [M, K] of few rows and b [K, N]; any strides, bias expanded to [M, N].

    Unrolled over M, with the whole of K in one block: `legality` says for how many rows and how long a K that is sane.
    """
    (m, k), n = a.shape, b.shape[1]
    addend = out if bias is None else bias
    return Launch(
        dot_kernel,
        (triton.cdiv(n, config.block_n),),
        (a, b, addend, out),
        (n, k, *a.stride(), *b.stride(), alpha, beta, *addend.stride(), *out.stride()),
        {
            "M": m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "ACCUMULATE": accumulate,
            "PREFETCH_B": "b" in config.prefetch and b.stride(0) == 1,
            "WIDE": needs_wide_offsets(a, b, addend, out),
            **epilogue_constants(bias, alpha, beta, activation, config.launch),
        },
        {"num_warps": config.num_warps, **launch_options(config.launch)},
    )
