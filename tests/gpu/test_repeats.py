"""A repeated call, launched past Triton's own launcher: the first call's bits, other data, and nothing out of turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import decompose_k as dk
from decompose_k.calls import CALLS
from decompose_k.config import Config
from decompose_k.kernels import repeat as repeats
from decompose_k.kernels.engine import triton_matmul
from support import assert_as_good_as_torch, random

pytestmark = pytest.mark.gpu

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PAIR = Config("pair", split_k=4, block_k=64, launch="wait_first")
CONFIGS = {
    "wait_first": PAIR,
    "static_b": replace(PAIR, split_k=16, launch="static_b", prefetch="a"),
    "plain": replace(PAIR, launch="plain"),
    "tile_reducer": replace(PAIR, reducer="tile"),
    "several_tiles": replace(PAIR, block_m=32, block_n=32, num_warps=4),
    "dot": Config("dot", block_n=1, block_k=1024, launch="wait_first"),
    "mm": Config("mm"),
}


@pytest.fixture(autouse=True)
def nothing_remembered():
    """Each test starts without shortcuts, and reads NaN where a kernel reads what nobody wrote."""
    CALLS.cache_clear()
    torch.full((1 << 22,), float("nan"), device="cuda")


def operands(m, n=40, k=1000, dtype=BF16, seed=1):
    return random((m, k), dtype, "cuda", seed), random((k, n), dtype, "cuda", seed + 1)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "epilogue", [{}, {"activation": "relu"}, {"bias": (40,)}, {"alpha": 2.0, "bias": (1, 40)}], ids=str
)
def test_other_data_and_the_same_bits(config, epilogue):
    m = 1 if config.kernel == "dot" else 13
    options = dict(epilogue, static_b=config.launch == "static_b")
    if "bias" in options:
        options["bias"] = random(options["bias"], BF16, "cuda", 9)
    first = [operands(m), operands(m, seed=3)]
    long_way = []
    for a, b in first:
        CALLS.cache_clear()
        long_way.append(dk.matmul(a, b, config=config, **options))
    kept = len(CALLS)
    assert kept == 1 or config.kernel == "mm"
    for (a, b), expected in zip(first, long_way, strict=True):
        for _ in range(3):
            assert torch.equal(dk.matmul(a, b, config=config, **options), expected)
    assert len(CALLS) == kept
    options.pop("static_b")
    assert_as_good_as_torch(long_way[0], *first[0], **options)


@pytest.mark.parametrize("n", [1, 2, 24, 256], ids=lambda n: f"N{n}")
@pytest.mark.parametrize("static_b", [False, True], ids=["wait_first", "static"])
def test_every_m_of_every_bucket(n, static_b):
    weight = random((n, 2048), BF16, "cuda", 2)
    x = random((80, 2048), BF16, "cuda", 1)
    for m in (*range(80, 0, -1), *range(1, 81)):
        result = dk.linear(x[:m], weight, out_dtype=FP32, backend="triton", static_weight=static_b)
        assert_as_good_as_torch(result, x[:m], weight.T, out_dtype=FP32)
    assert len(CALLS) <= 8


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
@pytest.mark.parametrize("m", [1, 16, 1024], ids=lambda m: f"M{m}")
def test_every_dtype(dtype, m):
    a, b = operands(m, n=64, k=512, dtype=dtype)
    first = dk.matmul(a, b)
    again = [dk.matmul(a, b) for _ in range(3)]
    assert all(torch.equal(first, result) for result in again)
    assert_as_good_as_torch(again[-1], a, b)
    weight = b.T.contiguous()
    first = dk.linear(a, weight)
    assert all(torch.equal(first, dk.linear(a, weight)) for _ in range(3))


@pytest.mark.parametrize("m", [3, 2048], ids=lambda m: f"M{m}")
@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("bias", [None, (24,)], ids=["bare", "bias"])
def test_linear_of_a_batch(m, out_dtype, bias):
    x, weight = random((2, m, 512), BF16, "cuda", 1), random((24, 512), BF16, "cuda", 2)
    bias = None if bias is None else random(bias, BF16, "cuda", 3)
    results = [dk.linear(x, weight, bias, activation="relu", out_dtype=out_dtype) for _ in range(3)]
    assert all(torch.equal(results[0], result) for result in results)
    flat = results[2].view(2 * m, 24)
    assert_as_good_as_torch(flat, x.view(-1, 512), weight.T, bias=bias, activation="relu", out_dtype=out_dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
@pytest.mark.parametrize("rows", [(1,), (100,), (4, 25), (1, 7), (7, 1), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("bias", [None, (24,), (48,), (1,)], ids=str)
def test_what_is_left_to_torch_has_the_bits_of_the_first_call(dtype, rows, bias):
    """Also where a repeated call goes to torch's own function directly, and of slices of a larger batch."""
    weight = random((24, 512), dtype, "cuda", 2)
    if bias is not None:
        bias = random(bias, dtype, "cuda", 3)
        bias = bias[::2] if bias.shape == (48,) else bias
    whole = random((9, *rows, 512), dtype, "cuda", 1)
    for x in (whole[0], whole[3], whole[4:5, ..., :].view(*rows, 512)):
        CALLS.cache_clear()
        results = [dk.linear(x, weight, bias, config=Config("mm")) for _ in range(4)]
        assert results[0].shape == (*rows, 24)
        assert all(torch.equal(results[0], result) for result in results)
        other = random((*rows, 512), dtype, "cuda", 7)
        CALLS.cache_clear()
        expected = dk.linear(other, weight, bias, config=Config("mm"))
        CALLS.cache_clear()
        assert all(torch.equal(dk.linear(x, weight, bias, config=Config("mm")), results[0]) for _ in range(3))
        assert torch.equal(dk.linear(other, weight, bias, config=Config("mm")), expected)


