"""Modelled time of a config, from which candidates are ranked: microseconds on an H200, an order elsewhere.

What counts at these shapes, in the order in which it matters: what one program must pull through its multiprocessor
before it can store its tile, how the programs fill the multiprocessors, the unavoidable bytes from memory, and the
workspace that the second stage reads back. The costs were fitted by least squares to 12000 measured configs of 750
problems on an H200, the fast ones weighing most; on other devices only their ratios matter, and those follow from the
device's facts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from decompose_k.legality import ceil_divide, k_blocks

if TYPE_CHECKING:
    from decompose_k.config import Config
    from decompose_k.device import Device
    from decompose_k.problem import Problem

# Ours must be expected to win by this much: a wrong guess for torch costs some of the gain, one against it costs time.
TORCH_MARGIN = 0.95


def predict_microseconds(config: Config, problem: Problem, device: Device) -> float:
    """Modelled time of one call with operands in device memory; only the order of two predictions is meant."""
    if config.kernel == "mm":
        return TORCH_MARGIN * _predict_torch(problem, device)
    if config.kernel == "dot":
        return _predict_dot(config, problem, device)
    costs = _COSTS.get((_arithmetic(config, problem), config.launch)) or _COSTS[_arithmetic(config, problem), ANY]
    amounts = _amounts(config, problem, device)
    return sum(cost * amounts[name] for name, cost in costs.items())


# Microseconds for what a pair is charged for, by arithmetic and launch.
ANY = "any launch"
_COSTS: dict[tuple[str, str], dict[str, float]] = {
    ("half", ANY): {
        "call": 2.44,
        "memory": 0.648,
        "traffic": 0.762,
        "multiplies": 0.202,
        "partials": 0.534,
        "splits": -0.00791,
        "idle": -0.57,
        "blocks": 0.158,
        "thread_bytes": 0.292,
        "multiplies_16_rows": 1.6,
        "warp_tile": -0.0487,
        "thread_bytes_unpipelined": 0.152,
        "reducer_work": 0.0718,
        "prefetching_a": 0.00996,
        "traffic_32_rows": 1.08,
    },
    ("half", "static_b"): {
        "call": 2,
        "memory": 0.198,
        "traffic": 2.44,
        "multiplies": -0.225,
        "partials": 0.787,
        "splits": 0.112,
        "idle": -0.16,
        "bytes_unpipelined": -0.888,
        "two_warps": -0.0394,
        "tile_32_rows": 0.261,
        "eight_warps": 0.0851,
        "more_waves": -0.0054,
        "warp_tile": 0.0102,
    },
    ("mixed tf32x3", ANY): {
        "call": 2.95,
        "memory": 0.286,
        "traffic": 1.29,
        "multiplies": 0.866,
        "partials": 0.462,
        "splits": 0.526,
        "idle": -1.52,
        "blocks": 0.98,
        "traffic_long_blocks": 0.642,
        "tile_16_rows": -0.56,
        "wide_tile": 0.521,
        "warp_tile": -0.147,
        "block_256": 0.784,
        "single_block": 0.867,
    },
    ("mixed tf32x3", "static_b"): {
        "call": 2.35,
        "memory": 1.36,
        "traffic": 1.1,
        "multiplies": 2.51,
        "partials": 0.257,
        "splits": 0.635,
        "idle": -0.929,
        "tile_16_rows": -0.752,
        "tile_32_rows": -0.572,
        "block_256": 1.37,
        "warp_tile": -0.19,
    },
    ("fp32 tf32x3", ANY): {
        "call": 2.65,
        "memory": 1.1,
        "traffic": 2.07,
        "partials": 0.391,
        "splits": 0.251,
        "idle": -0.808,
        "blocks": 0.724,
        "tile_32_rows": 0.514,
        "eight_warps": 1.41,
        "rereading_a": -1.15,
        "two_warps": 0.355,
        "single_block": 0.297,
        "reducer_work": 0.106,
        "thread_sums": 0.125,
    },
    ("ieee", ANY): {
        "call": 2.27,
        "memory": 1.86,
        "partials": 1.46,
        "splits": 0.149,
        "idle": -0.0993,
        "blocks": 0.0705,
        "traffic_32_rows": 0.741,
        "two_warps": -0.12,
        "sums": 0.745,
        "two_stages": 0.297,
        "all_traffic": 1.97,
    },
    ("tf32", ANY): {
        "call": 2.3,
        "memory": 0.5,
        "traffic": 2.4,
        "partials": 0.6,
        "splits": 0.6,
        "blocks": 0.4,
    },
    ("fp64", ANY): {
        "call": 2.3,
        "memory": 0.5,
        "traffic": 4.0,
        "multiplies": 10.0,
        "partials": 0.9,
        "splits": 0.6,
        "blocks": 0.4,
    },
}


def _amounts(config: Config, problem: Problem, device: Device) -> dict[str, float]:
    """How much a pair makes of everything that one may be charged for."""
    rows, columns = ceil_divide(problem.m, config.block_m), ceil_divide(problem.n, config.block_n)
    blocks = k_blocks(config, problem)
    splits = ceil_divide(problem.k, blocks * config.block_k)
    waves = rows * columns * splits / device.multiprocessors
    # Up to two programs share a multiprocessor and overlap; beyond that the last wave counts whole.
    crowding = max(1.0, waves) if waves <= 2 else float(ceil_divide(rows * columns * splits, device.multiprocessors))
    a_size, b_size = problem.a_dtype.itemsize, problem.b_dtype.itemsize
    block_bytes = config.block_k * (config.block_m * a_size + config.block_n * b_size)
    threads = 32 * config.num_warps
    # Of the busiest multiprocessor, in 100 kB and in millions.
    traffic = crowding * blocks * block_bytes * 1e-5
    multiplies = crowding * blocks * config.block_k * config.block_m * config.block_n * 1e-6
    outputs = problem.m * problem.n
    is_unpipelined = config.num_stages == 1
    block_bytes_of_thread = block_bytes / threads / 256
    return {
        "call": 1.0,
        "memory": unique_microseconds(problem, device),
        "traffic": traffic,
        "traffic_long_blocks": traffic * (config.block_k >= 128),
        # 32 rows are too few for wgmma and two instructions for mma.
        "traffic_32_rows": traffic * (config.block_m == 32),
        "all_traffic": rows * columns * splits * blocks * block_bytes * 1e-7,
        "bytes_unpipelined": blocks * block_bytes * 1e-5 * is_unpipelined,
        "multiplies": multiplies,
        "multiplies_16_rows": multiplies * (config.block_m == 16),
        "partials": 4e-6 * splits * outputs,
        "splits": splits * 1e-2,
        "idle": max(0.0, 1.0 - waves),
        "more_waves": max(0.0, waves - 1.0),
        "blocks": math.sqrt(blocks - 1),
        "single_block": float(blocks == 1),
        "block_256": float(config.block_k == 256),
        "two_stages": float(config.num_stages == 2),
        "two_warps": float(config.num_warps == 2),
        "eight_warps": float(config.num_warps == 8),
        "tile_16_rows": float(config.block_m == 16),
        "tile_32_rows": float(config.block_m == 32),
        "wide_tile": float(config.block_n >= 128),
        # A warp is best off with 256 outputs.
        "warp_tile": abs(math.log2(config.block_m * config.block_n / config.num_warps / 256)),
        "sums": config.block_m * config.block_n / threads / 32,
        "thread_sums": max(0.0, math.log2(config.block_m * config.block_n / threads / 8)),
        "thread_bytes": block_bytes_of_thread,
        "thread_bytes_unpipelined": max(0.0, block_bytes_of_thread - 1.0) * is_unpipelined,
        "rereading_a": (columns - 1) * problem.m * problem.k * a_size * 1e-7,
        "prefetching_a": float("a" in config.prefetch),
        "reducer_work": splits * config.reduce_block * 1e-3,
    }


def _arithmetic(config: Config, problem: Problem) -> str:
    if problem.accumulate_dtype == torch.float64:
        return "fp64"
    if problem.precision is None:
        # Two kinds of halves have no tensor core in common.
        return "half" if problem.a_dtype == problem.b_dtype else "ieee"
    if config.input_precision == "tf32x3":
        return "mixed tf32x3" if torch.bfloat16 in (problem.a_dtype, problem.b_dtype) else "fp32 tf32x3"
    return config.input_precision


def _predict_dot(config: Config, problem: Problem, device: Device) -> float:
    """The dot kernel on an H200, within 14 %."""
    second_row = min(problem.m, problem.n) - 1
    programs = ceil_divide(max(problem.m, problem.n), config.block_n)
    waves = programs * 32 * config.num_warps / (2048 * device.multiprocessors)
    held = config.block_n * config.block_k / (32 * config.num_warps)
    return (
        (0.85 if config.launch == "static_b" else 1.32)
        + 1.27 * unique_microseconds(problem, device)
        + second_row * (0.49 + 0.05e-3 * problem.k + 2.8 * max(0.0, waves - 1.0))
        + 0.0015 * held
        + 0.01 * math.log2(config.block_n)
    )


def _predict_torch(problem: Problem, device: Device) -> float:
    """torch.mm on an H200, of halves within 6 %: what it takes to begin with, bytes, arithmetic and the length of K."""
    unique, multiplies = unique_microseconds(problem, device), problem.m * problem.n * problem.k
    length = max(0.0, math.log2(max(1, problem.k) / 1024))
    activation = 0.8 if problem.activation else 0.0
    if problem.accumulate_dtype == torch.float64:
        return 6.3 + 1.1 * unique + multiplies / 25e6 + activation
    if problem.precision in (None, "tf32"):
        return 5.2 + 0.47 * unique + multiplies / 600e6 + 0.64 * length + activation
    product = 4.5 + max(2.6 * unique, multiplies / 25e6) + 1.9 * length
    # Operands of two dtypes are converted first.
    return product * (1.0 if problem.a_dtype == problem.b_dtype else 1.7) + activation


def unique_microseconds(problem: Problem, device: Device) -> float:
    """Time to move each operand and the result once at the memory's peak."""
    return problem.bytes / (device.bandwidth or 1e12) * 1e6
