"""The shortcut for repeated calls: what its key tells apart, what it does not, and which calls may not take it."""

from __future__ import annotations

import pytest
import torch

import decompose_k as dk
from decompose_k import calls, execute
from decompose_k.arguments import LINEAR, MATMUL
from decompose_k.calls import CALLS, Calls, call_key
from decompose_k.config import Config
from decompose_k.execute import Shortcuts, default_precision
from decompose_k.reference import torch_shortcuts

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def cpu_counts_as_gpu(monkeypatch):
    """A key needs no GPU, only the check for one does."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: self.device.type == "cpu"))
    monkeypatch.setattr(calls, "current_device", lambda: -1)


def operands(m=5, n=24, k=64, dtype=BF16):
    return torch.ones(m, k, dtype=dtype), torch.ones(k, n, dtype=dtype)


def key(a=None, b=None, bias=None, **changes):
    if a is None:
        a, b = operands()
    options = {
        "alpha": 1.0,
        "beta": 1.0,
        "activation": None,
        "out_dtype": None,
        "precision": None,
        "batch_invariant": False,
        "static_b": False,
        "split_k": None,
        "backend": "auto",
        "config": None,
        "names": MATMUL,
    }
    return call_key(a, b, bias, **(options | changes))


OPTIONS = {
    "alpha": {"alpha": 2.0},
    "beta": {"beta": 0.0},
    "activation": {"activation": "relu"},
    "out_dtype": {"out_dtype": torch.float32},
    "precision": {"precision": "ieee"},
    "batch_invariant": {"batch_invariant": True},
    "static_b": {"static_b": True},
    "split_k": {"split_k": 1},
    "split_k_as_true": {"split_k": True},
    "backend": {"backend": "torch"},
    "config": {"config": Config("pair")},
    "linear": {"names": LINEAR},
}
OPERANDS = {
    "m_of_another_bucket": operands(m=9),
    "n": operands(n=25),
    "k": operands(k=80),
    "dtype": operands(dtype=torch.float16),
    "b_dtype": (operands()[0], operands(dtype=torch.float32)[1]),
    "column_a": (torch.ones(64, 5, dtype=BF16).T, operands()[1]),
    "column_b": (operands()[0], torch.ones(24, 64, dtype=BF16).T),
    "padded_a": (torch.ones(5, 72, dtype=BF16)[:, :64], operands()[1]),
    "expanded_b": (operands()[0], torch.ones(64, 1, dtype=BF16).expand(64, 24)),
}
BIASES = {
    "none": None,
    "columns": torch.ones(24, dtype=BF16),
    "fp32": torch.ones(24),
    "one": torch.ones(1, dtype=BF16),
    "every_second": torch.ones(48, dtype=BF16)[::2],
    "rows": torch.ones(5, 1, dtype=BF16),
    "full": torch.ones(5, 24, dtype=BF16),
}


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_every_argument_counts(changes):
    assert key(**changes) not in (None, key())


@pytest.mark.parametrize("name", ["batch_invariant", "static_b"])
@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_what_only_passes_for_a_bool_goes_the_long_way(name, value):
    assert key(**{name: value}) is None


@pytest.mark.parametrize("pair", OPERANDS.values(), ids=OPERANDS)
def test_every_fact_of_the_operands_counts(pair):
    assert key(*pair) not in (None, key())


def test_every_kind_of_bias_counts():
    keys = [key(*operands(), bias=bias) for bias in BIASES.values()]
    assert None not in keys
    assert len(set(keys)) == len(BIASES)


def test_the_default_precision_counts_for_fp32_alone(monkeypatch):
    full = operands(dtype=torch.float32)
    before, before_half = key(*full), key()
    monkeypatch.setattr(calls, "default_precision", lambda: "tf32")
    assert key(*full) != before
    assert key() == before_half


@pytest.mark.parametrize("m", [6, 7, 8])
def test_a_bucket_of_m_shares_a_key(m):
    assert key(*operands(m=m)) == key(*operands(m=5))


@pytest.mark.parametrize("shape", [(5, 24), (5, 1)], ids=str)
def test_a_bias_with_rows_ties_the_key_to_m(shape):
    bias = torch.ones(shape, dtype=BF16)
    assert key(*operands(m=5), bias=bias) != key(*operands(m=6), bias=bias)


def test_values_and_addresses_do_not_count():
    a, b = operands()
    assert key(a, b) == key(a + 1, b.clone())


class Own(torch.Tensor):
    pass


def unaligned():
    return torch.ones(5 * 64 + 1, dtype=BF16)[1:].view(5, 64)


LONG_WAY = {
    "own_class": lambda a, b: (torch.Tensor._make_subclass(Own, a), b),
    "meta": lambda a, b: (a.to("meta"), b),
    "one_dimension": lambda a, b: (a[0], b),
    "three_dimensions": lambda a, b: (a[None], b),
    "no_rows": lambda a, b: (a[:0], b),
    "no_columns": lambda a, b: (a, b[:, :0]),
    "negated": lambda a, b: (a, torch.ones(64, 24, dtype=torch.complex64).conj().imag),
    "imagined_zeros": lambda a, b: (torch._efficientzerotensor(tuple(a.shape), dtype=BF16), b),
    "unaligned": lambda _, b: (unaligned(), b),
    "needs_gradient": lambda a, b: (a, b.requires_grad_()),
    "no_tensor": lambda a, b: ([[1.0]], b),
}


@pytest.mark.parametrize("change", LONG_WAY.values(), ids=LONG_WAY)
def test_operands_that_go_the_long_way(change):
    a, b = operands()
    assert key(*change(a, b)) is None


def test_a_parameter_takes_the_shortcut_where_no_gradient_is_recorded():
    a, b = operands()
    with torch.no_grad():
        assert key(a, torch.nn.Parameter(b)) == key(a, b)


@pytest.mark.parametrize(
    "changes", [{"alpha": 2}, {"alpha": True}, {"beta": 1j}, {"alpha": 0.0}, {"alpha": -0.0}], ids=str
)
def test_factors_that_go_the_long_way(changes):
    assert key(**changes) is None


def test_a_bias_of_another_class_goes_the_long_way():
    assert key(*operands(), bias=torch.Tensor._make_subclass(Own, torch.ones(24))) is None


class Elsewhere:
    """A tensor of another kind of device, which has an index too."""

    is_cuda = is_cpu = False
    dtype = torch.bfloat16

    def get_device(self):
        return 0


def test_other_devices_go_the_long_way_and_no_gpu_is_asked(monkeypatch):
    def refuse():
        raise AssertionError("torch was not compiled with CUDA")

    monkeypatch.setattr(calls, "current_device", refuse)
    monkeypatch.setattr(calls, "PLAIN_TYPES", frozenset({Elsewhere}))
    assert key(Elsewhere(), Elsewhere()) is None


@pytest.mark.parametrize("place", [("cuda", "matmul"), ("mkldnn", "matmul")], ids=str)
@pytest.mark.parametrize("setting", ["ieee", "tf32", "none"])
def test_settings_read_directly_are_those_of_torch(place, setting):
    backend = getattr(getattr(torch.backends, place[0]), place[1])
    before = backend.fp32_precision
    try:
        backend.fp32_precision = setting
        assert execute._product_setting(*place) == execute._read_setting(*place) == backend.fp32_precision
    finally:
        backend.fp32_precision = before


def test_transforms_modes_and_autocast_go_the_long_way():
    a, b = operands()
    seen = []
    torch.func.vmap(lambda x: (seen.append(key(a, x)), x)[1])(torch.ones(2, 64, 24, dtype=BF16))
    with torch._subclasses.FakeTensorMode():
        seen.append(key(a, b))
    with torch.autograd.forward_ad.dual_level():
        seen.append(key(a, b))
    with dk.record():
        seen.append(key(a, b))
    with torch.autocast("cpu", dtype=BF16):
        seen.append(key(a, b))
    torch.set_autocast_enabled("cuda", True)
    try:
        seen.append(key(a, b))
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert seen == [None] * 6
    assert key(a, b) is not None


@pytest.mark.parametrize("names", [MATMUL, LINEAR], ids=["matmul", "linear"])
def test_a_shortcut_is_found_until_forgotten(names):
    found = Calls()
    found.keeper(key(names=names))(SHORTCUTS)
    assert found.find(key(names=names)) == SHORTCUTS
    assert found.find(key(names=names, activation="relu")) is None
    found.cache_clear()
    assert found.find(key(names=names)) is None


def for_matmul(a, b, _bias, _m):
    return torch.mm(a, b)


def for_linear(x, weight, _bias, _m):
    return torch.nn.functional.linear(x, weight)


SHORTCUTS = Shortcuts(for_matmul, for_linear, None, None, by_address=False)


def test_rows_of_a_batch_share_the_key_of_as_many_rows():
    x, weight = torch.ones(2, 3, 64, dtype=BF16), operands()[1].T
    assert key(x, weight, names=LINEAR) == key(x.view(6, 64), weight, names=LINEAR)
    assert key(x, operands()[1]) is None
    assert key(x.transpose(0, 1), weight, names=LINEAR) is None
    assert key(x[:, :, :32], weight[:, :32], names=LINEAR) is None


@pytest.mark.parametrize("shape", [(1, 24), (3, 24), (3, 1), (2, 1, 24), (2, 3, 24)], ids=str)
def test_a_bias_with_rows_beside_a_batch_goes_the_long_way(shape):
    x, weight = torch.ones(2, 3, 64, dtype=BF16), operands()[1].T
    assert key(x, weight, torch.ones(shape, dtype=BF16), names=LINEAR) is None


@pytest.mark.parametrize("bias", [None, (), (1,), (24,), (48,)], ids=str)
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_a_repeated_linear_has_the_bits_of_the_first(bias, rank, dtype):
    """The torch shortcut: GPU rules on CPU tensors, so addmm is allowed."""
    x = torch.randn((2, 3, 64) if rank == 3 else (2, 1, 3, 64) if rank == 4 else (6, 64)).to(dtype)
    weight = torch.randn(24, 64).to(dtype)
    if bias is not None:
        bias = torch.randn(bias).to(dtype)
        bias = bias[::2] if bias.shape == (48,) else bias
    CALLS.cache_clear()
    results = [dk.linear(x, weight, bias, config=Config("mm")) for _ in range(3)]
    assert len(CALLS) == 1
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("out_dtype", [BF16, torch.float32], ids=str)
def test_the_precision_of_a_cpu_counts(out_dtype, monkeypatch):
    monkeypatch.undo()
    a, b = operands(m=4, k=256)
    first = dk.matmul(a, b, out_dtype=out_dtype, config=Config("mm"))
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert torch.equal(dk.matmul(a, b, out_dtype=out_dtype, config=Config("mm")), first)
        assert key(a, b) != before_key(a, b, before)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


def before_key(a, b, setting):
    found = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = setting
    try:
        return key(a, b)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = found


@pytest.mark.parametrize("m", [1, 5, 8, 700])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("b_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
def test_a_repeated_product_on_a_cpu_has_the_bits_of_the_first(m, dtype, b_dtype, out_dtype, monkeypatch):
    monkeypatch.undo()
    a, b = torch.randn(m, 512).to(dtype), torch.randn(512, 24).to(b_dtype or dtype)
    for options in ({}, {"activation": "relu"}, {"bias": torch.randn(24).to(dtype)}, {"alpha": 0.5}):
        CALLS.cache_clear()
        results = [dk.matmul(a, b, out_dtype=out_dtype, **options) for _ in range(3)]
        assert all(torch.equal(results[0], result) for result in results)
        results = [dk.linear(a, b.T.contiguous(), out_dtype=out_dtype) for _ in range(3)]
        assert all(torch.equal(results[0], result) for result in results)


def test_the_alignment_of_m_counts_where_it_is_a_stride():
    wide = torch.ones(64, 40, dtype=BF16)
    b = operands()[1]
    assert key(wide[:, :20].T, b) != key(wide[:, :32].T, b)
    assert key(wide[:, :20].T, b) == key(wide[:, :24].T, b)


def test_a_shortcut_to_a_choice_that_was_forgotten_meanwhile_is_not_kept():
    found = Calls()
    keep = found.keeper(key())
    found.cache_clear()
    keep(SHORTCUTS)
    assert found.find(key()) is None


@pytest.mark.parametrize("setting", ["ieee", "tf32"])
def test_the_precision_is_that_of_the_backend_whatever_the_older_setting_says(setting):
    matmul = torch.backends.cuda.matmul
    before, backend_before = torch.get_float32_matmul_precision(), matmul.fp32_precision
    torch.set_float32_matmul_precision("high" if setting == "ieee" else "highest")
    matmul.fp32_precision = setting
    try:
        assert default_precision() == ("tf32" if setting == "tf32" else "highest")
    finally:
        torch.set_float32_matmul_precision(before)
        matmul.fp32_precision = backend_before


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("bias", [None, torch.ones(24)], ids=["bare", "bias"])
@pytest.mark.parametrize("factors", [(1.0, 1.0), (2.0, 0.5)], ids=str)
def test_torch_shortcuts_are_the_product(activation, bias, factors):
    a, b = torch.randn(6, 64), torch.randn(64, 24)
    alpha, beta = factors
    epilogue = {"alpha": alpha, "beta": beta, "activation": activation}
    found = torch_shortcuts(Config("mm"), a, b, bias, out_dtype=torch.float32, **epilogue)
    if found is None:
        assert (bias, factors) == (None, (2.0, 0.5))
        return
    for_matmul, for_linear, direct_matmul, direct_linear = found
    expected = dk.matmul(a, b, bias=bias, **epilogue)
    torch.testing.assert_close(for_matmul(a, b, bias, 6), expected)
    assert (direct_matmul is None) == (bias is not None or activation is not None)
    assert (direct_linear is None) == (activation is not None)
    if direct_matmul is not None:
        torch.testing.assert_close(direct_matmul(a, b), expected)
    if factors == (1.0, 1.0):
        x = a.view(2, 3, 64)
        torch.testing.assert_close(for_linear(x, b.T, bias, 6).view(6, 24), expected)
        if direct_linear is not None:
            torch.testing.assert_close(direct_linear(x, b.T, bias).view(6, 24), expected)


def test_what_torch_does_in_several_calls_has_no_shortcut():
    a, b = operands()
    plain = {"alpha": 1.0, "beta": 1.0, "activation": None, "out_dtype": BF16}
    assert torch_shortcuts(Config("mm"), a, b, None, **plain) is not None
    for config, changes in (
        (Config("bmm_sum"), {}),
        (Config("mm"), {"activation": "gelu"}),
        (Config("mm"), {"out_dtype": torch.float64}),
        (Config("mm"), {"alpha": 0.5}),
    ):
        assert torch_shortcuts(config, a, b, None, **(plain | changes)) is None
    assert torch_shortcuts(Config("mm"), a, b.float(), None, **(plain | {"out_dtype": torch.float32})) is None
    complex_operands = (a.to(torch.complex64), b.to(torch.complex64), torch.ones(24, dtype=torch.complex64))
    assert torch_shortcuts(Config("mm"), *complex_operands, **(plain | {"out_dtype": torch.complex64})) is None
    assert torch_shortcuts(Config("mm"), a, b, torch.ones(24), **plain) is None


def test_what_cannot_be_hashed_is_left_to_the_checks():
    assert Calls().find(key(activation=["relu"])) is None


def test_the_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(calls, "MOST_CALLS", 3)
    found = Calls()
    for number in range(10):
        found.keeper((number,))(SHORTCUTS)
        assert len(found) <= 3
