"""Products with a K so long that programs share multiprocessors: their candidates, and what was measured of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decompose_k.config import Config
from decompose_k.costs import predict_microseconds
from decompose_k.heuristics import FEWEST_BLOCKS, MOST_WORKSPACE_BYTES, candidates
from decompose_k.legality import LONG_K, is_legal, k_blocks, shared_bytes
from decompose_k.plan import workspace_bytes
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
    "two_halves": Problem.make(16, 16, LONG_K, BF16, b_dtype=FP16),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_programs_of_a_long_k_go_through_several_blocks_within_the_workspace(device, problem):
    pairs = [config for config in candidates(problem, device) if config.kernel == "pair"]
    for config in pairs:
        assert is_legal(config, problem, device) is None
        assert k_blocks(config, problem) >= FEWEST_BLOCKS
        assert workspace_bytes(config, problem) <= MOST_WORKSPACE_BYTES
        assert shared_bytes(config, problem) <= device.shared_bytes


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_there_are_pairs_for_it_on_an_h200(problem):
    assert sum(config.kernel == "pair" for config in candidates(problem, H200)) >= 10


def test_a_k_one_shorter_is_ranked_as_before():
    def splits(k):
        return max(config.split_k for config in candidates(Problem.make(16, 16, k, FP32), H200))

    assert splits(LONG_K - 64) <= 2 * H200.multiprocessors
    assert splits(LONG_K) > 2 * H200.multiprocessors


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


GRID = {
    "small": (Problem.make(16, 16, 8192, BF16), 0),
    "4_MB": (Problem.make(32, 32, 32768, BF16), 1),
    "8_MB": (Problem.make(64, 64, 32768, BF16), 1),
    "router": (Problem.make(16, 256, 7168, BF16, out_dtype=FP32, b_layout="column"), 2),
}


@pytest.mark.parametrize(("problem", "blocks"), GRID.values(), ids=GRID)
def test_about_a_megabyte_is_fetched_early(problem, blocks):
    pairs = [config for config in candidates(problem, H200) if config.kernel == "pair" and config.prefetch]
    assert pairs
    first = pairs[0]
    operands = problem.m * ("a" in first.prefetch) + problem.n * ("b" in first.prefetch)
    block_bytes = first.split_k * first.block_k * operands * 2
    fetched = (first.prefetch_blocks or k_blocks(first, problem)) * block_bytes
    assert first.prefetch_blocks == 0 or first.prefetch_blocks < k_blocks(first, problem)
    assert fetched <= 1.6 * (1 << 20) or first.prefetch_blocks == 1
    assert (first.prefetch_blocks == 0) == (blocks == 0)


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


@pytest.mark.parametrize(("blocks", "is_fine"), [(0, True), (1, True), (6, True), (7, False), (10**12, False)])
def test_all_of_a_program_s_blocks_are_called_none(blocks, is_fine):
    config = Config("pair", split_k=16, launch="wait_first", prefetch="b", prefetch_blocks=blocks)
    objection = is_legal(config, Problem.make(1, 256, 7168, BF16), H200)
    assert objection is None if is_fine else "must be below a program's 7 K blocks" in objection