def test_rows_of_a_batch():
    x, weight = random((3, 5, 512), BF16, "cuda", 1), random((24, 512), BF16, "cuda", 2)
    results = [dk.linear(x, weight, backend="triton") for _ in range(3)]
    assert results[2].shape == (3, 5, 24)
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[2].view(15, 24), dk.linear(x.view(15, 512), weight, backend="triton"))


@pytest.mark.parametrize("config", [CONFIGS["wait_first"], CONFIGS["dot"]], ids=["pair", "dot"])
def test_the_documented_launch_of_an_unknown_triton(config, monkeypatch):
    a, b = operands(2)
    expected = dk.matmul(a, b, config=config)
    monkeypatch.setattr(repeats.direct_launch, "__defaults__", ("99.0.0",))
    kept = []
    triton_matmul(config, a, b, out_dtype=BF16, keep=kept.append)
    assert torch.equal(kept[0](a, b, None, 2), expected)


def test_a_profiler_hears_every_launch():
    import triton

    a, b = operands(4)
    heard = []
    dk.matmul(a, b, config=PAIR)
    hook = triton.knobs.runtime.launch_enter_hook
    listen = lambda metadata: heard.append(metadata.get()["name"])  # noqa: E731 - hooks are told apart by identity
    hook.add(listen)
    try:
        dk.matmul(a, b, config=PAIR)
    finally:
        hook.remove(listen)
    dk.matmul(a, b, config=PAIR)
    assert heard == ["partial_kernel", "flat_reduce_kernel"]


def test_wrong_arguments_are_still_found():
    a, b = operands(3)
    bias = random((3, 40), BF16, "cuda", 3)
    for _ in range(2):
        dk.matmul(a, b, bias=bias, backend="triton")
    with pytest.raises(ValueError, match="^bias"):
        dk.matmul(operands(4)[0], b, bias=bias, backend="triton")
    with pytest.raises(ValueError, match="^b must have K"):
        dk.matmul(a[:, :-8], b, bias=bias, backend="triton")
    with pytest.raises(TypeError, match="^batch_invariant"):
        dk.matmul(a, b, bias=bias, backend="triton", batch_invariant=0)
    with pytest.raises(ValueError, match="^b must be on the device"):
        dk.matmul(a, b.cpu(), bias=bias, backend="triton")


def test_gradients_autocast_and_slices_after_a_shortcut():
    a, b = operands(8, k=1024, dtype=FP32)
    for _ in range(2):
        plain = dk.matmul(a, b)
    with torch.autocast("cuda", dtype=BF16):
        assert dk.matmul(a, b).dtype == BF16
    assert dk.matmul(a, b.clone().requires_grad_()).requires_grad
    assert torch.equal(dk.matmul(a, b), plain)
    moved = torch.empty(8 * 1024 + 1, device="cuda")[1:].view(8, 1024).copy_(a)
    assert_as_good_as_torch(dk.matmul(moved, b), a, b)


def test_a_negated_view_is_not_read_as_it_lies_in_memory():
    view = torch.randn(4, 512, dtype=torch.complex64, device="cuda").conj().imag
    b = random((512, 24), FP32, "cuda", 2)
    assert view.is_neg()
    for _ in range(2):
        assert_as_good_as_torch(dk.matmul(view, b, backend="triton"), view.clone(), b)


def test_capture_of_a_repeated_call():
    a, b = operands(16)
    expected = dk.matmul(a, b, config=PAIR)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [dk.matmul(a, b, config=PAIR) for _ in range(3)]
    graph.replay()
    assert all(torch.equal(result, expected) for result in results)


def test_a_serving_process_compiles_two_kernels_a_bucket():
    import triton

    weight = random((160, 1536), BF16, "cuda", 2)
    x = random((512, 1536), BF16, "cuda", 1)
    compiled = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **facts: compiled.append(facts["fn"].name)
    try:
        for m in range(1, 513):
            dk.linear(x[:m], weight, out_dtype=FP32, backend="triton")
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert len(compiled) <= 2 * 10
