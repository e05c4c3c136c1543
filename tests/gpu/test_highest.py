"""fp32 at `highest` errs no more than twice what torch.mm does, over the whole range of fp32."""

from __future__ import annotations

import pytest
import torch

import decompose_k as dk
from decompose_k.reference import truth
from support import assert_as_good_as_torch, random

pytestmark = pytest.mark.gpu

FP32, FP64 = torch.float32, torch.float64
LIMIT = torch.finfo(FP32).max
SHAPES = {"square": (32, 32, 8192), "wide": (64, 64, 16384), "few_rows": (2, 128, 2880), "row": (1, 256, 7168)}
SCALES = {
    "usual": (0, 0),
    "up_and_down": (120, -120),
    "down_and_up": (-120, 120),
    "subnormal_a": (-140, 20),
    "subnormal_result": (-70, -66),
    "huge_a": (100, 10),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def operands(shape, exponents=(0, 0)):
    m, n, k = shape
    a, b = random((m, k), FP64, "cuda", 1), random((k, n), FP64, "cuda", 2)
    return (a * 2.0 ** exponents[0]).to(FP32), (b * 2.0 ** exponents[1]).to(FP32)


def error(result, expected):
    """The largest error and the root of the mean square, of values scaled to about 1 first."""
    size = expected.abs().max()
    difference = (result.double() - expected) / size
    return float(difference.abs().max()), float(difference.square().mean().sqrt())


@shapes
@pytest.mark.parametrize("exponents", SCALES.values(), ids=SCALES)
def test_error_over_the_range(shape, exponents):
    a, b = operands(shape, exponents)
    expected = truth(a, b)
    result = dk.matmul(a, b, backend="triton")
    # The least subnormal is the unit that no fp32 result can resolve.
    unit = max(2.0**-149 / float(expected.abs().max()), torch.finfo(FP32).eps / 2)
    for ours, torchs in zip(error(result, expected), error(torch.mm(a, b), expected), strict=True):
        assert ours <= 2 * torchs + unit


@shapes
def test_sums_that_overflow(shape):
    a, b = (x.abs() for x in operands(shape))
    b = b * 2.0**64
    # Rows that overflow and rows that come close take turns; one sign only, so that no order of summation matters.
    a *= torch.where(torch.arange(a.shape[0], device="cuda") % 2 == 0, 2.0**64, 2.0**40)[:, None]
    result, own = dk.matmul(a, b, backend="triton"), torch.mm(a, b)
    assert torch.equal(result.isinf(), own.isinf())
    assert result[::2].isinf().all()
    assert_as_good_as_torch(result, a, b)


@shapes
def test_operands_at_the_limit(shape):
    a, b = operands(shape)
    a[0, :] = 0.0
    a[0, 3], a[0, 5] = LIMIT, -LIMIT / 2
    b[3], b[5] = 1.0, 1.0
    result = dk.matmul(a, b, backend="triton")
    assert torch.equal(result[0], torch.full_like(result[0], LIMIT / 2))
    assert_as_good_as_torch(result, a, b)


@shapes
@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")], ids=str)
def test_special_values_touch_their_row_and_column_alone(shape, special):
    a, b = operands(shape)
    usual = dk.matmul(a, b, backend="triton").double()
    b[7, 5] = special
    result = dk.matmul(a, b, backend="triton")
    assert_as_good_as_torch(result, a, b)
    others = torch.arange(b.shape[1], device="cuda") != 5
    assert result[:, others].isfinite().all()
    size = usual.abs().max()
    assert float(((result.double() - usual)[:, others] / size).abs().max()) < 1e-5
