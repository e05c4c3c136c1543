"""The heuristic on problems of the corpus and every kind of GPU: a pure, bounded, legal ranking that knows its end."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace

import pytest
import torch

from decompose_k.config import Config
from decompose_k.costs import predict_microseconds
from decompose_k.dtypes import dtype_name
from decompose_k.heuristics import MOST_CANDIDATES, candidates
from decompose_k.legality import is_legal, shared_bytes
from decompose_k.plan import plan
from decompose_k.problem import Problem
from decompose_k.shapes import corpus
from stub_devices import DEVICES

H200 = DEVICES["H200"]
MM = Config("mm")
BF16, FP32 = torch.bfloat16, torch.float32
PROBLEMS = sorted(
    {
        shape.problem("cuda", static_b=static_b).bucketed()
        for shape in corpus()
        for static_b in {False, shape.has_static_weight}
    },
    key=str,
)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_candidates_are_few_legal_distinct_and_best_first(device):
    """Every seventh problem of the corpus, another seventh on each device."""
    for problem in PROBLEMS[list(DEVICES.values()).index(device) % 7 :: 7]:
        found = candidates(problem, device)
        assert len(set(found)) == len(found) <= MOST_CANDIDATES
        assert [is_legal(config, problem, device) for config in found if config != MM] == [None] * sum(
            config != MM for config in found
        )
        predicted = [predict_microseconds(config, problem, device) for config in found]
        assert predicted == sorted(predicted)
        candidates.cache_clear()
        assert candidates(problem, device) == found


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_a_device_runs_only_what_it_can(device):
    for problem in PROBLEMS[::20]:
        for config in candidates(problem, device):
            assert config.launch == "plain" or device.has_dependent_launch
            assert config.launch != "static_b" or problem.static_b
            assert config.input_precision == "ieee" or (device.vendor, device.capability >= (8, 0)) == ("nvidia", True)


LARGE = {
    "square": Problem.make(4096, 4096, 4096, BF16),
    "many_tiles": Problem.make(1024, 1024, 8192, BF16),
    "short_k": Problem.make(1024, 128, 512, BF16, b_layout="column"),
    "router_many_outputs": Problem.make(512, 512, 2048, BF16, out_dtype=FP32, b_layout="column"),
    "router_512_rows": Problem.make(512, 512, 4096, BF16, out_dtype=FP32, b_layout="column"),
    "gram_128": Problem.make(128, 128, 1 << 20, FP32, a_layout="column"),
    "gram_bf16": Problem.make(64, 64, 1 << 20, BF16, a_layout="column"),
    "long_rows_of_100": Problem.make(100, 100, 1 << 19, FP32, a_layout="column"),
    "long_vector": Problem.make(1, 16, 1 << 20, FP32),
    "fp64_many_products": Problem.make(1024, 256, 7168, torch.float64),
}
SMALL = {
    "seed": Problem.make(16, 16, 32768, BF16),
    "short_k": Problem.make(1024, 64, 512, BF16, b_layout="column"),
    "seed_fp32": Problem.make(64, 64, 32768, FP32),
    "router": Problem.make(64, 256, 7168, BF16, out_dtype=FP32, b_layout="column"),
    "router_256_rows": Problem.make(256, 512, 4096, BF16, out_dtype=FP32, b_layout="column"),
    "router_1024_rows": Problem.make(1024, 128, 4096, BF16, out_dtype=FP32, b_layout="column"),
    "mhc": Problem.make(16, 24, 28672, BF16, b_dtype=FP32, out_dtype=FP32, b_layout="column"),
    "head": Problem.make(1, 1, 4096, BF16, b_layout="column"),
    "gram_16": Problem.make(16, 16, 1 << 20, FP32, a_layout="column"),
    "gram_64": Problem.make(64, 64, 1 << 20, FP32, a_layout="column"),
    "gram_64_longer": Problem.make(64, 64, 1 << 23, FP32, a_layout="column"),
    "gram_fp64": Problem.make(8, 8, 8_000_000, torch.float64, a_layout="column"),
    "long_bf16": Problem.make(2, 13, 20_569_856, BF16),
    "long_mixed": Problem.make(16, 24, 1 << 19, BF16, b_dtype=FP32, out_dtype=FP32, b_layout="column"),
    "fp64": Problem.make(16, 16, 16384, torch.float64),
    "fp64_router": Problem.make(16, 256, 7168, torch.float64, b_layout="column"),
    "fp64_larger": Problem.make(64, 64, 16384, torch.float64),
}


@pytest.mark.parametrize("problem", LARGE.values(), ids=LARGE)
def test_what_torch_does_better_is_left_to_it(problem):
    assert candidates(problem, H200)[0] == MM


@pytest.mark.parametrize("problem", SMALL.values(), ids=SMALL)
def test_what_decompose_k_does_better_is_not(problem):
    assert candidates(problem, H200)[0].backend == "triton"


@pytest.mark.parametrize(
    ("m", "n", "k", "most"), [(16, 16, 8192, 8), (64, 256, 7168, 64), (256, 512, 2048, 128)], ids=str
)
def test_reducers_take_larger_blocks_of_larger_outputs(m, n, k, most):
    pairs = [config for config in candidates(Problem.make(m, n, k, BF16), H200) if config.kernel == "pair"]
    assert max(config.reduce_block for config in pairs) == most


@pytest.mark.parametrize("static_b", [False, True], ids=["default", "static"])
def test_both_operands_are_fetched_early_but_for_a_static_weight(static_b):
    problem = Problem.make(64, 256, 7168, BF16, out_dtype=FP32, b_layout="column", static_b=static_b)
    pairs = [config for config in candidates(problem, H200) if config.kernel == "pair"]
    assert {(pair.launch, pair.prefetch) for pair in pairs} <= {("wait_first", "ab"), ("static_b", "a")}
    assert ("static_b" in {pair.launch for pair in pairs}) == static_b
    assert all(pair.prefetch == "" for pair in candidates(replace(problem, static_b=False), DEVICES["A100"]))


@pytest.mark.parametrize("problem", PROBLEMS[::40], ids=str)
def test_no_more_halves_are_on_their_way_than_are_of_use(problem):
    for config in candidates(problem, H200):
        if config.kernel == "pair" and config.num_stages > 4 and problem.is_one_half:
            assert shared_bytes(config, problem) <= 128 << 10


def test_large_blocks_of_halves_have_four_stages():
    """Two of 48 KB would be 128 KB at the most, and take longer."""
    problem = Problem.make(1024, 128, 4096, BF16, out_dtype=FP32, b_layout="column")
    tiles = {(one.block_m, one.block_n, one.block_k): one.num_stages for one in candidates(problem, H200)}
    assert tiles[128, 64, 128] == 4


@pytest.mark.parametrize(("b_dtype", "fewest"), [(BF16, 7), (torch.float16, 14)], ids=["one_half", "two_halves"])
def test_two_kinds_of_halves_are_summed_in_shorter_chains(b_dtype, fewest):
    """Without tensor cores a sum of 1024 products may be further from the truth than twice torch's error."""
    problem = Problem.make(16, 256, 7168, BF16, b_dtype=b_dtype, out_dtype=FP32)
    pair = Config("pair", split_k=fewest, block_n=32)
    assert is_legal(pair, problem, H200) is None
    assert "rounding in sums" in (is_legal(replace(pair, split_k=fewest - 1), problem, H200) or "")


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("sizes", [(256, 256, 2048), (512, 64, 512), (16, 1024, 1024)], ids=str)
def test_where_chains_are_short_more_splits_are_tried(sizes, device):
    """A whole wave of programs would have chains that are too long."""
    problem = Problem.make(*sizes, BF16, b_dtype=torch.float16)
    assert any(config.kernel == "pair" for config in candidates(problem, device)) == (device.type == "cuda")


