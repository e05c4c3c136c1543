"""The same bits on every run, and in batch-invariant mode for every number of rows."""

from __future__ import annotations

import pytest
import torch

import decompose_k as dk
from decompose_k.config import Config
from support import random

pytestmark = pytest.mark.gpu

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CASES = {
    "pair_bf16": ((16, 256, 7168), BF16, BF16, {}),
    "pair_static": ((16, 256, 7168), BF16, BF16, {"static_b": True}),
    "pair_wide": ((64, 64, 16384), BF16, BF16, {"activation": "relu"}),
    "dot": ((1, 256, 7168), BF16, BF16, {"static_b": True}),
    "fp32": ((64, 64, 8192), FP32, FP32, {}),
    "fp16": ((16, 256, 7168), FP16, FP16, {"activation": "gelu"}),
    "fp64": ((16, 24, 4099), FP64, FP64, {}),
    "tile_reducer": ((33, 40, 999), BF16, BF16, {"config": Config("pair", split_k=16, block_k=64, reducer="tile")}),
    "mixed": ((64, 24, 28672), BF16, FP32, {"static_b": True}),
    "invariant": ((37, 256, 7168), BF16, BF16, {"batch_invariant": True}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_fifty_runs_have_the_same_bits(case):
    (m, n, k), a_dtype, b_dtype, options = case
    a, b = random((m, k), a_dtype, "cuda", 1), random((n, k), b_dtype, "cuda", 2).T
    # The root fixture poisons the workspace and the result before each call: stale bits cannot repeat themselves.
    options = {"out_dtype": FP32} | ({} if "config" in options else {"backend": "triton"}) | options
    first = dk.matmul(a, b, **options)
    assert first.isfinite().all()
    for _ in range(50):
        assert torch.equal(dk.matmul(a, b, **options), first)


@pytest.mark.parametrize(
    ("a_dtype", "b_dtype"),
    [(BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP32), (FP32, BF16)],
    ids=["bf16", "fp16", "fp32", "bf16xfp32", "fp32xbf16"],
)
@pytest.mark.parametrize("n", [1, 24, 256], ids=lambda n: f"N{n}")
def test_a_rows_bits_do_not_depend_on_the_others(a_dtype, b_dtype, n):
    k = 7168
    rows, b = random((512, k), a_dtype, "cuda", 1), random((n, k), b_dtype, "cuda", 2).T
    alone = torch.cat([dk.matmul(row[None], b, out_dtype=FP32, batch_invariant=True) for row in rows[:80]])
    for m in [*range(1, 65), 80, 127, 128, 200, 256, 333, 512]:
        together = dk.matmul(rows[:m], b, out_dtype=FP32, batch_invariant=True)
        assert torch.equal(together[: len(alone)], alone[:m]), f"M = {m}"
    strange = rows[:80].clone()
    strange[1::2] = torch.tensor([float("nan"), float("inf"), 3e38, 1e-40] * (k // 4), device="cuda").to(a_dtype)
    assert torch.equal(dk.matmul(strange, b, out_dtype=FP32, batch_invariant=True)[::2], alone[::2])


@pytest.mark.parametrize(
    ("a_dtype", "b_dtype"), [(BF16, BF16), (FP32, FP32), (BF16, FP32)], ids=["bf16", "fp32", "bf16xfp32"]
)
@pytest.mark.parametrize("activation", [None, "silu"], ids=str)
def test_a_rows_bits_do_not_depend_on_where_it_lies(a_dtype, b_dtype, activation):
    # Odd K and N: a row, and its place in the result, start at any alignment, which Triton compiles apart.
    n, k = 21, 7169
    options = {"out_dtype": FP32, "batch_invariant": True, "activation": activation, "backend": "triton"}
    rows, b = random((48, k), a_dtype, "cuda", 1), random((n, k), b_dtype, "cuda", 2).T
    bias = random((n,), FP32, "cuda", 3)
    right = torch.cat([dk.matmul(row[None].clone(), b, bias=bias, **options) for row in rows])
    for first, count in ((0, 48), (1, 1), (2, 1), (3, 16), (5, 17), (7, 41), (16, 32)):
        part, expected = rows[first : first + count], right[first : first + count]
        assert torch.equal(dk.matmul(part, b, bias=bias, **options), expected), "its place among the operands"
        by_column = part.T.contiguous().T
        assert torch.equal(dk.matmul(by_column, b, bias=bias, **options), expected), "the layout of the operand"
        base = torch.full((50, n + 2), float("nan"), device="cuda")
        for out in (base.view(-1)[first * n : (first + count) * n].view(count, n), base[first : first + count, 1:-1]):
            dk.matmul(part, b, bias=bias, out=out, **options)
            assert torch.equal(out, expected), "its place in the result"
        transposed = torch.full((n, count), float("nan"), device="cuda").T
        dk.matmul(part, b, bias=bias, out=transposed, **options)
        assert torch.equal(transposed, expected), "the layout of the result"
