"""Stage 2: out = activation(alpha * sum over s of partials[s] + beta * bias), rounded once, in a fixed order of s."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from decompose_k.config import MOST_SPLITS_AT_ONCE, Config
from decompose_k.kernels.activation import activate
from decompose_k.kernels.launch import (
    LAUNCH_CODES,
    Launch,
    launch_options,
    let_dependents_start,
    needs_wide_offsets,
    wait_for_predecessor,
)


@triton.jit
def finish(total, bias, rows, columns, valid, stride_bm, stride_bn, alpha, beta, BIAS, SCALE, ACTIVATION):
    """The epilogue of a block of sums: scale, bias (any broadcast, by strides) and activation in the sums' dtype.

    alpha and beta come as fp64, and are made blocks of the sums' dtype: a plain product would widen fp32 sums to fp64.
    """
    if SCALE:
        total = total * tl.full(total.shape, alpha, total.dtype)
    if BIAS:
        addend = tl.load(bias + rows * stride_bm + columns * stride_bn, valid, 0.0).to(total.dtype)
        if SCALE:
            addend = addend * tl.full(addend.shape, beta, total.dtype)
        total += addend
    return activate(total, ACTIVATION)


# Neither kernel may be compiled for a kind of M: which thread adds which partials would then depend on M, and a row's
# bits with it. (Triton compiles anew for arguments that are 1 or divisible by 16.) A kind of `splits` makes no better
# code, only more of it.
@triton.jit(do_not_specialize=["M", "splits"])
def flat_reduce_kernel(
    partials,
    bias,
    out,
    M,
    N,
    splits,
    alpha: tl.float64,
    beta: tl.float64,
    stride_bm,
    stride_bn,
    stride_om,
    stride_on,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    MORE_SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    WIDE: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Generation 2: the output as one vector, each program a piece of it and an [SPLITS, BLOCK] block of partials."""
    let_dependents_start(LAUNCH)
    outputs = M * N
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.arange(0, SPLITS)
    if WIDE:
        x, s, outputs = x.to(tl.int64), s.to(tl.int64), outputs.to(tl.int64)
    valid = x < outputs
    wait_for_predecessor(LAUNCH)
    block = partials + s[:, None] * outputs + x[None, :]
    total = tl.sum(tl.load(block, (s < splits)[:, None] & valid[None, :], 0.0), 0)
    if MORE_SPLITS:
        for first in range(SPLITS, splits, SPLITS):
            block += SPLITS * outputs
            total += tl.sum(tl.load(block, (first + s < splits)[:, None] & valid[None, :], 0.0), 0)
    rows, columns = x // N, x % N
    total = finish(total, bias, rows, columns, valid, stride_bm, stride_bn, alpha, beta, BIAS, SCALE, ACTIVATION)
    where = x if CONTIGUOUS else rows * stride_om + columns * stride_on
    tl.store(out + where, total.to(out.dtype.element_ty), valid)


@triton.jit(do_not_specialize=["M", "splits"])
def tile_reduce_kernel(
    partials,
    bias,
    out,
    M,
    N,
    splits,
    alpha: tl.float64,
    beta: tl.float64,
    stride_bm,
    stride_bn,
    stride_om,
    stride_on,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WIDE: tl.constexpr,
    LAUNCH: tl.constexpr,
):
    """Generation 1: one program an output tile, a serial loop over the splits. Kept to measure generation 2 against."""
    let_dependents_start(LAUNCH)
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    outputs = M * N
    if WIDE:
        rows, columns, outputs = rows.to(tl.int64), columns.to(tl.int64), outputs.to(tl.int64)
    valid = (rows < M) & (columns < N)
    wait_for_predecessor(LAUNCH)
    total = tl.zeros((BLOCK_M, BLOCK_N), partials.dtype.element_ty)
    for s in range(splits):
        total += tl.load(partials + s * outputs + rows * N + columns, valid, 0.0)
    total = finish(total, bias, rows, columns, valid, stride_bm, stride_bn, alpha, beta, BIAS, SCALE, ACTIVATION)
    tl.store(out + rows * stride_om + columns * stride_on, total.to(out.dtype.element_ty), valid)


def epilogue_constants(
    bias: torch.Tensor | None, alpha: float, beta: float, activation: str | None, launch: str
) -> dict[str, Any]:
    """Compile-time arguments that every kernel with an epilogue shares; beta = 0 leaves bias unread, NaN included."""
    return {
        "BIAS": bias is not None and beta != 0,
        "SCALE": alpha != 1 or (bias is not None and beta not in (0, 1)),
        "ACTIVATION": activation or "",
        "LAUNCH": LAUNCH_CODES[launch],
    }


def reduce_launch(
    partials: torch.Tensor,
    out: torch.Tensor,
    config: Config,
    *,
    bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str | None = None,
) -> Launch:
    """The launch that writes out [M, N] (any strides) from partials [S, M, N]; bias is None or expanded to [M, N]."""
    splits, m, n = partials.shape
    addend = out if bias is None else bias
    constants = epilogue_constants(bias, alpha, beta, activation, config.launch)
    constants["WIDE"] = needs_wide_offsets(addend, out, workspace=(splits, m, n))
    grid: tuple[int, ...]
    if config.reducer == "tile":
        kernel, grid = tile_reduce_kernel, (triton.cdiv(m, config.block_m), triton.cdiv(n, config.block_n))
        constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    else:
        kernel, grid = flat_reduce_kernel, (triton.cdiv(m * n, config.reduce_block),)
        constants |= {
            "BLOCK": config.reduce_block,
            "SPLITS": min(triton.next_power_of_2(splits), MOST_SPLITS_AT_ONCE),
            "MORE_SPLITS": splits > MOST_SPLITS_AT_ONCE,
            "CONTIGUOUS": out.is_contiguous(),
        }
    return Launch(
        kernel,
        grid,
        (partials, addend, out),
        (m, n, splits, alpha, beta, *addend.stride(), *out.stride()),
        constants,
        {"num_warps": config.reduce_warps, **launch_options(config.launch)},
    )
