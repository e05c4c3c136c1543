"""Every kernel on the GPU: launches, dtypes, strides, reducers and epilogues against the fp64 truth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import decompose_k as dk
from decompose_k.config import Config
from decompose_k.dtypes import default_out_dtype, dtype_name
from decompose_k.kernels.engine import triton_matmul
from support import ACTIVATION_NAMES, LAYOUTS, assert_as_good_as_torch, random, with_layout

pytestmark = pytest.mark.gpu

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
WAIT_FIRST = Config("pair", split_k=16, block_k=64, num_stages=3, launch="wait_first", prefetch="ab")
STATIC_B = Config("pair", split_k=16, block_k=64, launch="static_b", prefetch="a")
PLAIN = Config("pair", split_k=16, block_k=64, num_stages=3)
FEW_SPLITS = Config("pair", split_k=5, block_k=64, num_stages=3, launch="wait_first")
PAIRS = {
    "plain": PLAIN,
    "few_splits": FEW_SPLITS,
    "tile_reducer": replace(PLAIN, reducer="tile"),
    "wait_first": WAIT_FIRST,
    "static_b": STATIC_B,
    "wait_first_reserved": replace(WAIT_FIRST, reserve_kib=144),
    "wait_first_partly_fetched": replace(WAIT_FIRST, split_k=5, prefetch_blocks=1),
    "static_b_reserved": replace(STATIC_B, reserve_kib=108),
    "wide_tile": replace(WAIT_FIRST, block_m=64, block_n=64, reduce_block=64),
    "many_splits": replace(WAIT_FIRST, split_k=512, block_k=32, num_stages=1, reduce_block=8),
}
DOT = Config("dot", block_n=2, block_k=1024, launch="wait_first", prefetch="b")
DOTS = {"dot": DOT, "dot_static": replace(DOT, launch="static_b", prefetch="")}
MIXES = [
    (BF16, BF16),
    (FP16, FP16),
    (FP32, FP32),
    (FP64, FP64),
    (BF16, FP32),
    (FP32, BF16),
    (FP16, FP32),
    (FP16, BF16),
    (FP32, FP64),
]


def name_of(mix):
    return "x".join(map(dtype_name, mix))


def check(config, a, b, **epilogue):
    out_dtype = epilogue.pop("out_dtype", None) or default_out_dtype(a.dtype, b.dtype)
    out = triton_matmul(config, a, b, out_dtype=out_dtype, **epilogue)
    assert_as_good_as_torch(out, a, b, out_dtype=out_dtype, **epilogue)


def operands(m, n, k, a_dtype=BF16, b_dtype=BF16):
    return random((m, k), a_dtype, "cuda", 1), random((k, n), b_dtype, "cuda", 2)


@pytest.mark.parametrize("config", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("shape", [(16, 16, 1024), (7, 13, 1009), (65, 33, 999), (1, 1, 1), (257, 17, 130)], ids=str)
def test_shapes(config, shape):
    check(config, *operands(*shape))


@pytest.mark.parametrize("config", DOTS.values(), ids=DOTS)
@pytest.mark.parametrize("shape", [(1, 256, 1000), (2, 9, 1024), (1, 1, 1), (300, 1, 777), (9, 2, 515)], ids=str)
def test_shapes_of_the_dot_kernel(config, shape):
    check(config, *operands(*shape))


@pytest.mark.parametrize("n", [*range(1, 18), 24, 60, 72], ids=lambda n: f"N{n}")
@pytest.mark.parametrize("m", [1, 3, 64], ids=lambda m: f"M{m}")
def test_few_columns(m, n):
    a, b = operands(m, n, 2048)
    assert_as_good_as_torch(dk.matmul(a, b, out_dtype=FP32, backend="triton"), a, b, out_dtype=FP32)


@pytest.mark.parametrize("n", [1, 24, 256], ids=lambda n: f"N{n}")
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 16, 17, 64, 65, 257], ids=lambda m: f"M{m}")
def test_few_rows(m, n):
    a, b = operands(m, n, 2049)
    assert_as_good_as_torch(dk.matmul(a, b, out_dtype=FP32, backend="triton"), a, b, out_dtype=FP32)


@pytest.mark.parametrize("k", [1, 15, 63, 64, 65, 1023, 1025, 4099], ids=lambda k: f"K{k}")
@pytest.mark.parametrize("config", [WAIT_FIRST, FEW_SPLITS, PAIRS["many_splits"]], ids=["16", "5", "512"])
def test_any_k_whatever_the_split(config, k):
    check(config, *operands(5, 9, k), out_dtype=FP32)


@pytest.mark.parametrize("layout", ["row", "column", "strided", "expanded"])
@pytest.mark.parametrize("prefetch", ["", "a", "b", "ab"], ids=lambda prefetch: prefetch or "none")
@pytest.mark.parametrize("launch", ["wait_first", "static_b"])
def test_prefetches(launch, prefetch, layout):
    a, b = operands(18, 40, 1000)
    config = Config("pair", split_k=16, block_k=64, launch=launch, prefetch=prefetch)
    check(config, with_layout(a, layout), with_layout(b, layout), out_dtype=FP32)


@pytest.mark.parametrize("layout", ["row", "column", "strided", "expanded"])
@pytest.mark.parametrize("blocks", [0, 1, 2, 3], ids=lambda blocks: f"{blocks}_blocks")
def test_prefetches_of_some_of_a_program_s_blocks(blocks, layout):
    a, b = operands(18, 40, 1000)
    config = Config("pair", split_k=4, block_k=64, launch="wait_first", prefetch="ab", prefetch_blocks=blocks)
    check(config, with_layout(a, layout), with_layout(b, layout), out_dtype=FP32)


@pytest.mark.parametrize("mix", MIXES, ids=name_of)
@pytest.mark.parametrize("config", [WAIT_FIRST, STATIC_B, DOT], ids=["wait_first", "static_b", "dot"])
def test_dtypes(config, mix):
    check(config, *operands(2, 13, 1000, *mix))


@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32, FP64], ids=dtype_name)
@pytest.mark.parametrize("mix", [(BF16, BF16), (FP32, FP32), (FP64, FP64)], ids=name_of)
def test_out_dtypes(mix, out_dtype):
    check(WAIT_FIRST, *operands(5, 9, 1000, *mix), out_dtype=out_dtype)


@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("b_layout", LAYOUTS)
@pytest.mark.parametrize("config", [WAIT_FIRST, DOT], ids=["pair", "dot"])
def test_strides(config, a_layout, b_layout):
    a, b = operands(2, 40, 1000)
    check(config, with_layout(a, a_layout), with_layout(b, b_layout))


@pytest.mark.parametrize("activation", ACTIVATION_NAMES, ids=str)
@pytest.mark.parametrize("config", [WAIT_FIRST, PAIRS["tile_reducer"], DOT], ids=["flat", "tile", "dot"])
def test_activations(config, activation):
    a, b = operands(2, 40, 1000, FP32, FP32)
    for scale in (0.003, 0.1, 3.0):
        check(config, a * scale, b, bias=random((40,), FP32, "cuda", 3) * scale, activation=activation)


@pytest.mark.parametrize("shape", [(40,), (2, 1), (1, 40), (2, 40), ()], ids=str)
@pytest.mark.parametrize("config", [WAIT_FIRST, PAIRS["tile_reducer"], DOT], ids=["flat", "tile", "dot"])
def test_bias_of_any_broadcast(config, shape):
    check(config, *operands(2, 40, 1000), bias=random(shape, FP16, "cuda", 3), alpha=0.75, beta=-2.5)


@pytest.mark.parametrize("layout", ["column", "padded", "strided", "expanded", "expanded_rows"])
@pytest.mark.parametrize("config", [WAIT_FIRST, PAIRS["tile_reducer"], DOT], ids=["flat", "tile", "dot"])
def test_bias_of_any_strides(config, layout):
    check(config, *operands(2, 40, 1000), bias=with_layout(random((2, 40), BF16, "cuda", 3), layout), beta=0.5)


@pytest.mark.parametrize("bias_dtype", [BF16, FP16, FP32, FP64], ids=dtype_name)
@pytest.mark.parametrize("config", [WAIT_FIRST, DOT], ids=["pair", "dot"])
def test_bias_dtypes(config, bias_dtype):
    check(config, *operands(2, 40, 1000), bias=random((40,), bias_dtype, "cuda", 3), out_dtype=FP32)


@pytest.mark.parametrize("config", [WAIT_FIRST, DOT], ids=["pair", "dot"])
def test_scales_of_an_fp64_product_are_fp64(config):
    check(config, *operands(2, 40, 1000, FP64, FP64), bias=random((40,), FP64, "cuda", 3), alpha=0.1, beta=1 / 3)


@pytest.mark.parametrize("config", [WAIT_FIRST, DOT], ids=["pair", "dot"])
def test_beta_zero_leaves_bias_unread(config):
    check(config, *operands(2, 40, 1000), bias=torch.full((40,), float("nan"), device="cuda"), beta=0.0)


@pytest.mark.parametrize("config", [WAIT_FIRST, PAIRS["tile_reducer"], DOT], ids=["flat", "tile", "dot"])
def test_out_of_any_strides_and_nothing_beside_it(config):
    a, b = operands(2, 40, 1000)
    views = {(4, 120): lambda base: base[::2, ::3], (40, 2): lambda base: base.T, (6, 50): lambda base: base[3:5, 7:47]}
    for size, view in views.items():
        base = torch.full(size, float("nan"), device="cuda")
        out = view(base)
        assert triton_matmul(config, a, b, out_dtype=FP32, out=out) is out
        assert_as_good_as_torch(out, a, b, out_dtype=FP32)
        assert int(base.isnan().sum()) == base.numel() - out.numel()


SCALES = {
    "usual": (0, 0),
    "tiny_a": (-120, 60),
    "subnormal_b": (20, -140),
    "subnormal_result": (-70, -66),
    "huge_a": (100, 10),
    "near_the_limit": (127, -20),
    "opposite": (120, -120),
}


@pytest.mark.parametrize("exponents", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("mix", [(FP32, FP32), (BF16, FP32), (FP32, BF16)], ids=name_of)
def test_tf32x3_is_fp32_over_the_whole_range(mix, exponents):
    a, b = (random(size, FP64, "cuda", seed) for seed, size in ((1, (33, 700)), (2, (700, 40))))
    limit = 3.3e38
    a = (a * 2.0 ** exponents[0]).clamp(-limit, limit).to(mix[0])
    b = (b * 2.0 ** exponents[1]).clamp(-limit, limit).to(mix[1])
    check(Config("pair", split_k=3, block_m=32, block_n=32, block_k=64, num_stages=3, input_precision="tf32x3"), a, b)


@pytest.mark.parametrize("mix", [(FP32, FP32), (BF16, FP32), (BF16, BF16), (FP64, FP64)], ids=name_of)
@pytest.mark.parametrize("activation", [None, "relu"], ids=str)
def test_values_that_are_not_finite(mix, activation):
    a, b = operands(20, 40, 1000, *mix)
    a[0, 3], a[1, 500], a[2, 7], b[0, 1] = float("nan"), float("inf"), float("-inf"), float("-inf")
    b[7, 2], b[999, 4], a[5, 11], b[11, 30] = -0.0, float("inf"), float("inf"), 0.0
    assert_as_good_as_torch(dk.matmul(a, b, activation=activation, backend="triton"), a, b, activation=activation)


@pytest.mark.parametrize("precision", ["ieee", "tf32x3", None])
def test_fp32_never_runs_in_tf32_unasked(precision, monkeypatch):
    a, b = operands(64, 64, 8192, FP32, FP32)
    if precision is not None:
        monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    result = dk.matmul(a, b, precision=precision, backend="triton")
    expected = a.double() @ b.double()
    monkeypatch.undo()
    assert float((result - expected).norm() / expected.norm()) < 1e-6


def test_tf32_is_obeyed():
    a, b = operands(64, 64, 8192, FP32, FP32)
    expected = a.double() @ b.double()
    error = float((dk.matmul(a, b, precision="tf32", backend="triton") - expected).norm() / expected.norm())
    assert 1e-5 < error < 2e-3
