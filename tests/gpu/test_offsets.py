"""Offsets past 2^31 elements, in every operand, the result and the workspace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import decompose_k as dk
from decompose_k.config import Config
from decompose_k.kernels.engine import triton_matmul
from support import assert_as_good_as_torch, random

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
ELEMENTS = (1 << 31) + (1 << 20)
PAIR = Config("pair", split_k=11, block_k=64, launch="wait_first", prefetch="ab")
EXPLICIT = {
    "flat": PAIR,
    "tile": replace(PAIR, reducer="tile", prefetch=""),
    "static_b": replace(PAIR, launch="static_b"),
    "dot": Config("dot", block_n=2, block_k=1024, launch="wait_first", prefetch="b"),
    "dot_static": Config("dot", block_n=2, block_k=1024, launch="static_b"),
}


@pytest.fixture(scope="module")
def large():
    """A buffer of more than 2^31 bf16 elements, NaN wherever a test has not written."""
    yield torch.full((ELEMENTS,), float("nan"), dtype=BF16, device="cuda")
    torch.cuda.empty_cache()


def spread(large, values, strides):
    """`values` behind strides that reach past 2^31 elements."""
    view = large.as_strided(values.shape, strides)
    view.copy_(values)
    return view


SPREADS = {"rows": lambda r, c: ((ELEMENTS - c) // (r - 1), 1), "columns": lambda r, c: (1, (ELEMENTS - r) // (c - 1))}


@pytest.mark.parametrize("kernel", ["pair", "dot"])
@pytest.mark.parametrize("along", SPREADS)
@pytest.mark.parametrize("operand", ["a", "b"])
def test_operands(large, operand, along, kernel):
    m = 2 if kernel == "dot" else 20
    a, b = random((m, 700), BF16, "cuda", 1), random((700, 24), BF16, "cuda", 2)
    far_a, far_b = a, b
    if operand == "a":
        far_a = spread(large, a, SPREADS[along](*a.shape))
    else:
        far_b = spread(large, b, SPREADS[along](*b.shape))
    result = dk.matmul(far_a, far_b, out_dtype=FP32, backend="triton")
    assert_as_good_as_torch(result, a, b, out_dtype=FP32)


@pytest.mark.parametrize("m", [2, 20], ids=["M2", "M20"])
@pytest.mark.parametrize("along", SPREADS)
def test_out(large, along, m):
    a, b = random((m, 700), BF16, "cuda", 1), random((700, 24), BF16, "cuda", 2)
    out = large.as_strided((m, 24), SPREADS[along](m, 24))
    dk.matmul(a, b, out=out, backend="triton")
    assert torch.equal(out, dk.matmul(a, b, backend="triton"))


@pytest.mark.parametrize("config", EXPLICIT.values(), ids=EXPLICIT)
@pytest.mark.parametrize("operand", ["a", "b", "bias", "out"])
def test_every_kernel(large, operand, config):
    tensors = {
        "a": random((2, 700), BF16, "cuda", 1),
        "b": random((700, 24), BF16, "cuda", 2),
        "bias": random((2, 24), BF16, "cuda", 3),
        "out": torch.zeros(2, 24, dtype=BF16, device="cuda"),
    }
    near = dict(tensors)
    rows, columns = tensors[operand].shape
    tensors[operand] = spread(large, tensors[operand], SPREADS["rows"](rows, columns))
    out = triton_matmul(config, out_dtype=BF16, **tensors)
    assert_as_good_as_torch(out, near["a"], near["b"], bias=near["bias"])


def test_a_tile_that_is_computed_again_in_plain_fp32(large):
    a, b = random((20, 700), BF16, "cuda", 1), random((700, 24), torch.float32, "cuda", 2)
    a[3, 650], a[5, 699] = float("inf"), float("nan")
    far = spread(large, a, SPREADS["columns"](*a.shape))
    config = Config("pair", split_k=3, block_k=64, num_stages=3, launch="wait_first", input_precision="tf32x3")
    assert_as_good_as_torch(triton_matmul(config, far, b, out_dtype=torch.float32), a, b)


def test_workspace():
    a, b = random((4096, 128), BF16, "cuda", 1), random((128, 4096), BF16, "cuda", 2)
    # 132 splits of 4096 x 4096 outputs: 2.2e9 partials; all but four of the splits are empty unless K is as long.
    a, b = a.repeat(1, 33), b.repeat(33, 1)
    config = Config("pair", split_k=132, block_m=64, block_n=64, block_k=32, launch="wait_first", reduce_block=64)
    result = dk.matmul(a, b, out_dtype=FP32, config=config)
    expected = 33 * (a[:, :128].float() @ b[:128].float())
    assert float((result - expected).norm() / expected.norm()) < 1e-5
