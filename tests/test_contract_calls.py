"""Safe to embed: same bits on every run, batch invariance, `out`, and no setting left changed."""

from __future__ import annotations

import threading

import pytest
import torch

import decompose_k as dk
from decompose_k.dtypes import FLOATS, dtype_name
from support import ACTIVATION_NAMES, assert_as_good_as_torch, random, torch_configs

pytestmark = pytest.mark.contract


def operands(m, n, k, dtype, device):
    return random((m, k), dtype, device), random((k, n), dtype, device, 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_name)
def test_the_same_bits_on_every_run(dtype, device, backend):
    a, b = operands(17, 24, 4099, dtype, device)
    first = dk.matmul(a, b, backend=backend, activation="gelu")
    for _ in range(10):
        assert torch.equal(dk.matmul(a, b, backend=backend, activation="gelu"), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=dtype_name)
def test_the_same_bits_with_and_without_gradients_and_inference_mode(dtype, device, backend):
    a, b = operands(5, 8, 1030, dtype, device)
    bias = random((8,), dtype, device, 2)
    plain = dk.matmul(a, b, bias=bias, activation="silu", backend=backend)
    with torch.inference_mode():
        assert torch.equal(dk.matmul(a, b, bias=bias, activation="silu", backend=backend), plain)
    recorded = dk.matmul(a.requires_grad_(), b, bias=bias, activation="silu", backend=backend)
    assert recorded.requires_grad
    assert torch.equal(recorded.detach(), plain)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_name)
def test_batch_invariance(dtype, activation, device, backend):
    a, b = operands(67, 21, 1037, dtype, device)
    bias = random((21,), dtype, device, 3)
    options = {"bias": bias, "activation": activation, "batch_invariant": True, "backend": backend}
    whole = dk.matmul(a, b, **options)
    assert_as_good_as_torch(whole, a, b, bias=bias, activation=activation)
    for m in (1, 2, 15, 16, 17, 33, 67):
        assert torch.equal(dk.matmul(a[:m], b, **options), whole[:m]), f"M = {m}"
        assert torch.equal(dk.matmul(a[-m:], b, **options), whole[-m:]), f"the last {m} rows"
    turned = a[:5].t().contiguous().t()
    assert torch.equal(dk.matmul(turned, b, **options), whole[:5]), "the layout of the rows"
    a[1:] = float("nan")
    assert torch.equal(dk.matmul(a, b, **options)[0], whole[0]), "what the other rows hold"


def test_batch_invariance_of_explicit_configs(device):
    a, b = operands(40, 16, 2050, torch.float32, device)
    for config in torch_configs(2050):
        whole = dk.matmul(a, b, config=config, batch_invariant=True)
        assert torch.equal(dk.matmul(a[21:22], b, config=config, batch_invariant=True), whole[21:22])


