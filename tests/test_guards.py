"""Calls recognised by torch's guards: they have the bits of the long way, and whatever differs goes that way."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import decompose_k as dk
from decompose_k import api, calls, guards
from decompose_k.calls import CALLS
from decompose_k.config import Config
from decompose_k.execute import default_precision
from decompose_k.guards import guard
from decompose_k.plan import forget_choices

BF16 = torch.bfloat16
MM = Config("mm")

pytestmark = pytest.mark.skipif(guards._guards is None, reason="this torch has no such guards")


@pytest.fixture(autouse=True)
def nothing_remembered():
    CALLS.cache_clear()


@pytest.fixture
def keys(monkeypatch):
    """Every key that was asked for: a call recognised by its guards asks for none."""
    asked = []

    def ask(*arguments):
        asked.append(calls.call_key(*arguments))
        return asked[-1]

    monkeypatch.setattr(api, "call_key", ask)
    return asked


def operands(m=6, n=24, k=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(m * n * k)
    return tuple(torch.randn(*shape, generator=generator).to(dtype) for shape in ((m, k), (k, n)))


def warm(*arguments, call=dk.matmul, **options):
    for _ in range(3):
        result = call(*arguments, **options)
    return result


def by_the_long_way(*arguments, call=dk.matmul, **options):
    CALLS.cache_clear()
    return call(*arguments, **options)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_third_like_call_needs_no_key_and_has_the_bits_of_the_first(dtype, activation, keys):
    a, b = operands(dtype=dtype)
    first = by_the_long_way(a, b, activation=activation, config=MM)
    dk.matmul(a, b, activation=activation, config=MM)
    keys.clear()
    assert torch.equal(dk.matmul(a, b, activation=activation, config=MM), first)
    assert keys == []


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


def test_other_data_at_another_place_is_read(keys):
    a, b = operands()
    warm(a, b)
    keys.clear()
    other = torch.randn_like(a)
    torch.testing.assert_close(dk.matmul(other, b), other @ b)
    assert keys == []


A, B = operands()
HALF = operands(dtype=BF16)
OTHER_OPERANDS = {
    "fewer_rows": (A[:5], B),
    "more_rows": operands(m=7),
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


@pytest.mark.parametrize("pair", OTHER_OPERANDS.values(), ids=OTHER_OPERANDS)
def test_other_operands_give_what_they_give_by_the_long_way(pair):
    expected = by_the_long_way(*pair)
    CALLS.cache_clear()
    warm(A, B)
    for _ in range(3):
        result = dk.matmul(*pair)
        assert result.requires_grad == expected.requires_grad
        assert torch.equal(result, expected)
    torch.testing.assert_close(dk.matmul(A, B), A @ B)


@pytest.mark.parametrize("options", OTHER_OPTIONS.values(), ids=OTHER_OPTIONS)
def test_other_options_give_what_they_give_by_the_long_way(options):
    expected = by_the_long_way(A, B, **options)
    CALLS.cache_clear()
    warm(A, B)
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


@pytest.mark.parametrize("other", BIASES.values(), ids=[f"then_{name}" for name in BIASES])
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_every_kind_of_bias_is_told_from_every_other(bias, other):
    expected = by_the_long_way(A, B, bias=other)
    CALLS.cache_clear()
    warm(A, B, bias=bias)
    assert all(torch.equal(dk.matmul(A, B, bias=other), expected) for _ in range(3))


@pytest.mark.parametrize("weight", [B, torch.nn.Parameter(B)], ids=["tensor", "parameter"])
def test_gradients_are_recorded_after_calls_that_recorded_none(weight):
    weight = weight.detach().clone().requires_grad_() if weight.requires_grad else weight
    for silent in (torch.no_grad, torch.inference_mode):
        with silent():
            assert not warm(A, weight).requires_grad
    assert dk.matmul(A, weight).requires_grad == weight.requires_grad
    assert dk.matmul(A.clone().requires_grad_(), weight).requires_grad
    bias = torch.zeros(24, requires_grad=True)
    with torch.no_grad():
        warm(A, B, bias=bias)
    assert dk.matmul(A, B, bias=bias).requires_grad


def test_a_parameter_without_recording_needs_no_key(keys):
    weight = torch.nn.Parameter(B.clone())
    with torch.no_grad():
        warm(A, weight)
        keys.clear()
        dk.matmul(A, weight)
    assert keys == []


def test_a_tangent_is_seen():
    warm(A, B)
    with forward_ad.dual_level():
        result = dk.matmul(forward_ad.make_dual(A, torch.ones_like(A)), B)
        torch.testing.assert_close(forward_ad.unpack_dual(result).tangent, torch.ones_like(A) @ B)


def test_transforms_are_seen():
    warm(A, B)
    batch = torch.randn(3, 6, 64)
    torch.testing.assert_close(torch.vmap(dk.matmul, (0, None))(batch, B), batch @ B)
    gradient = torch.func.grad(lambda a: dk.matmul(a, B).sum())(A)
    torch.testing.assert_close(gradient, torch.ones(6, 24) @ B.T)


def test_autocast_is_seen():
    warm(A, B)
    with torch.autocast("cpu", dtype=BF16):
        assert dk.matmul(A, B).dtype == BF16
    assert dk.matmul(A, B).dtype == torch.float32


def test_dispatch_modes_are_seen():
    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            heard.append(function)
            return function(*arguments, **(keywords or {}))

    heard = []
    warm(A, B)
    with Listen():
        dk.matmul(A, B)
    assert heard


def test_recordings_are_seen():
    warm(A, B)
    with dk.record() as problems:
        dk.matmul(A, B)
    assert len(problems) == 1


@pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tracers_are_seen():
    warm(A, B)
    other = torch.randn_like(A)
    traced = torch.jit.trace(lambda a: dk.matmul(a, B), (A,), check_trace=False)
    torch.testing.assert_close(traced(other), other @ B)
    compiled = torch.compile(lambda a: dk.matmul(a, B), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(other), other @ B)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"batch_invariant": True}, {"batch_invariant": 1}),
        ({}, {"batch_invariant": 0}),
        ({"static_b": True}, {"static_b": 1}),
        ({"split_k": 1}, {"split_k": True}),
    ],
    ids=str,
)
def test_what_equals_an_argument_does_not_pass_for_it(right, wrong):
    warm(A, B, **right)
    with pytest.raises(TypeError, match=next(iter(wrong))):
        dk.matmul(A, B, **wrong)


@pytest.mark.parametrize("wrong", [{"activation": ["relu"]}, {"bias": 3}, {"precision": "no"}], ids=str)
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


@pytest.mark.parametrize("dtypes", itertools.product([BF16, torch.float32], repeat=2), ids=str)
def test_on_a_gpu_the_setting_counts_for_fp32_operands(dtypes, monkeypatch):
    a, b = (torch.ones(4, 4, dtype=dtype) for dtype in dtypes)
    monkeypatch.setattr(torch.Tensor, "device", property(lambda _: torch.device("cuda")))
    assert guards._settings_of(a, b) is (default_precision if torch.float32 in dtypes else None)


def test_forgetting_forgets():
    warm(A, B)
    forget_choices()
    assert CALLS._guarded == {}


def test_nothing_is_held_in_memory():
    a, b = operands()
    warm(a, b)
    held = [weakref.ref(a), weakref.ref(b)]
    del a, b
    gc.collect()
    assert [reference() for reference in held] == [None, None]


def test_the_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(calls, "MOST_CALLS", 3)
    for m in range(1, 9):
        warm(*operands(m=m))
        assert len(CALLS._guarded) <= 3


@pytest.mark.parametrize("guards_of_torch", [None, lambda *tensors: None], ids=["none", "other_arguments"])
def test_without_such_guards_every_call_goes_by_its_key(guards_of_torch, monkeypatch, keys):
    monkeypatch.setattr(guards, "_guards", guards_of_torch)
    torch.testing.assert_close(warm(A, B), A @ B)
    assert len(keys) == 3
    assert CALLS._guarded == {}


def product(a, b, bias, m):
    return a @ b


def guarded_by_address(a, b, bias=None):
    return guard(product, a, b, bias, a.shape[0], (a.shape[0], b.shape[1]), by_address=True)


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
