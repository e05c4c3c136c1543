"""Products with a K so long that programs share multiprocessors: their candidates, and what was measured of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decompose_k.config import Config
from decompose_k.costs import predict_microseconds
from decompose_k.heuristics import (
    FEWEST_LONG_BLOCKS,
    MOST_WORKSPACE_BYTES,
    PREFETCH_BYTES,
    _prefetch_blocks,
    candidates,
)
from decompose_k.kernels.partial import partial_launch
from decompose_k.legality import LONG_K, LONG_K_OF_HALVES, ceil_divide, is_legal, k_blocks, shared_bytes
from decompose_k.plan import plan, workspace_bytes
from decompose_k.problem import Problem
from stub_devices import DEVICES

H200 = DEVICES["H200"]
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def gram(n, k, dtype=FP32):
    return Problem.make(n, n, k, dtype, a_layout="column")


PROBLEMS = {
    "gram_fp32": gram(16, 1 << 20),
    "gram_fp64": gram(8, 8_000_000, FP64),
    "half_to_half": Problem.make(64, 16, 1 << 19, BF16, b_layout="column"),
    "half_to_fp32": Problem.make(16, 16, 1 << 20, BF16, out_dtype=FP32, a_layout="column"),
    "mixed": Problem.make(16, 24, 1 << 19, BF16, b_dtype=FP32, out_dtype=FP32, b_layout="column"),
    "ragged": Problem.make(2, 13, 20_569_856, BF16),
    "shortest": Problem.make(32, 32, LONG_K, FP32),
    "plain_fp32": Problem.make(16, 16, LONG_K, FP32, precision="ieee"),
    "tf32": Problem.make(16, 16, 1 << 20, FP32, precision="tf32"),
    "two_halves": Problem.make(16, 16, LONG_K_OF_HALVES, BF16, b_dtype=FP16),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_programs_of_a_long_k_go_through_several_blocks_within_the_workspace(device, problem):
    pairs = [config for config in candidates(problem, device) if config.kernel == "pair"]
    for config in pairs:
        assert is_legal(config, problem, device) is None
        assert k_blocks(config, problem) >= FEWEST_LONG_BLOCKS
        assert workspace_bytes(config, problem) <= MOST_WORKSPACE_BYTES
        assert shared_bytes(config, problem) <= device.shared_bytes


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_there_are_pairs_for_it_on_an_h200(problem):
    assert sum(config.kernel == "pair" for config in candidates(problem, H200)) >= 10


@pytest.mark.parametrize(("dtype", "least"), [(FP32, LONG_K), (BF16, LONG_K_OF_HALVES)], ids=["fp32", "bf16"])
def test_a_long_k_begins_later_for_halves(dtype, least):
    def resident(k):
        found = candidates(Problem.make(16, 16, k, dtype, b_layout="column"), H200)
        return max(config.split_k for config in found) / H200.multiprocessors

    assert resident(least - 64) <= 2
    assert resident(least) > 2


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_candidates_name_the_splits_that_there_are_and_none_comes_twice(device, problem):
    found = candidates(problem, device)
    assert len(set(found)) == len(found)
    for config in found:
        if config.kernel == "pair":
            assert config.split_k == ceil_divide(problem.k, k_blocks(config, problem) * config.block_k)


def test_more_tiles_than_multiprocessors_are_no_reason_to_come_twice():
    found = candidates(Problem.make(848, 64, 1 << 22, FP32), DEVICES["laptop"])
    assert len(set(found)) == len(found)


def test_a_workspace_is_counted_by_the_splits_that_there_are():
    """128 splits of 64 KiB are the 8 MiB that may be; 132 multiprocessors are no splits."""
    problem = Problem.make(128, 128, LONG_K_OF_HALVES, BF16, out_dtype=BF16)
    pairs = [config for config in candidates(problem, H200) if config.kernel == "pair"]
    assert max(workspace_bytes(config, problem) for config in pairs) > MOST_WORKSPACE_BYTES // 2


@pytest.mark.parametrize("sizes", [(1, 100), (16, 1), (1, 1)], ids=str)
def test_vectors_of_halves_are_torch_s_whatever_their_rows(sizes):
    """Rows that are no multiple of 8 cost a product of two matrices dearly, and were not seen to cost a vector's."""
    assert candidates(Problem.make(*sizes, 1 << 20, BF16), H200)[0] == Config("mm")


def test_values_that_are_loaded_one_by_one_are_not_pipelined():
    found = candidates(Problem.make(64, 24, 1 << 20, FP32, a_layout="column"), H200)
    assert {config.num_stages for config in found if config.block_m * config.block_n > 1024} == {1}


TILE = Config("pair", block_k=64, num_stages=3, reduce_block=8, reduce_warps=2, launch="wait_first")
FP32_TILE = replace(TILE, input_precision="tf32x3")
RAGGED = replace(TILE, num_warps=2, block_k=256)
# (problem, the faster, the slower), as measured on an H200.
RANKED = {
    "programs_share_a_multiprocessor": (
        gram(16, 1 << 20),
        replace(FP32_TILE, num_warps=1, split_k=1056),
        replace(FP32_TILE, num_warps=2, split_k=132, num_stages=6),
    ),
    "but_not_too_many": (
        gram(64, 1 << 20),
        replace(FP32_TILE, block_m=64, block_n=64, split_k=264),
        replace(FP32_TILE, block_m=64, block_n=64, split_k=1056),
    ),
    "four_hide_more_than_one": (
        PROBLEMS["ragged"],
        replace(RAGGED, split_k=528),
        replace(RAGGED, split_k=132),
    ),
    "larger_tiles_of_larger_results": (
        gram(64, 1 << 20),
        replace(FP32_TILE, block_m=64, block_n=64, split_k=264),
        replace(FP32_TILE, block_m=32, block_n=32, block_k=32, num_warps=4, split_k=132),
    ),
}


