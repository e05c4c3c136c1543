"""Same meaning as torch, at least as accurate: shapes, dtypes, strides, epilogues and special values."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import decompose_k as dk
from decompose_k.dtypes import COMPLEX, FLOATS, HALVES, INTEGERS, dtype_name
from support import (
    ACTIVATION_NAMES,
    LAYOUTS,
    SHAPES,
    assert_as_good_as_torch,
    random,
    torch_configs,
    with_layout,
)

pytestmark = pytest.mark.contract


def ids(dtypes):
    return {"argvalues": dtypes, "ids": dtype_name}


def operands(shape, a_dtype, b_dtype, device, seed=0):
    m, n, k = shape
    return random((m, k), a_dtype, device, seed), random((k, n), b_dtype, device, seed + 1)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", **ids(FLOATS))
def test_every_shape_and_dtype(shape, dtype, device, backend):
    a, b = operands(shape, dtype, dtype, device)
    assert_as_good_as_torch(dk.matmul(a, b, backend=backend), a, b)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", **ids(FLOATS))
def test_every_torch_config(shape, dtype, device):
    a, b = operands(shape, dtype, dtype, device)
    for config in torch_configs(shape[2]):
        assert_as_good_as_torch(dk.matmul(a, b, config=config), a, b)


@pytest.mark.parametrize("size", [(1, 128), (2, 128), (3, 64), (4, 24), (7, 64), (8, 128), (128, 2), (24, 5)], ids=str)
@pytest.mark.parametrize("dtype", **ids((torch.float32, torch.float64)))
def test_few_rows_in_long_chunks_are_as_exact_as_torch(size, dtype, device):
    """BLAS sums few rows of a batched product in one accumulator, and those of one product in several."""
    m, n = size
    a, b = operands((m, n, 5760), dtype, dtype, device)
    for split_k in (1, 2, 3, 4):
        assert_as_good_as_torch(dk.matmul(a, b, split_k=split_k, backend="torch"), a, b)


@pytest.mark.parametrize(("size", "longest"), [((8, 100), 384), ((100, 8), 384), ((9, 9), 2880)], ids=str)
def test_chunks_of_few_rows_in_fp64_are_short_on_a_cpu(size, longest, monkeypatch):
    lengths, multiply = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b, **rest: lengths.append(a.shape[2]) or multiply(a, b, **rest))
    a, b = operands((*size, 5760), torch.float64, torch.float64, "cpu")
    dk.matmul(a, b, split_k=2, backend="torch")
    assert max(lengths) == longest
    lengths.clear()
    dk.matmul(a.float(), b.float(), split_k=2, backend="torch")
    assert lengths == [2880]


@pytest.mark.parametrize("out_dtype", **ids(FLOATS))
@pytest.mark.parametrize("b_dtype", **ids(FLOATS))
@pytest.mark.parametrize("a_dtype", **ids(FLOATS))
def test_every_mix_of_float_dtypes(a_dtype, b_dtype, out_dtype, device, backend):
    a, b = operands((5, 9, 1037), a_dtype, b_dtype, device)
    if backend == "triton" and torch.float64 in (a_dtype, b_dtype) and a_dtype != b_dtype:
        with pytest.raises(ValueError, match=r"^backend must be auto or torch .* cannot multiply fp64 with another"):
            dk.matmul(a, b, out_dtype=out_dtype, backend=backend)
        return
    result = dk.matmul(a, b, out_dtype=out_dtype, backend=backend)
    assert_as_good_as_torch(result, a, b, out_dtype=out_dtype)


@pytest.mark.parametrize("a_dtype", **ids(FLOATS))
@pytest.mark.parametrize("b_dtype", **ids(FLOATS))
def test_the_default_result_dtype_is_torch_promotion(a_dtype, b_dtype, device):
    a, b = operands((2, 3, 4), a_dtype, b_dtype, device)
    assert dk.matmul(a, b).dtype == torch.promote_types(a_dtype, b_dtype)


@pytest.mark.parametrize("shape", [(3, 4, 0), (5, 6, 37), (1, 1, 1031)], ids=str)
@pytest.mark.parametrize("dtype", **ids(INTEGERS))
def test_integers_are_exact_and_wrap_like_torch(dtype, shape, device):
    if device.type == "cuda":
        with pytest.raises(TypeError, match=r"^a must be floating"):
            dk.matmul(*operands(shape, dtype, dtype, device))
        return
    a, b = operands(shape, dtype, dtype, device)
    bias = random((shape[1],), dtype, device)
    for config in torch_configs(shape[2]):
        assert torch.equal(dk.matmul(a, b, config=config), torch.mm(a, b))
        assert torch.equal(
            dk.matmul(a, b, bias=bias, alpha=3, beta=2, config=config), torch.addmm(bias, a, b, alpha=3, beta=2)
        )


@pytest.mark.parametrize("shape", [(3, 4, 0), (5, 6, 37), (16, 16, 4097)], ids=str)
@pytest.mark.parametrize("dtype", **ids(COMPLEX))
def test_complex(dtype, shape, device):
    a, b = operands(shape, dtype, dtype, device)
    bias = random((shape[1],), dtype, device)
    for config in torch_configs(shape[2]):
        result = dk.matmul(a.conj(), b, bias=bias, alpha=1 + 2j, beta=0.5, config=config)
        assert_as_good_as_torch(result, a.conj(), b, bias=bias, alpha=1 + 2j, beta=0.5)


@pytest.mark.parametrize("b_layout", LAYOUTS)
@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("dtype", **ids((torch.bfloat16, torch.float32)))
def test_every_stride(dtype, a_layout, b_layout, device, backend):
    a, b = operands((6, 10, 515), dtype, dtype, device)
    a, b = with_layout(a, a_layout), with_layout(b, b_layout)
    assert_as_good_as_torch(dk.matmul(a, b, backend=backend), a, b)
    assert_as_good_as_torch(dk.matmul(a, b, split_k=4, backend=backend), a, b)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
@pytest.mark.parametrize("dtype", **ids(FLOATS))
def test_every_epilogue(dtype, activation, device, backend):
    a, b = operands((7, 9, 301), dtype, dtype, device)
    a = a / 16
    biases = [random(shape, dtype, device, 5) for shape in ((9,), (1,), (), (7, 9), (7, 1), (1, 9))]
    for bias in (None, *biases):
        for alpha, beta in ((1.0, 1.0), (-0.5, 2.0)):
            epilogue = {"bias": bias, "alpha": alpha, "beta": beta, "activation": activation}
            assert_as_good_as_torch(dk.matmul(a, b, backend=backend, **epilogue), a, b, **epilogue)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_an_empty_product_is_the_activated_bias(activation, device, backend):
    a, b = torch.empty(3, 0, device=device), torch.empty(0, 4, device=device)
    bias = torch.tensor([-1.0, 0.0, 2.0, float("nan")], device=device)
    result = dk.matmul(a, b, bias=bias, beta=0.5, activation=activation, backend=backend)
    assert_as_good_as_torch(result, a, b, bias=bias, beta=0.5, activation=activation)


def test_bias_counts_for_nothing_where_beta_is_zero(device, backend):
    a, b = operands((3, 4, 65), torch.float32, torch.float32, device)
    bias = torch.full((4,), float("nan"), device=device)
    assert torch.equal(dk.matmul(a, b, bias=bias, beta=0, backend=backend), dk.matmul(a, b, backend=backend))


def test_alpha_zero_still_carries_nan(device, backend):
    a = torch.tensor([[float("nan")], [2.0]], device=device)
    result = dk.matmul(a, torch.ones(1, 1, device=device), alpha=0.0, backend=backend)
    assert torch.isnan(result[0, 0])
    assert result[1, 0] == 0


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
@pytest.mark.parametrize("dtype", **ids((*HALVES, torch.float32)))
@pytest.mark.parametrize("split_k", [None, 1, 3, 16])
def test_nan_and_infinity_stay_where_torch_has_them(dtype, activation, split_k, device, backend):
    a, b = operands((6, 7, 129), dtype, dtype, device)
    a[0, 3], a[1, 5], a[2, 100], a[3, 7], a[3, 90] = (float(v) for v in ("nan", "inf", "-inf", "inf", "-inf"))
    b[5, 2] = 0.0
    b[64, 6] = float("inf")
    result = dk.matmul(a, b, activation=activation, split_k=split_k, backend=backend)
    assert_as_good_as_torch(result, a, b, activation=activation)


def test_relu_keeps_nan_and_negative_zero_is_zero(device, backend):
    a = torch.tensor([[float("nan")], [-0.0], [-3.0]], device=device)
    result = dk.matmul(a, torch.ones(1, 2, device=device), activation="relu", backend=backend)
    assert torch.isnan(result[0]).all()
    assert torch.equal(result[1:], torch.zeros(2, 2, device=device))


def test_one_rounding_only(device, backend):
    # 256 + 1 + 1: bf16 would lose each 1 if a partial sum, or the product before the bias, were rounded.
    a = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16, device=device)
    b = torch.ones(2, 1, dtype=torch.bfloat16, device=device)
    bias = torch.ones(1, dtype=torch.bfloat16, device=device)
    for split_k in (1, 2):
        assert dk.matmul(a, b, bias=bias, split_k=split_k, backend=backend).item() == 258.0


def test_half_operands_do_not_overflow_before_the_rounding(device, backend):
    a = torch.full((1, 64), 300.0, dtype=torch.float16, device=device)
    b = torch.full((64, 1), 300.0, dtype=torch.float16, device=device)
    assert dk.matmul(a, b, alpha=2.0**-10, backend=backend).item() == 5624.0
    assert dk.matmul(a, b, out_dtype=torch.float32, backend=backend).item() == 64 * 300.0 * 300.0


def test_a_batch_of_rows_and_a_bias_of_its_shape(device, backend):
    a = random((2, 3, 5, 130), torch.float32, device)
    b = random((130, 7), torch.float32, device, 1)
    for bias_shape in ((7,), (1, 7), (5, 7), (3, 1, 7), (2, 3, 5, 7), (1, 1, 5, 1), ()):
        bias = random(bias_shape, torch.float32, device, 2)
        result = dk.matmul(a, b, bias=bias, activation="silu", backend=backend)
        assert_as_good_as_torch(result, a, b, bias=bias, activation="silu")
    turned = a.transpose(0, 2)
    assert_as_good_as_torch(dk.matmul(turned, b, backend=backend), turned, b)


@pytest.mark.parametrize("x_shape", [(), (1,), (4,), (2, 3), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_linear(x_shape, has_bias, device, backend):
    x = random((*x_shape, 517), torch.bfloat16, device)
    weight = random((11, 517), torch.bfloat16, device, 1)
    bias = random((11,), torch.bfloat16, device, 2) if has_bias else None
    result = dk.linear(x, weight, bias, activation="gelu", backend=backend)
    assert result.shape == torch.nn.functional.linear(x, weight, bias).shape
    if x_shape == ():
        x, result = x[None], result[None]
    assert_as_good_as_torch(result, x, weight.t(), bias=bias, activation="gelu")


def test_a_long_k_needs_no_second_copy_of_half_operands(device):
    a, b = operands((1, 1, (1 << 21) + 3), torch.bfloat16, torch.bfloat16, device)
    for split_k in (1, 3, 4096):
        assert_as_good_as_torch(
            dk.matmul(a, b, split_k=split_k, out_dtype=torch.float32), a, b, out_dtype=torch.float32
        )


@pytest.mark.parametrize("dtype", **ids((*HALVES, torch.float32)))
@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}, {"split_k": 3}], ids=str)
def test_gelu_of_infinity_is_infinity(dtype, options, device, backend):
    """On some processors torch's own makes NaN of it, in vectors of some dtypes, which a tangent goes by."""
    a, b = operands((6, 7, 129), dtype, dtype, device)
    a[1, 5], a[2, 6] = float("inf"), float("inf")
    b[5:7] = 1.0
    assert bool((dk.matmul(a, b, activation="gelu", backend=backend, **options)[1:3] == torch.inf).all())
    with forward_ad.dual_level():
        dual = dk.matmul(forward_ad.make_dual(a, torch.zeros_like(a)), b, activation="gelu")
        assert bool((forward_ad.unpack_dual(dual).primal[1:3] == torch.inf).all())
