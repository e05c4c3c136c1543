"""Activations on the accumulator, as accurate as torch's own, in plain Triton that the interpreter runs too."""

import triton
import triton.language as tl


@triton.jit
def _exp(x):
    """exp(x) to about one unit in the last place.

    tl.exp is one fast exp2 whose relative error grows with |x| (5e-6 at x = -80); splitting off the power of two first
    keeps it at 1e-7 over the whole range. fp64 has no fast path to avoid.
    """
    if x.dtype == tl.float64:
        return tl.exp(x)
    else:
        x = tl.where(x > 89.0, 89.0, x)
        x = tl.where(x < -104.0, -104.0, x)
        power = tl.floor(x * 1.4426950408889634 + 0.5)
        # ln 2 in two parts: the first has 9 significant bits, so that its product with any power in range is exact.
        rest = (x - power * 0.693359375) + power * 2.12194440054690583e-4
        return tl.exp2(rest * 1.4426950408889634) * tl.exp2(power)


@triton.jit
def _divide(x, y):
    """x / y rounded once; the plain operator is 2 units off in fp32."""
    if x.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)


@triton.jit
def _sigmoid(x):
    one = tl.full(x.shape, 1.0, x.dtype)
    return _divide(one, one + _exp(-x))


@triton.jit
def _tanh_polynomial(square):
    """(tanh(x) / x - 1) / x^2 as a polynomial in x^2: Chebyshev fits on |x| <= 0.626, tanh within one unit."""
    if square.dtype == tl.float64:
        result = square * -2.4316497630014687e-06 + 1.2193738987130529e-05
        result = result * square - 3.706514378846229e-05
        result = result * square + 9.603210574278365e-05
        result = result * square - 0.00023888623778637894
        result = result * square + 0.000589981060857246
        result = result * square - 0.001455828281626584
        result = result * square + 0.0035921274954513784
        result = result * square - 0.008863235499013071
        result = result * square + 0.0218694885351031
        result = result * square - 0.05396825396823531
        result = result * square + 0.1333333333333332
        return result * square - 0.3333333333333333
    else:
        result = square * -0.006089802831411362 + 0.020992422476410866
        result = result * square - 0.05384990572929382
        result = result * square + 0.1333276331424713
        return result * square - 0.333333283662796


@triton.jit
def _tanh(x):
    """tanh(x): an odd polynomial where exp would cancel, 1 - 2 / (exp(2|x|) + 1) elsewhere."""
    magnitude = tl.abs(x)
    square = x * x
    near = x + x * square * _tanh_polynomial(square)
    one = tl.full(x.shape, 1.0, x.dtype)
    far = one - _divide(one + one, _exp(2.0 * magnitude) + one)
    far = tl.where(x < 0, -far, far)
    return tl.where(magnitude < 0.625, near, far)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """activation(x) in x's own dtype; NaN stays NaN, ReLU included."""
    if ACTIVATION == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        x = 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "silu":
        x = _divide(x, tl.full(x.shape, 1.0, x.dtype) + _exp(-x))
    elif ACTIVATION == "sigmoid":
        x = _sigmoid(x)
    elif ACTIVATION == "tanh":
        x = _tanh(x)
    return x
