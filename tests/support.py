"""What the contract tests share: operands of every layout, and the bound derived from torch's own error."""

from __future__ import annotations

import numpy
import torch

from decompose_k import ops
from decompose_k.config import Config
from decompose_k.dtypes import COMPLEX, FLOATS, HALVES, accumulate_dtype, default_out_dtype
from decompose_k.epilogue import ACTIVATIONS, apply_activation
from decompose_k.reference import truth

ACTIVATION_NAMES = (None, *ACTIVATIONS)

# M, N, K: zero in each place, one in each place, primes, a ragged K, and real shapes.
SHAPES = {
    "M0": (0, 3, 5),
    "N0": (3, 0, 5),
    "K0": (3, 4, 0),
    "all0": (0, 0, 0),
    "one": (1, 1, 1),
    "K1": (4, 5, 1),
    "dot": (1, 1, 1031),
    "row": (1, 24, 513),
    "column": (17, 1, 257),
    "prime": (7, 13, 1009),
    "ragged": (16, 16, 4097),
    "square": (32, 32, 8192),
    "router": (2, 128, 2880),
}


def random(shape, dtype, device="cpu", seed=0):
    """Values of both signs: standard normal for floats, the whole range for integers."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in FLOATS or dtype in COMPLEX:
        wide = torch.complex128 if dtype in COMPLEX else torch.float64
        return torch.randn(shape, generator=generator, dtype=wide).to(dtype).to(device)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, generator=generator, dtype=torch.int64).to(dtype).to(device)


def with_layout(matrix, layout):
    """The same values behind other strides; `expanded` repeats the first column, so its values differ."""
    rows, columns = matrix.shape
    if layout == "row":
        return matrix.contiguous()
    if layout == "column":
        return matrix.t().contiguous().t()
    if layout == "padded":
        wide = matrix.new_zeros(rows, columns + 3)
        wide[:, 1 : columns + 1] = matrix
        return wide[:, 1 : columns + 1]
    if layout == "strided":
        wide = matrix.new_zeros(2 * rows, 3 * columns)
        wide[::2, ::3] = matrix
        return wide[::2, ::3]
    if layout == "expanded":
        return matrix[:, :1].contiguous().expand(rows, columns) if columns else matrix
    if layout == "expanded_rows":
        return matrix[:1].contiguous().expand(rows, columns) if rows else matrix
    raise AssertionError(layout)


LAYOUTS = ("row", "column", "padded", "strided", "expanded", "expanded_rows")


def spy_on_engine(monkeypatch, describe):
    """A list that gets `describe(a, b, options)` of every product that reaches the engine through the operator."""
    seen = []
    execute = ops.execute

    def spy(a, b, bias, options, out=None):
        seen.append(describe(a, b, options))
        return execute(a, b, bias, options, out)

    monkeypatch.setattr(ops, "execute", spy)
    return seen


def torch_result(a, b, *, bias=None, alpha=1.0, beta=1.0, activation=None, out_dtype=None):
    """What a user of torch would write for the same, in the same dtypes: mm, addmm, then the activation."""
    common = torch.promote_types(a.dtype, b.dtype)
    a, b = a.to(common), b.to(common)
    result = torch.matmul(a, b)
    if out_dtype is not None and out_dtype.itemsize > common.itemsize and common in FLOATS:
        # torch's mm(out_dtype=float32) has no CPU kernel: the product in the accumulate dtype stands for it.
        if a.is_cuda and common in HALVES and 0 not in (*a.shape, *b.shape):
            result = torch.mm(a, b, out_dtype=torch.float32)
        else:
            result = torch.matmul(a.to(accumulate_dtype(common, common)), b.to(accumulate_dtype(common, common)))
        result = result.to(out_dtype)
    if alpha != 1:
        result = result * alpha
    if bias is not None and beta != 0:
        result = result + beta * bias.to(result.dtype)
    return apply_activation(result, activation).to(out_dtype or default_out_dtype(a.dtype, b.dtype))


def assert_as_good_as_torch(actual, a, b, *, out_dtype=None, **epilogue):
    """Every error against the fp64 truth is at most 2x torch's largest in the same dtypes, plus one last place.

    torch's own error is taken over rotations of K too, so that a small output does not make it zero by luck. Values
    that are not finite must be torch's.
    """
    expected = exact(a, b, **epilogue)
    own = torch_result(a, b, out_dtype=out_dtype, **epilogue)
    if a.is_cpu and epilogue.get("activation") == "gelu":
        # On some processors torch's gelu of infinity is NaN in some dtypes: there the truth stands for it.
        own = torch.where(own.isnan() & (expected == torch.inf), torch.inf, own)
    assert (actual.dtype, actual.shape, actual.device) == (own.dtype, own.shape, a.device)
    if actual.dtype not in FLOATS and actual.dtype not in COMPLEX:
        assert torch.equal(actual, expected.to(actual.dtype))
        return
    finite = torch.isfinite(expected.to(actual.dtype)) & torch.isfinite(own)
    torch.testing.assert_close(actual[~finite], own[~finite], rtol=0, atol=0, equal_nan=True)
    if not finite.any():
        return
    rotations = [own]
    for shift in (1, 3, a.shape[-1] // 2):
        turned = a.roll(shift, -1), b.roll(shift, 0)
        rotations.append(torch_result(*turned, out_dtype=out_dtype, **epilogue))
    allowed = 2 * max(float(_error(result, expected)[finite].max()) for result in rotations)
    floor = last_place(expected, actual.dtype) + _sum_unit(a, b, **epilogue)
    excess = (_error(actual, expected) - allowed - floor)[finite]
    assert bool((excess <= 0).all()), f"error {float(excess.max()):.3e} above the bound, 2x torch's own = {allowed:.3e}"


def exact(a, b, **epilogue):
    """The truth, of fp64 operands with a product that is summed wider than fp64 where the CPU can."""
    if torch.float64 not in (a.dtype, b.dtype) or 0 in (*a.shape, *b.shape):
        return truth(a, b, **epilogue)
    with numpy.errstate(all="ignore"):
        wide = [operand.double().resolve_neg().cpu().numpy().astype(numpy.longdouble) for operand in (a, b)]
        product = torch.from_numpy(numpy.matmul(*wide).astype(numpy.float64)).to(a.device)
    return finished(product, **epilogue)


def finished(product, *, bias=None, alpha=1.0, beta=1.0, activation=None):
    """The epilogue in the product's dtype."""
    product = product * alpha
    if bias is not None and beta != 0:
        product = product + bias.to(product.dtype) * beta
    return apply_activation(product, activation)


def last_place(values, dtype):
    """One unit in the last place of `dtype` at each value, no less than its smallest subnormal."""
    info = torch.finfo(dtype)
    return torch.clamp(values.abs() * info.eps, min=info.tiny * info.eps)


def _sum_unit(a, b, *, bias=None, alpha=1.0, beta=1.0, activation=None):
    """One unit in the last place of the accumulate dtype at the size that the sums typically pass through."""
    del activation
    size = torch.matmul(_magnitude(a).square(), _magnitude(b).square()).sqrt() * abs(alpha)
    if bias is not None and beta != 0:
        size = size + _magnitude(bias) * abs(beta)
    return size * torch.finfo(accumulate_dtype(a.dtype, b.dtype)).eps


def _magnitude(tensor):
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return torch.nan_to_num(tensor.to(wide).abs(), nan=0.0, posinf=0.0)


def _error(result, expected):
    return (result.to(expected.dtype) - expected).abs()


def torch_configs(k, split_ks=(1, 2, 3, 7, 64)):
    """Every config that a contract test runs with explicitly: torch's own kernel and the split form."""
    return [Config("mm"), *(Config("bmm_sum", split_k=s) for s in split_ks if s <= max(k, 1))]
