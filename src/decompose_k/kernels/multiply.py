"""total + a @ b for every pair of operand dtypes: tensor cores where they are exact enough, plain arithmetic elsewhere.

fp32 operands are multiplied in one of three ways. `ieee` is plain fp32. `tf32` drops 13 bits of each operand and runs
only where that is allowed. `tf32x3` keeps fp32's accuracy on tensor cores: an operand is written as a sum of three bf16
numbers, which is exact, and the products that matter are summed: six for two fp32 operands, three where the partner is
bf16. That costs as many tensor-core instructions as three tf32 products, and its error is a third lower (H200: 1.5e-7
against 2.2e-7).

Such sums need care at both ends of the range. Low parts of tiny numbers would leave bf16's range, so fp32 operands are
first scaled up by a power of two, and the total down at the end; both are exact. Infinities, NaN and numbers that
overflow once scaled make the total infinite or NaN, never a wrong finite number: the caller looks at the total once and
computes such a tile again in plain fp32. So the result is right for every input, at no cost inside the loop.
"""

import triton
import triton.language as tl

# 2^20 lifts the last bit of the least subnormal, 2^-149, above that of bf16, 2^-133, with room for the products.
SCALE_UP: tl.constexpr = tl.constexpr(1048576.0)
SCALE_DOWN: tl.constexpr = tl.constexpr(1.0 / 1048576.0)
UPPER_HALF: tl.constexpr = tl.constexpr(-65536)


@triton.jit
def multiply(a, b, total, PRECISION: tl.constexpr):
    """total + a @ b; a [M, K] and b [K, N] of any real floating dtypes, total fp32, or fp64 where an operand is.

    With `tf32x3` the total stands scaled, until `unscale`.
    """
    if total.dtype == tl.float64:
        return tl.dot(a.to(tl.float64), b.to(tl.float64), total, out_dtype=tl.float64)
    elif a.dtype == b.dtype and a.dtype != tl.float32:
        return tl.dot(a, b, total)
    elif PRECISION == "tf32x3" and a.dtype == tl.bfloat16:
        high, middle, low = _three_bf16(b * SCALE_UP)
        product = tl.dot(a, low, tl.zeros_like(total))
        product = tl.dot(a, middle, product)
        return total + tl.dot(a, high, product)
    elif PRECISION == "tf32x3" and b.dtype == tl.bfloat16:
        high, middle, low = _three_bf16(a * SCALE_UP)
        product = tl.dot(low, b, tl.zeros_like(total))
        product = tl.dot(middle, b, product)
        return total + tl.dot(high, b, product)
    elif PRECISION == "tf32x3":
        a_high, a_middle, a_low = _three_bf16(a.to(tl.float32) * SCALE_UP)
        b_high, b_middle, b_low = _three_bf16(b.to(tl.float32) * SCALE_UP)
        # Small products first. The three left out, of a middle or low part with a low one, lie below 2^-24 of the
        # largest, which is less than fp32 keeps of it.
        product = tl.dot(a_low, b_high, tl.zeros_like(total))
        product = tl.dot(a_high, b_low, product)
        product = tl.dot(a_middle, b_middle, product)
        product = tl.dot(a_middle, b_high, product)
        product = tl.dot(a_high, b_middle, product)
        return total + tl.dot(a_high, b_high, product)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision=PRECISION)


@triton.jit
def unscale(total, A_DTYPE: tl.constexpr, B_DTYPE: tl.constexpr):
    """The true total of a `tf32x3` product: scaled down once for every operand that `multiply` scaled up."""
    if A_DTYPE != tl.bfloat16:
        total *= SCALE_DOWN
    if B_DTYPE != tl.bfloat16:
        total *= SCALE_DOWN
    return total


@triton.jit
def all_finite(total):
    """Whether no value of a tile is infinite or NaN."""
    return tl.min(tl.where(tl.abs(total) <= 3.4028234663852886e38, 1, 0)) == 1


@triton.jit
def _three_bf16(x):
    """fp32 x as high + middle + low in bf16, exactly: three times eight significant bits, cut and not rounded."""
    high = (x.to(tl.int32, bitcast=True) & UPPER_HALF).to(tl.float32, bitcast=True)
    rest = x - high
    middle = (rest.to(tl.int32, bitcast=True) & UPPER_HALF).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)
