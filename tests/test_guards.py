"""Calls recognised by torch's guards: they have the bits of the long way, and whatever differs goes that way."""

from __future__ import annotations

import contextlib

import numpy
import pytest
import torch

import decompose_k as dk
from decompose_k import api, calls, guards
from decompose_k.arguments import MATMUL
from decompose_k.calls import CALLS, settings_in
from decompose_k.config import Config
from decompose_k.execute import default_precision
from decompose_k.guards import guard
from guards_for_tests import (
    BF16,
    DEFAULTS,
    MM,
    A,
    B,
    by_the_long_way,
    needs_guards,
    operands,
    product,
    warm,
    warm_blindly,
)


@needs_guards
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_third_like_call_needs_no_key_and_has_the_bits_of_the_first(dtype, activation, keys):
    a, b = operands(dtype=dtype)
    first = by_the_long_way(a, b, activation=activation, config=MM)
    dk.matmul(a, b, activation=activation, config=MM)
    keys.clear()
    assert torch.equal(dk.matmul(a, b, activation=activation, config=MM), first)
    assert keys == []


@needs_guards
@pytest.mark.parametrize("shape", [(6, 64), (2, 3, 64), (2, 1, 3, 64)], ids=str)
def test_a_third_like_linear_needs_no_key_and_has_the_shape_of_the_first(shape, keys):
    x, weight = torch.randn(shape), torch.randn(24, 64)
    first = by_the_long_way(x, weight, call=dk.linear)
    dk.linear(x, weight)
    keys.clear()
    again = dk.linear(x, weight)
    assert keys == []
    assert torch.equal(again, first)
    assert again.shape == (*shape[:-1], 24)


@needs_guards
def test_other_data_at_another_place_is_read(keys):
    a, b = operands()
    warm(a, b)
    keys.clear()
    other = torch.randn_like(a)
    torch.testing.assert_close(dk.matmul(other, b), other @ b)
    assert keys == []


HALF = operands(dtype=BF16)
OTHER_OPERANDS = {
    "other_n": operands(n=25),
    "other_k": operands(k=80),
    "other_dtype": HALF,
    "one_other_dtype": (HALF[0], B),
    "column_a": (A.T.contiguous().T, B),
    "column_b": (A, B.T.contiguous().T),
    "expanded_a": (A[:1].expand(6, 64), B),
    "negated_a": (torch._neg_view(A), B),
    "zeros_that_torch_imagines": (torch._efficientzerotensor((6, 64)), B),
    "parameter": (A, torch.nn.Parameter(B)),
    "unaligned": (torch.cat([A.flatten()[:1], A.flatten()])[1:].view(6, 64), B),
}
OTHER_OPTIONS = {
    "alpha": {"alpha": 2.0},
    "beta": {"beta": 0.0},
    "bias": {"bias": torch.randn(24)},
    "activation": {"activation": "relu"},
    "out_dtype": {"out_dtype": BF16},
    "precision": {"precision": "ieee"},
    "batch_invariant": {"batch_invariant": True},
    "split_k": {"split_k": 4},
    "backend": {"backend": "torch"},
    "config": {"config": Config("bmm_sum", split_k=8)},
}


@pytest.mark.parametrize("m", [1, 5, 7, 8, 9, 64])
def test_other_numbers_of_rows_have_the_bits_of_the_long_way(m):
    a, b = operands(m=m)
    expected = by_the_long_way(a, b)
    CALLS.cache_clear()
    warm(*operands())
    assert all(torch.equal(dk.matmul(a, b), expected) for _ in range(3))


@needs_guards
@pytest.mark.parametrize("pair", OTHER_OPERANDS.values(), ids=OTHER_OPERANDS)
@pytest.mark.usefixtures("either_way")
def test_other_operands_give_what_they_give_by_the_long_way(pair):
    expected = by_the_long_way(*pair)
    CALLS.cache_clear()
    warm_blindly(A, B, by_address=True)
    for _ in range(3):
        result = dk.matmul(*pair)
        assert result.requires_grad == expected.requires_grad
        assert torch.equal(result, expected)