ROUTER_4 = Problem.make(4, 256, 7168, BF16, out_dtype=FP32, b_layout="column", static_b=True)
ROUTER_2 = Problem.make(2, 512, 2048, BF16, out_dtype=FP32, b_layout="column", static_b=True)
GATE = Problem.make(64, 1, 4096, BF16, b_dtype=FP32, out_dtype=FP32, b_layout="column")
TILE = Config("pair", split_k=28, block_n=64, block_k=256, launch="static_b", prefetch="a", reserve_kib=144)
PAIR_OF_ROWS = Config("dot", block_n=2, block_k=2048, launch="static_b")
ONE_ROW = Config("dot", block_n=1, block_k=4096, num_warps=8, launch="wait_first", prefetch="b")
# (problem, the faster, the slower), as measured on an H200: what the charges set by hand are for.
MANY_ROWS = Problem.make(1024, 160, 6144, BF16, out_dtype=FP32, b_layout="column")
MIXED = Problem.make(1024, 768, 6144, BF16, b_dtype=FP32, out_dtype=FP32, b_layout="column")
SEED_FP32 = Problem.make(64, 48, 12288, FP32)
TWO_ROWS = Problem.make(2, 64, 8192, BF16, out_dtype=FP32, b_layout="column")
FETCHED = Config("pair", launch="wait_first", prefetch="ab", prefetch_blocks=1, num_stages=4, reserve_kib=108)
HIGH = replace(FETCHED, block_m=128, block_n=64, num_warps=8, reduce_block=128, reserve_kib=144)
TF32X3 = replace(FETCHED, input_precision="tf32x3")
# (problem, what takes less time, what takes more), as measured on an H200.
RANKED = {
    "tiles_of_128_x_128": (
        MANY_ROWS,
        replace(HIGH, split_k=8, block_m=64, block_n=128, block_k=32, num_warps=4, prefetch_blocks=2, reserve_kib=108),
        replace(HIGH, split_k=6, block_m=128, block_n=128, block_k=32, num_stages=8, prefetch_blocks=3),
    ),
    "two_stages": (
        replace(MANY_ROWS, k=5120),
        replace(HIGH, split_k=8, block_m=64, block_n=128, num_warps=4, reserve_kib=108),
        replace(HIGH, split_k=5, block_k=256, num_stages=2),
    ),
    "two_stages_of_mixed": (
        MIXED,
        replace(TF32X3, block_m=64, block_n=64, prefetch_blocks=4, reduce_block=64),
        replace(TF32X3, block_m=128, block_n=32, prefetch_blocks=4, reduce_block=64, num_warps=8, num_stages=2),
    ),
    "two_stages_of_fp32": (
        SEED_FP32,
        replace(TF32X3, split_k=128, block_m=64, block_n=64, block_k=32, reduce_block=16, reserve_kib=144),
        replace(TF32X3, split_k=96, block_m=64, block_n=32, reduce_block=32, num_stages=2),
    ),
    "one_long_row_a_program": (
        TWO_ROWS,
        replace(FETCHED, split_k=64, block_n=32, block_k=128, prefetch_blocks=0, num_stages=1, reduce_block=8),
        Config("dot", block_n=1, block_k=8192, num_warps=16, launch="wait_first", prefetch="b"),
    ),
    "two_warps_for_a_tile_of_64_x_256": (ROUTER_4, replace(TILE, num_warps=4), replace(TILE, num_warps=2)),
    "pairs_of_rows": (ROUTER_2, replace(PAIR_OF_ROWS, num_warps=4), replace(PAIR_OF_ROWS, num_warps=8)),
    "a_wider_other_operand": (GATE, replace(ONE_ROW, block_n=2, num_warps=16), ONE_ROW),
}


