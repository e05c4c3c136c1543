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
        "call": 2.31,
        "memory": 0.449,
        "traffic": 0.967,
        "multiplies": 0.241,
        "partials": 0.553,
        "idle": -0.678,
        "blocks": 0.163,
        "thread_bytes": 0.378,
        "multiplies_16_rows": 1.85,
        "traffic_32_rows": 1.09,
        "long_block": 0.131,
        "traffic_long_blocks": -0.248,
        "reducer_work": 0.0943,
        "two_stages": 0.148,
        "thread_sums": -0.0354,
    },
    ("half", "static_b"): {
        "call": 2.1,
        "memory": 0.16,
        "traffic": 2.53,
        "multiplies": -0.168,
        "partials": 0.78,
        "splits": 0.0967,
        "idle": -0.103,
        "bytes_unpipelined": -1.06,
        "two_warps": -0.0315,
        "few_reducers": -0.0451,
        "eight_warps": 0.0617,
        "traffic_32_rows": 0.279,
        "thread_sums": -0.0134,
    },
    ("mixed tf32x3", ANY): {
        "call": 2.65,
        "memory": 0.277,
        "traffic": 1.65,
        "multiplies": 0.967,
        "partials": 0.435,
        "splits": 0.603,
        "idle": -1.62,
        "blocks": 0.741,
        "traffic_long_blocks": 0.429,
        "traffic_unpipelined": 1.6,
        "eight_warps": 0.319,
        "rereading_a": -0.497,
        "padding": -0.0261,
    },
    ("mixed tf32x3", "static_b"): {
        "call": 2.8,
        "traffic": 2.28,
        "partials": 0.535,
        "splits": 0.53,
        "idle": -0.615,
        "tile_16_rows": -0.626,
        "block_256": 1.19,
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
        "call": 2.54,
        "memory": 2.67,
        "partials": 1.8,
        "idle": -0.32,
        "blocks": 0.0571,
        "rereading_b": 0.962,
        "two_stages": 0.293,
        "thread_sums": 0.486,
        "two_warps": -0.131,
        "multiplies_per_warp": 1.12,
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
    is_unpipelined, is_long = config.num_stages == 1, config.block_k >= 128
    return {
        "call": 1.0,
        "memory": unique_microseconds(problem, device),
        "traffic": traffic,
        "traffic_unpipelined": traffic * is_unpipelined,
        "traffic_long_blocks": traffic * is_long,
        # 32 rows are too few for wgmma and two instructions for mma.
        "traffic_32_rows": traffic * (config.block_m == 32),
        "bytes_unpipelined": blocks * block_bytes * 1e-5 * is_unpipelined,
        "multiplies": multiplies,
        "multiplies_16_rows": multiplies * (config.block_m == 16),
        "multiplies_per_warp": multiplies * 4 / config.num_warps,
        "partials": 4e-6 * splits * outputs,
        "splits": splits * 1e-2,
        "idle": max(0.0, 1.0 - waves),
        "blocks": math.sqrt(blocks - 1),
        "single_block": float(blocks == 1),
        "long_block": float(is_long),
        "block_256": float(config.block_k == 256),
        "two_stages": float(config.num_stages == 2),
        "two_warps": float(config.num_warps == 2),
        "eight_warps": float(config.num_warps == 8),
        "tile_16_rows": float(config.block_m == 16),
        "tile_32_rows": float(config.block_m == 32),
        "padding": rows * config.block_m / problem.m - 1.0,
        "thread_bytes": block_bytes / threads / 256,
        "thread_sums": max(0.0, math.log2(config.block_m * config.block_n / threads / 8)),
        "rereading_a": (columns - 1) * problem.m * problem.k * a_size * 1e-7,
        "rereading_b": (rows - 1) * problem.n * problem.k * b_size * 1e-7,
        "reducer_work": splits * config.reduce_block * 1e-3,
        "few_reducers": max(0.0, math.log2(128 / ceil_divide(outputs, config.reduce_block))),
    }


def _arithmetic(config: Config, problem: Problem) -> str:
    if problem.accumulate_dtype == torch.float64:
        return "fp64"
    if problem.precision is None:
        return "half"
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