@pytest.mark.parametrize(("problem", "faster", "slower"), RANKED.values(), ids=RANKED)
def test_what_was_measured_to_be_faster_is_predicted_to_be(problem, faster, slower):
    assert predict_microseconds(faster, problem, H200) < predict_microseconds(slower, problem, H200)


@pytest.mark.parametrize(
    ("out_dtype", "most"), [(BF16, 65536), (FP16, 8192), (FP32, 1024)], ids=["bf16", "fp16", "fp32"]
)
def test_sums_in_a_row_are_shorter_where_the_result_keeps_their_error(out_dtype, most):
    problem = Problem.make(16, 16, 1 << 20, FP16 if out_dtype == FP16 else BF16, out_dtype=out_dtype)
    longest = Config("pair", split_k=(1 << 20) // most, block_k=256, launch="wait_first")
    assert is_legal(longest, problem, H200) is None
    assert "rounding in sums" in is_legal(replace(longest, split_k=longest.split_k - 1), problem, H200)
    shorter = replace(problem, k=LONG_K_OF_HALVES // 2)
    longest_of_it = replace(longest, split_k=shorter.k // 1024)
    assert is_legal(longest_of_it, shorter, H200) is None
    assert "rounding in sums" in is_legal(replace(longest_of_it, split_k=longest_of_it.split_k - 1), shorter, H200)


PAIR = Config("pair", split_k=64, block_m=64, block_n=32, launch="wait_first", prefetch="ab")
SEED = Problem.make(64, 64, 32768, BF16)
ROUTER = Problem.make(16, 256, 7168, BF16, out_dtype=FP32, b_layout="column")
# (problem, prefetched operands, split_k, block_k, K blocks of a program, how many of them are worth it): PREFETCH_BYTES
# are 1.25 MiB.
FETCHED = {
    "one_of_1_MiB": (SEED, "ab", 64, 64, 8, 1),
    "two_of_half_a_MiB": (SEED, "a", 64, 64, 8, 2),
    "one_though_it_has_4_MiB": (SEED, "ab", 128, 128, 2, 1),
    "five_of_a_quarter": (SEED, "b", 32, 64, 16, 5),
    "all_of_what_is_small": (Problem.make(16, 16, 8192, BF16), "ab", 64, 128, 1, 0),
    "all_where_that_is_as_many": (Problem.make(16, 16, 16384, BF16), "ab", 64, 64, 4, 0),
    "rows_of_b_alone": (ROUTER, "b", 16, 64, 7, 2),
    "nothing": (SEED, "", 64, 64, 8, 0),
}


@pytest.mark.parametrize(
    ("problem", "prefetch", "split_k", "block_k", "blocks", "wanted"), FETCHED.values(), ids=FETCHED
)
def test_a_megabyte_and_a_quarter_is_fetched_early(problem, prefetch, split_k, block_k, blocks, wanted):
    assert PREFETCH_BYTES == 5 << 18
    assert _prefetch_blocks(problem, prefetch, split_k, block_k, blocks) == wanted


@pytest.mark.parametrize(
    "problem", [SEED, ROUTER, replace(ROUTER, batch_invariant=True)], ids=["seed", "router", "rows"]
)
def test_candidates_fetch_so_much(problem):
    for config in candidates(problem, H200):
        if config.launch == "wait_first" and config.kernel == "pair":
            blocks = k_blocks(config, problem)
            expected = _prefetch_blocks(problem, config.prefetch, config.split_k, config.block_k, blocks)
            assert config.prefetch_blocks == expected or problem.batch_invariant
    assert any(config.prefetch_blocks for config in candidates(problem, H200))


@pytest.mark.parametrize(("blocks", "length"), [(0, 512), (1, 64), (3, 192), (8, 512), (10**12, 512)])
def test_the_kernel_is_told_how_much_to_fetch(blocks, length):
    a, b, partials = torch.empty(64, 32768), torch.empty(32768, 64), torch.empty(64, 64, 64)
    *_, k_per_split, k_prefetched = partial_launch(a, b, partials, replace(PAIR, prefetch_blocks=blocks)).scalars
    assert (k_per_split, k_prefetched) == (512, length)


@pytest.mark.parametrize("split_k", [112, 128, 512])
@pytest.mark.parametrize(
    "problem", [SEED, ROUTER, replace(ROUTER, batch_invariant=True)], ids=["seed", "router", "rows"]
)
def test_an_explicit_split_is_had_whatever_was_to_be_fetched(problem, split_k):
    config = plan(problem, H200, backend="triton", split_k=split_k).config
    assert (config.kernel, config.split_k) == ("pair", split_k)


@pytest.mark.parametrize("wrong", [-1, True, 1.5, None, "1"], ids=repr)
def test_prefetch_blocks_are_a_count(wrong):
    with pytest.raises(ValueError, match="prefetch_blocks must be an integer >= 0; got"):
        Config("pair", prefetch_blocks=wrong)


@pytest.mark.parametrize(
    "config",
    [
        Config("pair", split_k=16, launch="wait_first", prefetch_blocks=1),
        Config("dot", block_k=8192, launch="wait_first", prefetch="b", prefetch_blocks=1),
    ],
    ids=["nothing_prefetched", "dot"],
)
def test_prefetch_blocks_without_use_are_illegal(config):
    assert "prefetch_blocks is of use" in is_legal(config, Problem.make(1, 256, 7168, BF16), H200)
