"""Modelled time of a config, from which candidates are ranked: microseconds on an H200, an order elsewhere.

What counts at these shapes, in the order in which it matters: what one program must pull through its multiprocessor
before it can store its tile, how the programs fill the multiprocessors, the unavoidable bytes from memory, and the
workspace that the second stage reads back. The costs were fitted by least squares to 12000 timings of 860 problems on
an H200, the fast ones weighing most, but for those marked as fitted or set by hand since; on other devices only their
ratios matter, and those follow from the device's facts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from decompose_k.legality import ceil_divide, is_long, k_blocks, reserve_for
from decompose_k.long_k_costs import predict_long_k
from decompose_k.torch_costs import predict_torch

if TYPE_CHECKING:
    from decompose_k.config import Config
    from decompose_k.device import Device
    from decompose_k.problem import Problem

# Ours must be expected to win by this much: a wrong guess for torch costs some of the gain, one against it costs time.
TORCH_MARGIN = 0.95


def predict_microseconds(config: Config, problem: Problem, device: Device) -> float:
    """Modelled time of one call with operands in device memory; only the order of two predictions is meant."""
    if config.kernel == "mm":
        return TORCH_MARGIN * predict_torch(problem, device)
    if config.kernel == "pair" and is_long(problem):
        return predict_long_k(config, problem, device, _arithmetic(config, problem))
    if config.kernel == "dot":
        costs, amounts = _DOT_COSTS, _dot_amounts(config, problem, device)
    else:
        arithmetic = _arithmetic(config, problem)
        costs = _COSTS.get((arithmetic, config.launch)) or _COSTS[arithmetic, ANY]
        amounts = _amounts(config, problem, device)
    return sum(cost * amounts[name] for name, cost in costs.items())


# Microseconds for what a pair is charged for, by arithmetic and launch.
ANY = "any launch"
_HALF: dict[str, float] = {
    "call": 2.13,
    "memory": 0.547,
    "traffic": 1.39,
    "partials": 0.453,
    "splits": 0.0579,
    "idle": -0.407,
    "reducer_work": 0.0892,
    "two_stages": 0.242,
    "warp_tile": 0.0392,
    "block_64": -0.11,
    "many_reducers": 0.0884,
    "wide_tile": 0.187,
    "more_waves": 0.351,
    "eight_warps": 0.0709,
    "bytes_unpipelined": 0.771,
    "blocks": 0.195,
    "multiplies_32_rows": 0.579,
    "block_256": 0.123,
    "multiplies_16_rows": 0.708,
    "tile_16_rows": -0.106,
}
_MIXED: dict[str, float] = {
    "call": 3.58,
    "memory": 0.147,
    "traffic": 1.7,
    "splits": 0.0825,
    "four_warps": -0.323,
    "reducer_work": 0.209,
    "block_64": -0.392,
    "tile_16_rows": -0.637,
    "more_waves": 0.773,
    "wide_tile": 0.398,
    "many_reducers": 0.188,
    "blocks": 0.25,
    "multiplies": 0.997,
    "traffic_of_a": -0.734,
    "all_traffic": 0.623,
    "thread_sums": 0.162,
}
_FP32: dict[str, float] = {
    "call": 1.92,
    "memory": 0.427,
    "traffic": 3.13,
    "partials": 0.861,
    "splits": 1.15,
    "many_reducers": -0.379,
    "blocks": 0.766,
    "traffic_of_a": -0.583,
    "rounds": 0.816,
    # By hand, and a switch more than a cost: so many multiplications are left to torch.
    "multiplies_beyond_4": 7.0,
}
_COSTS: dict[tuple[str, str], dict[str, float]] = {
    ("half", ANY): _HALF,
    # Fitted to what 430 problems take with the first K blocks of both operands fetched early: a third less, beyond the
    # least and beyond what the bytes take, than without.
    ("half", "wait_first"): {
        **{name: 0.67 * cost for name, cost in _HALF.items()},
        "call": 2.12,
        "memory": 0.67,
        # By hand: what is fetched early is a part of a large operand alone.
        "memory_beyond_4": 0.1,
        # By hand: 1024 x 64 x 14336 takes 18.0 us with two stages, 12.0 with four.
        "traffic_two_stages": 1.0,
        # By hand: 512 x 512 x 2048 takes 6.9 us at the best, and torch 6.7.
        "outputs_beyond_131072": 0.8,
        # By hand: 1024 x 160 x 6144 takes 12.1 us with such tiles, 10.8 with half as many rows.
        "multiplies_128_x_128": 0.12,
    },
    ("half", "static_b"): {
        "call": 1.61,
        "memory": 0.525,
        "traffic": 1.39,
        "partials": 0.624,
        "splits": 0.334,
        "idle": -0.0505,
        "reducer_work": 0.0858,
        "room": 0.111,
        "many_reducers": 0.0834,
        "multiplies": -0.197,
        "multiplies_32_rows": 0.357,
        "all_traffic": 0.268,
        "block_256": 0.0404,
        "one_warp": 0.0599,
        "room_for_memory": -0.139,
        "block_64": -0.0257,
        # By hand: 4 x 256 x 7168 takes 3.3 us with two warps a tile of 64 x 256, and 2.7 us with four.
        "thread_bytes_over_512": 0.6,
    },
    ("mixed tf32x3", ANY): _MIXED,
    ("mixed tf32x3", "wait_first"): {
        **{name: 0.85 * cost for name, cost in _MIXED.items()},
        "call": 3.5,
        # By hand: 1024 x 768 x 6144 takes 165 us with two stages, 98 with four of half the K.
        "traffic_two_stages": 0.4,
    },
    ("mixed tf32x3", "static_b"): {
        "call": 1.96,
        "memory": 1.11,
        "traffic": -0.521,
        "reducer_work": 0.138,
        "multiplies": 4.98,
        "multiplies_16_rows": 1.05,
        "more_waves": 0.18,
        "room": 0.064,
    },
    ("fp32 tf32x3", ANY): _FP32,
    # By hand: 64 x 64 x 12288 takes 8.0 us with two stages, 6.5 with three.
    ("fp32 tf32x3", "wait_first"): {**_FP32, "traffic_two_stages": 2.5},
    ("ieee", ANY): {
        "call": 1.14,
        "traffic": 6.57,
        "partials": 2.59,
        "splits": 0.222,
        "reducer_work": 0.138,
        "rounds": 1.83,
        "thread_bytes": 0.299,
    },
    ("tf32", ANY): {
        "call": 2.3,
        "memory": 0.5,
        "traffic": 2.4,
        "partials": 0.6,
        "splits": 0.6,
        "blocks": 0.4,
    },
    # By hand, of three sizes without an early fetch of a.
    ("fp64", ANY): {
        "call": 2.3,
        "memory": 0.31,
        "traffic": 2.5,
        "multiplies": 6.2,
        "partials": 0.56,
        "splits": 0.37,
        "blocks": 0.25,
    },
    # Of 45 timings of three sizes: 16 x 16 x 16384 takes 3.5 us, 16 x 256 x 7168 6.5 and 64 x 64 x 16384 8.3, the last
    # 12.4 with two stages.
    ("fp64", "wait_first"): {
        "call": 1.82,
        "memory": 0.234,
        "traffic": 1.72,
        "multiplies": 4.36,
        "partials": 0.743,
        "splits": 0.835,
        "two_stages": 0.632,
        "bytes_unpipelined": 1.27,
        "more_waves": 0.861,
        "eight_warps": 0.611,
    },
}


_DOT_COSTS: dict[str, float] = {
    "call": 1.23,
    "static_b": -0.384,
    "memory": 1.14,
    "second_row": 0.546,
    "second_row_16_warps": 0.176,
    # By hand: 2 x 512 x 2048 takes 2.6 us with pairs of rows and eight warps, 2.2 us with four.
    "second_row_pairs_8_warps": 0.15,
    "second_row_single": 0.12,
    # By hand: 64 x 1 x 4096, bf16 x fp32, takes 2.0 us with one row a program and 1.65 us with two.
    "single_wide": 0.2,
    "held": -0.39,
    "held_over_16": 0.239,
    "waiting_over_32": 0.347,
    # By hand: 2 x 16 x 8192 takes 2.7 us with one row a program, the pair 2.0.
    "waiting_single_8192": 0.28,
    "weight_bytes": 0.125,
    "warps": 0.6,
    "short": -0.26,
}


def _amounts(config: Config, problem: Problem, device: Device) -> dict[str, float]:
    """How much a pair makes of everything that one may be charged for."""
    rows, columns = ceil_divide(problem.m, config.block_m), ceil_divide(problem.n, config.block_n)
    blocks = k_blocks(config, problem)
    splits = ceil_divide(problem.k, blocks * config.block_k)
    programs = rows * columns * splits
    waves, whole_waves = programs / device.multiprocessors, ceil_divide(programs, device.multiprocessors)
    # Up to two programs share a multiprocessor and overlap; beyond that the last wave counts whole.
    crowding = max(1.0, waves) if waves <= 2 else float(whole_waves)
    a_size, b_size = problem.a_dtype.itemsize, problem.b_dtype.itemsize
    block_bytes = config.block_k * (config.block_m * a_size + config.block_n * b_size)
    threads = 32 * config.num_warps
    # Of the busiest multiprocessor, in 100 kB and in millions.
    traffic = crowding * blocks * block_bytes * 1e-5
    multiplies = crowding * blocks * config.block_k * config.block_m * config.block_n * 1e-6
    outputs = problem.m * problem.n
    reducers = ceil_divide(outputs, config.reduce_block)
    is_unpipelined = config.num_stages == 1
    memory = device.microseconds_to_move(problem.bytes)
    # A multiprocessor may hold a program of the next call beside its share of this one.
    has_room = 0 < config.reserve_kib < reserve_for(whole_waves, device)
    return {
        "call": 1.0,
        "memory": memory,
        "memory_beyond_4": max(0.0, memory - 4.0),
        "traffic": traffic,
        "traffic_two_stages": max(0.0, traffic - 0.5) * (config.num_stages == 2),
        "traffic_of_a": crowding * blocks * config.block_k * config.block_m * a_size * 1e-5,
        "all_traffic": programs * blocks * block_bytes * 1e-7,
        "bytes_unpipelined": blocks * block_bytes * 1e-5 * is_unpipelined,
        "multiplies": multiplies,
        "multiplies_beyond_4": max(0.0, multiplies - 4.0),
        "multiplies_128_x_128": multiplies * (min(config.block_m, config.block_n) == 128),
        "multiplies_16_rows": multiplies * (config.block_m == 16),
        "multiplies_32_rows": multiplies * (config.block_m == 32),
        "partials": 4e-6 * splits * outputs,
        "outputs_beyond_131072": max(0, outputs - 131072) * 1e-5,
        "splits": splits * 1e-2,
        "idle": max(0.0, 1.0 - waves),
        "more_waves": max(0.0, waves - 1.0),
        "room": float(has_room),
        "room_for_memory": has_room * memory,
        "blocks": math.sqrt(blocks - 1),
        # Rounds of loads that wait for others to be used up.
        "rounds": ceil_divide(blocks, config.num_stages) - 1.0,
        "block_64": float(config.block_k == 64),
        "block_256": float(config.block_k == 256),
        "two_stages": float(config.num_stages == 2),
        "one_warp": float(config.num_warps == 1),
        "four_warps": float(config.num_warps == 4),
        "eight_warps": float(config.num_warps == 8),
        "tile_16_rows": float(config.block_m == 16),
        "wide_tile": float(config.block_n >= 128),
        # A warp is best off with 256 outputs.
        "warp_tile": abs(math.log2(config.block_m * config.block_n / config.num_warps / 256)),
        "thread_sums": max(0.0, math.log2(config.block_m * config.block_n / threads / 8)),
        "thread_bytes": block_bytes / threads / 256,
        "thread_bytes_over_512": max(0.0, block_bytes / threads / 256 - 2.0),
        "reducer_work": splits * config.reduce_block * 1e-3,
        "many_reducers": max(0.0, math.log2(reducers / device.multiprocessors)),
    }


def _arithmetic(config: Config, problem: Problem) -> str:
    if problem.accumulate_dtype == torch.float64:
        return "fp64"
    if problem.precision is None:
        return "half" if problem.is_one_half else "ieee"
    if config.input_precision == "tf32x3":
        return "mixed tf32x3" if torch.bfloat16 in (problem.a_dtype, problem.b_dtype) else "fp32 tf32x3"
    return config.input_precision


def _dot_amounts(config: Config, problem: Problem, device: Device) -> dict[str, float]:
    """How much the dot kernel makes of what it is charged for."""
    second_row = min(problem.m, problem.n) - 1.0
    programs = ceil_divide(max(problem.m, problem.n), config.block_n)
    # Weights of one thread; more than 16 it cannot load at once, and those that wait for a predecessor wait for each.
    held = config.block_n * config.block_k / (32 * config.num_warps)
    # With fewer columns than rows, it is the rows of a that programs stream.
    dtypes = (problem.a_dtype, problem.b_dtype)
    streamed, other = dtypes if problem.n < problem.m else dtypes[::-1]
    weight_bytes = config.block_n * config.block_k * streamed.itemsize
    return {
        "call": 1.0,
        "static_b": float(config.launch == "static_b"),
        "memory": device.microseconds_to_move(problem.bytes),
        "second_row": second_row,
        "second_row_16_warps": second_row * (config.num_warps == 16),
        "second_row_pairs_8_warps": second_row * (config.block_n == 2 and config.num_warps == 8),
        "second_row_single": second_row * (config.block_n == 1),
        # A program that streams one row reads more of the other operand, if that is of a wider dtype.
        "single_wide": float(config.block_n == 1 and streamed.itemsize < other.itemsize),
        "held": held * 1e-2,
        "held_over_16": max(0.0, math.log2(held / 16)),
        "waiting_over_32": max(0.0, math.log2(held / 32)) * (config.launch != "static_b"),
        "waiting_single_8192": float(config.block_n == 1 and config.block_k >= 8192 and config.launch == "wait_first"),
        "weight_bytes": max(1.0, programs / device.multiprocessors) * weight_bytes * 1e-5,
        "warps": programs * config.num_warps / device.multiprocessors / 64,
        "short": float(problem.k <= 1024),
    }