@needs_guards
@pytest.mark.parametrize("options", OTHER_OPTIONS.values(), ids=OTHER_OPTIONS)
@pytest.mark.usefixtures("either_way")
def test_other_options_give_what_they_give_by_the_long_way(options):
    expected = by_the_long_way(A, B, **options)
    CALLS.cache_clear()
    warm_blindly(A, B)
    for _ in range(3):
        result = dk.matmul(A, B, **options)
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)


BIASES = {
    "columns": torch.randn(24),
    "one": torch.randn(1),
    "scalar": torch.randn(()),
    "strided": torch.randn(48)[::2],
    "half": torch.randn(24).to(BF16),
    "rows": torch.randn(6, 1),
    "full": torch.randn(6, 24),
}


@needs_guards
@pytest.mark.parametrize("options", OTHER_OPTIONS.values(), ids=OTHER_OPTIONS)
@pytest.mark.usefixtures("either_way")
def test_plain_calls_are_not_taken_for_those_with_options(options):
    warm_blindly(A, B, **options)
    torch.testing.assert_close(dk.matmul(A, B), A @ B)


@needs_guards
@pytest.mark.parametrize("other", BIASES.values(), ids=[f"then_{name}" for name in BIASES])
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
@pytest.mark.usefixtures("either_way")
def test_every_kind_of_bias_is_told_from_every_other(bias, other):
    expected = by_the_long_way(A, B, bias=other)
    CALLS.cache_clear()
    if bias is other:
        warm(A, B, bias=bias)
    else:
        warm_blindly(A, B, bias=bias)
    assert all(torch.equal(dk.matmul(A, B, bias=other), expected) for _ in range(3))


@needs_guards
def test_a_parameter_without_recording_needs_no_key(keys):
    weight = torch.nn.Parameter(B.clone())
    with torch.no_grad():
        warm(A, weight)
        keys.clear()
        dk.matmul(A, weight)
    assert keys == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"batch_invariant": True}, {"batch_invariant": 1}),
        ({}, {"batch_invariant": 0}),
        ({"static_b": True}, {"static_b": 1}),
        ({"split_k": 1}, {"split_k": True}),
        ({"split_k": 4}, {"split_k": 4.0}),
        ({"config": MM}, {"split_k": 1.0}),
    ],
    ids=str,
)
def test_what_equals_an_argument_does_not_pass_for_it(right, wrong):
    warm(A, B, **right)
    with pytest.raises(TypeError, match=next(iter(wrong))):
        dk.matmul(A, B, **wrong)


EQUALS = {
    "alpha": (1.0, (1, True)),
    "beta": (0.0, (0, False)),
    "batch_invariant": (True, (1, 1.0)),
    "static_b": (False, (0, 0.0)),
    "static_weight": (False, (0, 0.0)),
    "split_k": (4, (4.0, 4 + 0j, numpy.int64(4))),
    "split_k of one": (1, (True, 1.0)),
}
EQUALS_OF_CALLS = {
    f"{call.__name__}-{name}": (call, name.split()[0], *values)
    for call, lacking in ((dk.matmul, {"static_weight"}), (dk.linear, {"alpha", "beta", "static_b"}))
    for name, values in EQUALS.items()
    if name not in lacking
}


@pytest.mark.parametrize(("call", "name", "right", "wrong"), EQUALS_OF_CALLS.values(), ids=EQUALS_OF_CALLS)
def test_a_guarded_call_is_not_taken_for_what_equals_its_arguments(call, name, right, wrong, monkeypatch):
    """What a call finds under an equal key gives NaN, and only the exact arguments may have it."""
    operands = (A, B) if call is dk.matmul else (A, B.T)
    asked = []

    class Found(dict):
        def get(self, key):
            asked.append(hash(key))
            return lambda a, b, bias: torch.full((6, 24), float("nan"))

    monkeypatch.setattr(api, "GUARDED", Found())
    assert call(*operands, **{name: right}).isnan().all()
    for value in wrong:
        with contextlib.suppress(TypeError, ValueError):
            assert not call(*operands, **{name: value}).isnan().any()
    assert len(set(asked)) == 1


