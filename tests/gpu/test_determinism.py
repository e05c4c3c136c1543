"""The same bits on every run, and in batch-invariant mode for every number of rows."""

from __future__ import annotations

import pytest
import torch

import decompose_k as dk
from support import random

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = {
    "pair_bf16": ((16, 256, 7168), BF16, BF16, {}),
    "pair_static": ((16, 256, 7168), BF16, BF16, {"static_b": True}),
    "pair_wide": ((64, 64, 16384), BF16, BF16, {"activation": "relu"}),
    "dot": ((1, 256, 7168), BF16, BF16, {"static_b": True}),
    "fp32": ((64, 64, 8192), FP32, FP32, {}),
    "mixed": ((64, 24, 28672), BF16, FP32, {"static_b": True}),
    "invariant": ((37, 256, 7168), BF16, BF16, {"batch_invariant": True}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_fifty_runs_have_the_same_bits(case):
    (m, n, k), a_dtype, b_dtype, options = case
    a, b = random((m, k), a_dtype, "cuda", 1), random((n, k), b_dtype, "cuda", 2).T
    first = dk.matmul(a, b, out_dtype=FP32, backend="triton", **options)
    for _ in range(50):
        assert torch.equal(dk.matmul(a, b, out_dtype=FP32, backend="triton", **options), first)


@pytest.mark.parametrize(
    ("a_dtype", "b_dtype"),
    [(BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP32)],
    ids=["bf16", "fp16", "fp32", "bf16xfp32"],
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