@pytest.mark.parametrize("out_layout", ["row", "column", "strided", "columns of a wider buffer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_name)
def test_out_of_any_stride_has_the_bits_of_the_result(dtype, out_layout, device, backend):
    m, n = 6, 10
    a, b = operands(m, n, 515, dtype, device)
    buffer = torch.full((2 * m, 3 * n), float("nan"), dtype=dtype, device=device)
    out = {
        "row": torch.full((m, n), float("nan"), dtype=dtype, device=device),
        "column": torch.full((n, m), float("nan"), dtype=dtype, device=device).t(),
        "strided": buffer[::2, ::3],
        "columns of a wider buffer": buffer[:m, n : 2 * n],
    }[out_layout]
    for options in ({}, {"split_k": 5}, {"activation": "relu"}, {"activation": "tanh", "alpha": 0.5}):
        out.fill_(float("nan"))
        assert dk.matmul(a, b, out=out, backend=backend, **options) is out
        assert torch.equal(out, dk.matmul(a, b, backend=backend, **options))
    if out.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
        assert int(torch.isfinite(buffer).sum()) == m * n


def test_out_of_a_batch_whose_rows_are_no_view(device, backend):
    a, b = random((3, 4, 65), torch.float32, device), random((65, 5), torch.float32, device, 1)
    expected = dk.matmul(a, b, backend=backend)
    for out in (torch.zeros(3, 4, 5, device=device), torch.zeros(4, 3, 5, device=device).transpose(0, 1)):
        assert dk.matmul(a, b, out=out, backend=backend) is out
        assert torch.equal(out, expected)


def test_out_of_another_dtype_is_rounded_once(device, backend):
    a, b = operands(4, 5, 257, torch.bfloat16, device)
    out = torch.zeros(4, 5, dtype=torch.float32, device=device)
    dk.matmul(a, b, out=out, out_dtype=torch.float32, backend=backend)
    assert_as_good_as_torch(out, a, b, out_dtype=torch.float32)


@pytest.mark.parametrize("split_k", [None, 1, 4])
def test_the_result_may_be_changed_in_place(split_k, device, backend):
    a, b = operands(5, 6, 130, torch.float32, device)
    result = dk.matmul(a.requires_grad_(), b, split_k=split_k, backend=backend)
    assert not result._is_view()
    result.mul_(2.0)
    result.sum().backward()
    torch.testing.assert_close(a.grad, 2 * b.sum(1).expand(5, 130))


def test_inputs_are_not_written(device, backend):
    a, b = operands(5, 6, 130, torch.float32, device)
    bias = random((6,), torch.float32, device)
    before = [tensor.clone() for tensor in (a, b, bias)]
    dk.matmul(a, b, bias=bias, activation="gelu", alpha=2.0, backend=backend)
    dk.matmul(torch.zeros(5, 0, device=device), b[:0], bias=bias, activation="relu", backend=backend)
    assert all(torch.equal(x, y) for x, y in zip((a, b, bias), before, strict=True))


def test_threads_share_nothing(device, backend):
    a, b = operands(8, 8, 4096, torch.float32, device)
    jobs = [
        {"split_k": s, "activation": activation, "backend": backend} for s in (1, 4) for activation in ("relu", "tanh")
    ]
    expected = [dk.matmul(a, b, **job) for job in jobs]
    wrong = []

    def work(index):
        results = [dk.matmul(a, b, **jobs[index]) for _ in range(20)]
        wrong.extend(index for result in results if not torch.equal(result, expected[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("precision", ["ieee", "tf32x3", "tf32", None])
@pytest.mark.parametrize("allowed", ["ieee", "tf32"])
def test_the_callers_precision_setting_survives(allowed, precision, device, backend):
    settings = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = [setting.fp32_precision for setting in settings]
    a, b = operands(4, 4, 600, torch.float32, device)
    try:
        for setting in settings:
            setting.fp32_precision = allowed
        result = dk.matmul(a, b, precision=precision, backend=backend)
        assert [setting.fp32_precision for setting in settings] == [allowed, allowed]
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value
    if device.type == "cpu" or precision in ("ieee", "tf32x3"):
        assert_as_good_as_torch(result, a, b)


def test_a_setting_is_restored_when_the_product_fails(monkeypatch):
    from decompose_k import reference

    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    seen = []

    def fail(*arguments):
        seen.append(setting.fp32_precision)
        raise MemoryError

    monkeypatch.setattr(reference, "_product", fail)
    try:
        setting.fp32_precision = "tf32"
        with pytest.raises(MemoryError):
            dk.matmul(torch.ones(2, 2), torch.ones(2, 2), activation="tanh", backend="torch")
        assert seen == ["ieee"]
        assert setting.fp32_precision == "tf32"
    finally:
        setting.fp32_precision = before


@pytest.mark.gpu
def test_graph_replay_and_streams_have_the_eager_bits(device, backend):
    if device.type != "cuda":
        pytest.skip("needs --device cuda")
    a, b = operands(16, 24, 8193, torch.bfloat16, device)
    eager = dk.matmul(a, b, activation="relu", backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dk.matmul(a, b, activation="relu", backend=backend)
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, eager)
    streams = [torch.cuda.Stream() for _ in range(4)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())

    def on(stream):
        with torch.cuda.stream(stream):
            return dk.matmul(a, b, activation="relu", backend=backend)

    results = [on(stream) for stream in streams * 10]
    torch.cuda.synchronize()
    assert all(torch.equal(result, eager) for result in results)
