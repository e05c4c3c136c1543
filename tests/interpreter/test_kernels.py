"""Every kernel and epilogue against the fp64 truth, run as Python: values, masks, strides and rounding, not speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decompose_k.bench.floors import unread
from decompose_k.config import Config
from decompose_k.dtypes import default_out_dtype, dtype_name
from decompose_k.kernels.engine import triton_matmul
from decompose_k.kernels.launch import needs_wide_offsets
from decompose_k.kernels.read import read_both
from support import ACTIVATION_NAMES, LAYOUTS, assert_as_good_as_torch, random, with_layout

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# Few and large K blocks: the interpreter takes its time for each operation, whatever its size.
FLAT = Config("pair", split_k=3, block_k=128)
TILE = Config("pair", split_k=3, block_k=128, reducer="tile")
WHOLE = Config("pair", block_k=512)
TALL = Config("pair", split_k=2, block_m=32, block_n=16, block_k=256, group_m=2, reduce_block=16)
RESERVED = replace(FLAT, reserve_kib=36)
CONFIGS = {"reserved": RESERVED, "flat": FLAT, "tile": TILE, "one_split": WHOLE, "tall": TALL}
DOT = Config("dot", block_n=4, block_k=1024)

PAIRS = [(BF16, BF16), (FP16, FP16), (FP32, FP32), (FP64, FP64), (BF16, FP32), (FP32, FP16), (FP32, FP64)]
pairs = pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: "x".join(map(dtype_name, pair)))


def check(config, a, b, **epilogue):
    """Run a config on operands and hold its result to the fp64 truth."""
    out_dtype = epilogue.pop("out_dtype", None) or default_out_dtype(a.dtype, b.dtype)
    out = triton_matmul(config, a, b, out_dtype=out_dtype, **epilogue)
    assert_as_good_as_torch(out, a, b, out_dtype=out_dtype, **epilogue)


def operands(m, n, k, a_dtype=FP32, b_dtype=FP32):
    return random((m, k), a_dtype, seed=1), random((k, n), b_dtype, seed=2)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("shape", [(16, 16, 768), (7, 13, 1009), (33, 1, 130), (1, 35, 1)], ids=str)
def test_shapes(config, shape):
    check(config, *operands(*shape))


@pytest.mark.parametrize("shape", [(1, 7, 1009), (2, 4, 1024), (2, 1, 1), (9, 2, 515)], ids=str)
def test_shapes_of_the_dot_kernel(shape):
    check(DOT, *operands(*shape))


@pairs
@pytest.mark.parametrize("config", [FLAT, DOT], ids=["pair", "dot"])
def test_dtypes(config, dtypes):
    check(config, *operands(2, 13, 700, *dtypes))


@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32, FP64], ids=dtype_name)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=dtype_name)
def test_out_dtypes(dtype, out_dtype):
    check(FLAT, *operands(5, 9, 515, dtype, dtype), out_dtype=out_dtype)


@pytest.mark.parametrize(
    "dtypes", [(FP32, FP32), (BF16, FP32), (FP32, BF16)], ids=lambda p: "x".join(map(dtype_name, p))
)
@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**70], ids=["usual", "tiny", "huge"])
def test_tf32x3_and_its_way_out(dtypes, scale):
    a, b = operands(5, 9, 515, *dtypes)
    check(Config("pair", split_k=2, block_k=256, input_precision="tf32x3"), a * scale, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", [FLAT, DOT], ids=["pair", "dot"])
def test_strides(config, layout):
    a, b = operands(2, 13, 515)
    check(config, with_layout(a, layout), with_layout(b, layout))


@pytest.mark.parametrize("config", [FLAT, TILE, DOT], ids=["flat", "tile", "dot"])
def test_out_of_any_strides(config):
    a, b = operands(2, 13, 515)
    base = torch.full((2 * 2, 13 * 3), float("nan"))
    out = base[::2, ::3]
    assert triton_matmul(config, a, b, out_dtype=FP32, out=out) is out
    assert_as_good_as_torch(out, a, b)
    assert int(base.isnan().sum()) == base.numel() - out.numel()


@pytest.mark.parametrize("activation", ACTIVATION_NAMES, ids=str)
@pytest.mark.parametrize("config", [FLAT, DOT], ids=["pair", "dot"])
def test_activations(config, activation):
    check(config, *operands(2, 13, 515), bias=random((13,), FP32, seed=3), activation=activation)


@pytest.mark.parametrize("shape", [(13,), (2, 1), (1, 13), (2, 13), ()], ids=str)
@pytest.mark.parametrize("config", [FLAT, TILE, DOT], ids=["flat", "tile", "dot"])
def test_bias_of_any_broadcast(config, shape):
    check(config, *operands(2, 13, 515), bias=random(shape, FP16, seed=3), alpha=0.75, beta=-2.5)


@pytest.mark.parametrize("config", [FLAT, DOT], ids=["pair", "dot"])
def test_beta_zero_leaves_bias_unread(config):
    check(config, *operands(2, 13, 515), bias=torch.full((13,), float("nan")), beta=0.0)


@pytest.mark.parametrize("activation", [None, "relu"], ids=str)
@pytest.mark.parametrize("config", [FLAT, TILE, DOT], ids=["flat", "tile", "dot"])
def test_values_that_are_not_finite(config, activation):
    a, b = operands(2, 13, 515)
    a[0, 3], a[1, 500], b[0, 1], b[2, 2], b[514, 4] = float("nan"), float("inf"), float("-inf"), -0.0, float("inf")
    check(config, a, b, activation=activation)


def test_a_config_gives_the_same_bits_twice():
    a, b = operands(5, 9, 515, BF16, BF16)
    results = [triton_matmul(FLAT, a, b, out_dtype=BF16) for _ in range(2)]
    assert torch.equal(*results)


@pytest.mark.parametrize("programs", [1, 5], ids=lambda count: f"{count}-programs")
@pytest.mark.parametrize("shape", [(1, 16, 1000), (7, 8, 515)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=dtype_name)
def test_the_read_floor_reads_every_word(dtype, shape, programs):
    m, n, k = shape
    a, b = random((m, k), dtype, seed=1), random((n, k), dtype, seed=2).T
    if m * k * dtype.itemsize % 4:
        with pytest.raises(ValueError, match="multiple of 4 bytes"):
            read_both(a, b, launch="plain", programs=programs, num_warps=4)
        return
    folded = read_both(a, b, launch="plain", programs=programs, num_warps=4)
    assert unread(folded, a, b) == 0.0
    a[-1, -1] += 1
    assert unread(folded, a, b) == 1.0


def test_the_read_floor_refuses_a_matrix_with_gaps():
    a = random((8, 64), FP32, seed=1)
    with pytest.raises(ValueError, match="dense in memory"):
        read_both(a[:, ::2], a.T, launch="plain", programs=2, num_warps=4)


def test_offsets_are_as_wide_for_every_m_of_a_bucket():
    operand = torch.empty_strided((1, 1), (1, 1))
    answers = {needs_wide_offsets(operand, workspace=(1024, m, 1100)) for m in (1025, 1500, 2048)}
    assert answers == {True}
    assert not needs_wide_offsets(operand, workspace=(64, 64, 64))