@pytest.mark.parametrize(
    "wrong", [{"activation": ["relu"]}, {"bias": 3}, {"precision": "no"}, {"precision": "highest"}], ids=str
)
def test_wrong_arguments_are_refused_as_ever(wrong):
    warm(A, B)
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        dk.matmul(A, B, **wrong)
    with pytest.raises(TypeError, match="a must be"):
        dk.matmul(A.numpy(), B)


def test_the_setting_of_products_is_seen(keys):
    warm(A, B)
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    keys.clear()
    setting.fp32_precision = "tf32"
    try:
        dk.matmul(A, B)
    finally:
        setting.fp32_precision = before
    assert len(keys) == 1


@needs_guards
@pytest.mark.parametrize("owner", ["cuda", "mkldnn"])
def test_what_was_planned_under_a_setting_is_not_run_under_another(owner, monkeypatch):
    """Also where the setting changes while the shortcut runs that a guard is then made for."""
    setting = getattr(torch.backends, owner).matmul
    before = setting.fp32_precision
    warm(A, B)
    CALLS.guarded.clear()
    (shortcuts,) = CALLS._shortcuts.values()

    def changing(*arguments):
        setting.fp32_precision = "tf32"
        return shortcuts.for_matmul(*arguments)

    for key in CALLS._shortcuts:
        monkeypatch.setitem(CALLS._shortcuts, key, shortcuts._replace(for_matmul=changing))
    try:
        dk.matmul(A, B)
        assert setting.fp32_precision == "tf32"
        (guarded,) = CALLS.guarded.values()
        assert guarded(A, B, None) is None
        setting.fp32_precision = before
        assert torch.equal(guarded(A, B, None), A @ B)
    finally:
        setting.fp32_precision = before


def test_halves_do_not_depend_on_the_setting_of_cuda():
    assert settings_in(calls.call_key(*HALF, None, *DEFAULTS, MATMUL))[0] is None
    assert settings_in(calls.call_key(A, B, None, *DEFAULTS, MATMUL))[0] == default_precision()


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_a_batch_with_odd_strides_of_single_rows_has_the_bits_of_the_first_call(dtype):
    weight = torch.randn(64, 1024).to(dtype)
    whole = torch.randn(3, 34, 1024).to(dtype)
    for x in (whole[1:2, :17], whole[1:2, -1:], whole[:1, :1], whole[1:2, None, :17]):
        assert x.is_contiguous()
        first = by_the_long_way(x, weight, call=dk.linear)
        assert all(torch.equal(dk.linear(x, weight), first) for _ in range(3))


def guarded_by_address(a, b, bias=None):
    shape, settings = (a.shape[0], b.shape[1]), (None, None)
    return guard(product, a, b, bias, a.shape[0], shape, by_address=True, settings=settings)


@needs_guards
def test_a_shortcut_by_address_wants_aligned_memory():
    call = guarded_by_address(A, B)
    unaligned_a, b = OTHER_OPERANDS["unaligned"]
    freed = A.clone()
    freed.untyped_storage().resize_(0)
    assert torch.equal(call(A, B, None), A @ B)
    assert call(unaligned_a, b, None) is None
    assert call(freed, b, None) is None
    with_bias = guarded_by_address(A, B, torch.ones(24))
    assert torch.equal(with_bias(A, B, torch.ones(24)), A @ B)
    assert with_bias(A, B, torch.ones(25)[1:]) is None


def test_a_shortcut_by_address_wants_the_current_device(monkeypatch):
    monkeypatch.setattr(guards, "current_device", lambda: 1)
    assert guards._are_reachable(A, B, None, 1)
    assert not guards._are_reachable(A, B, None, 0)
