"""The interpreter, as patched for these tests, computes what a GPU does."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

BF16 = torch.bfloat16


@triton.jit
def cast_kernel(x, out, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(x + index).to(out.dtype.element_ty))


@triton.jit
def dot_kernel(a, b, out, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    offsets = index[:, None] * BLOCK + index[None, :]
    tl.store(out + offsets, tl.dot(tl.load(a + offsets), tl.load(b + offsets)))


@triton.jit
def add_kernel(x, out, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(x + index) + tl.load(x + index))


@triton.jit
def maximum_kernel(x, out, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out + index, tl.maximum(tl.load(x + index), 0.0))


@pytest.mark.parametrize("other", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("direction", ["from", "to"])
def test_conversions_are_those_of_torch(other, direction):
    source, target = (BF16, other) if direction == "from" else (other, BF16)
    x = torch.cat([torch.randn(60), torch.tensor([float("nan"), float("inf"), -0.0, 1 + 2**-8])]).to(source)
    out = torch.empty(64, dtype=target)
    cast_kernel[(1,)](x, out, BLOCK=64)
    torch.testing.assert_close(out, x.to(target), rtol=0, atol=0, equal_nan=True)


def test_a_dot_is_of_values():
    a, b, out = torch.randn(16, 16).to(BF16), torch.randn(16, 16).to(BF16), torch.empty(16, 16)
    dot_kernel[(1,)](a, b, out, BLOCK=16)
    torch.testing.assert_close(out, a.float() @ b.float())


def test_arithmetic_is_refused():
    with pytest.raises(Exception, match="arithmetic on bf16"):
        add_kernel[(1,)](torch.ones(16, dtype=BF16), torch.empty(16, dtype=BF16), BLOCK=16)


def test_the_larger_of_a_number_and_nan_is_the_number():
    x, out = torch.full((16,), float("nan")), torch.empty(16)
    maximum_kernel[(1,)](x, out, BLOCK=16)
    assert torch.equal(out, torch.zeros(16))