@pytest.mark.parametrize(("problem", "faster", "slower"), RANKED.values(), ids=RANKED)
def test_what_was_measured_to_be_faster_is_predicted_to_be(problem, faster, slower):
    assert predict_microseconds(faster, problem, H200) < predict_microseconds(slower, problem, H200)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_batch_invariant_candidates_follow_from_n_k_and_dtypes(device):
    problem = Problem.make(1, 256, 7168, BF16, b_layout="column", batch_invariant=True)
    found = {candidates(replace(problem, m=m), device) for m in (1, 2, 16, 64, 512, 5000)}
    assert len(found) == 1
    assert found.pop() != ()


INVARIANT_DTYPES = [(BF16, BF16), (FP32, FP32), (BF16, FP32), (BF16, torch.float16), (torch.float16, BF16)]


@pytest.mark.parametrize("dtypes", INVARIANT_DTYPES, ids=lambda dtypes: "x".join(map(dtype_name, dtypes)))
@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_a_batch_invariant_plan_sees_neither_m_nor_where_rows_lie(device, dtypes, monkeypatch):
    """Whether rows can be loaded several values at once depends on m, and with it the registers of a thread."""
    monkeypatch.setattr(importlib.import_module("decompose_k.plan"), "_missing_triton", lambda: None)
    for n, k in ((1, 4096), (256, 7168), (1000, 1000), (16, 1 << 20)):
        found = set()
        for m, layout in itertools.product((1, 2, 16, 17, 48, 512), ("row", "column", "strided")):
            problem = Problem.make(m, n, k, dtypes[0], b_dtype=dtypes[1], a_layout=layout, batch_invariant=True)
            first = candidates(problem, device)
            assert not first or is_legal(first[0], problem, device) is None
            found.add(plan(problem, device).config)
        assert len(found) == 1


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_a_batch_invariant_product_is_tf32_where_a_device_has_it(device):
    problem = Problem.make(16, 256, 7168, FP32, b_layout="column", precision="tf32", batch_invariant=True)
    found = candidates(problem, device)
    assert all(is_legal(config, problem, device) is None for config in found)
    has_tf32 = device.vendor == "nvidia" and device.capability >= (8, 0)
    assert {config.input_precision for config in found} <= {"tf32" if has_tf32 else "ieee"}


def test_there_is_nothing_to_choose_where_there_is_nothing_to_multiply():
    for sizes in ((0, 4, 8), (4, 0, 8), (4, 4, 0)):
        assert candidates(Problem.make(*sizes, BF16), H200) == ()
