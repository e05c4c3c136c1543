"""Legal, ranked configs for a problem on a device: a pure function, no measuring, no GPU call.

The rank is a model of one call in microseconds. What it counts, in the order in which it matters at these shapes: how
the programs fill the multiprocessors (whole waves), what one program must pull through its multiprocessor before it can
store its tile, the unavoidable bytes from memory, and the workspace that the second stage reads back. Its constants
were fitted to sweeps on an H200; on other devices only their ratios matter, and those follow from the device's facts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from decompose_k.config import Config
from decompose_k.device import Device
from decompose_k.dtypes import HALVES
from decompose_k.legality import FINE_ENOUGH, MOST_DOT_K, MOST_DOT_ROWS, ceil_divide, is_legal, k_blocks, triton_refusal
from decompose_k.problem import Problem

MOST_CANDIDATES = 30
# Partials above this never won a sweep on an H200, and Inductor's authors report the same bound.
MOST_WORKSPACE_BYTES = 8 << 20
MOST_SPLITS = 256
MOST_PREFETCH_BYTES = 7 << 20


def candidates(problem: Problem, device: Device) -> tuple[Config, ...]:
    """At most 30 legal configs, best first; empty where the Triton engine cannot compute the problem.

    With `batch_invariant` there is one: it is chosen from n, k and the dtypes alone, so that every m runs the same
    arithmetic in the same order.
    """
    if triton_refusal(problem, device) is not None or 0 in (problem.m, problem.n, problem.k):
        return ()
    if problem.batch_invariant:
        return (_batch_invariant(problem, device),)
    legal = [config for config in _enumerate(problem, device) if is_legal(config, problem, device) is None]
    ranked = sorted([*legal, Config("mm")], key=lambda config: predict_microseconds(config, problem, device))
    return tuple(ranked[:MOST_CANDIDATES])


def predict_microseconds(config: Config, problem: Problem, device: Device) -> float:
    """Modelled time of one call with operands in device memory; only the order of two predictions is meant."""
    if config.kernel == "mm":
        return _predict_torch(problem, device)
    if config.kernel == "dot":
        return _predict_dot(config, problem, device)
    costs = _COSTS.get((_arithmetic(config, problem), config.launch)) or _COSTS[_arithmetic(config, problem), ANY]
    return sum(cost * amount for cost, amount in zip(costs, _amounts(config, problem, device), strict=True))


# What a pair is charged for, and microseconds for each on an H200, fitted to 4000 measured pairs.
_CHARGES = (
    "the call",
    "microsecond of reading each operand once",
    "100 kB through the busiest multiprocessor",
    "million multiply-adds of the busiest multiprocessor",
    "MB of partials",
    "100 splits",
    "share of the multiprocessors without a program",
    "square root of the K blocks after the first",
    "256 bytes of one K block in a thread",
    "tile of 32 rows, too few for wgmma and too many for one mma",
    "halving of the reducer programs below 128",
    "1000 partials in a reducer program",
    "K block of 256",
)
ANY = "any launch"
_COSTS: dict[tuple[str, str], tuple[float, ...]] = {
    ("half", "static_b"): (2.0, 0.13, 1.62, -0.29, 0.72, 0.18, -0.17, 0.0, -0.1, 0.18, -0.04, 0.08, 0.1),
    ("half", ANY): (2.31, 0.75, 1.8, -0.54, 0.49, 0.1, -0.49, 0.23, 0.26, 0.29, -0.06, 0.1, 0.13),
    ("mixed tf32x3", "static_b"): (1.11, 1.81, 0.78, 0.89, 0.25, 0.64, -0.43, 0.0, 0.31, 0.11, -0.1, 0.17, 0.84),
    ("mixed tf32x3", ANY): (2.19, 0.6, 1.18, 1.31, 0.25, 0.62, -1.1, 0.63, 0.74, 0.37, -0.1, 0.31, 0.81),
    ("fp32 tf32x3", ANY): (2.92, 0.88, 1.56, 1.17, 0.25, 0.55, -0.25, 0.82, -0.26, 0.7, -0.36, 0.22, 0.0),
    ("ieee", ANY): (2.24, 2.75, 1.09, 0.07, 0.38, 0.34, 0.51, 0.19, 0.82, 1.03, -0.51, 0.49, -1.04),
    ("tf32", ANY): (2.3, 0.5, 2.4, 0.0, 0.6, 0.6, 0.0, 0.4, 0.0, 0.3, 0.0, 0.2, 0.0),
    ("fp64", ANY): (2.3, 0.5, 4.0, 10.0, 0.9, 0.6, 0.0, 0.4, 0.0, 0.3, 0.0, 0.2, 0.0),
}


def _amounts(config: Config, problem: Problem, device: Device) -> tuple[float, ...]:
    """How much of each of `_CHARGES` a pair makes."""
    tiles = ceil_divide(problem.m, config.block_m) * ceil_divide(problem.n, config.block_n)
    blocks = k_blocks(config, problem)
    splits = ceil_divide(problem.k, blocks * config.block_k)
    waves = tiles * splits / device.multiprocessors
    # Up to two programs share a multiprocessor and overlap; beyond that the last wave counts whole.
    crowding = max(1.0, waves) if waves <= 2 else float(ceil_divide(tiles * splits, device.multiprocessors))
    block_bytes = config.block_k * (
        config.block_m * problem.a_dtype.itemsize + config.block_n * problem.b_dtype.itemsize
    )
    outputs = problem.m * problem.n
    return (
        1.0,
        _unique_microseconds(problem, device),
        crowding * blocks * block_bytes * 1e-5,
        crowding * blocks * config.block_k * config.block_m * config.block_n * 1e-6,
        4e-6 * splits * outputs,
        splits * 1e-2,
        max(0.0, 1.0 - waves),
        math.sqrt(blocks - 1),
        block_bytes / (32 * config.num_warps) / 256,
        1.0 if config.block_m == 32 else 0.0,
        max(0.0, math.log2(128 / ceil_divide(outputs, config.reduce_block))),
        splits * config.reduce_block * 1e-3,
        1.0 if config.block_k == 256 else 0.0,
    )


def _arithmetic(config: Config, problem: Problem) -> str:
    if problem.accumulate_dtype == torch.float64:
        return "fp64"
    if problem.precision is None:
        return "half"
    if config.input_precision == "tf32x3":
        return "mixed tf32x3" if torch.bfloat16 in (problem.a_dtype, problem.b_dtype) else "fp32 tf32x3"
    return config.input_precision


def _predict_dot(config: Config, problem: Problem, device: Device) -> float:
    streams = min(problem.m, problem.n)
    a_thread = config.block_n * config.block_k / (32 * config.num_warps)
    uneven = 0.05 * abs(math.log2(a_thread / 16))
    static = -0.4 if config.launch == "static_b" else 0.0
    return 0.75 + 1.25 * _unique_microseconds(problem, device) + 0.6 * (streams - 1) + uneven + static


def _predict_torch(problem: Problem, device: Device) -> float:
    """torch.mm on an H200: 6.3 us to begin with, then bytes, then arithmetic; fp32 off the tensor cores is slow."""
    multiplies = problem.m * problem.n * problem.k
    if problem.precision in (None, "tf32"):
        arithmetic = multiplies / (700e6 if problem.accumulate_dtype != torch.float64 else 25e6)
    else:
        arithmetic = multiplies / (10e6 if problem.m * problem.n < 1 << 17 else 25e6)
    epilogue = 1.5 if problem.activation or problem.bias_dtype is not None else 0.0
    return 6.3 + 1.1 * _unique_microseconds(problem, device) + arithmetic + epilogue


def _unique_microseconds(problem: Problem, device: Device) -> float:
    return problem.bytes / (device.bandwidth or 1e12) * 1e6


def _enumerate(problem: Problem, device: Device) -> Iterator[Config]:
    launches = _launches(problem, device)
    if min(problem.m, problem.n) <= MOST_DOT_ROWS and problem.k <= MOST_DOT_K:
        yield from _dots(problem, launches)
    for precision in _precisions(problem, device):
        # With many columns a half-empty tile of 64 rows still beats 32: 4.4 against 4.7 us for 32 x 256 x 7168.
        rows = problem.m if problem.m <= 16 or problem.n < 128 else max(33, problem.m)
        for block_m in _tile_sizes(rows, problem.static_b):
            for block_n in _tile_sizes(problem.n, problem.static_b):
                yield from _pairs(problem, device, launches, precision, block_m, block_n)


def _dots(problem: Problem, launches: tuple[str, ...]) -> Iterator[Config]:
    block_k = max(64, _power_of_two(problem.k))
    for block_n in (1, 2, 4):
        for num_warps in (4, 8, 16):
            if not 8 <= block_n * block_k / (32 * num_warps) <= 64 and num_warps != 4:
                continue
            for launch in launches:
                prefetch = "b" if launch == "wait_first" else ""
                yield Config(
                    "dot", block_n=block_n, block_k=block_k, num_warps=num_warps, launch=launch, prefetch=prefetch
                )


def _pairs(
    problem: Problem, device: Device, launches: tuple[str, ...], precision: str, block_m: int, block_n: int
) -> Iterator[Config]:
    """Pairs of one tile shape: whole multiples of a wave of programs, or one K block a program."""
    tiles = ceil_divide(problem.m, block_m) * ceil_divide(problem.n, block_n)
    for block_k in (32, 64, 128, 256):
        most_blocks = ceil_divide(problem.k, block_k)
        programs = (device.multiprocessors * 3 // 4, device.multiprocessors, device.multiprocessors * 2)
        wanted = {ceil_divide(most_blocks, max(1, count // tiles)) for count in programs}
        # One block, or twice the smallest fill, leaves part of the device empty and the second stage less to read.
        for blocks in sorted(wanted | {1, min(most_blocks, 2 * max(wanted))}):
            split_k = ceil_divide(problem.k, block_k * blocks)
            if split_k > 1 and not _split_is_sane(problem, device, tiles, split_k):
                continue
            if block_k == 256 and blocks in (2, 3):
                # Too few blocks to fill a pipeline, too large for their loads to hide each other.
                continue
            row = block_m * problem.a_dtype.itemsize + block_n * problem.b_dtype.itemsize
            deep = precision != "tf32x3" and 4 * block_k * row <= device.shared_bytes // 2
            num_stages = 1 if blocks == 1 else min(blocks, 4 if deep else 3)
            for num_warps in _warp_choices(block_m * block_n):
                for launch in launches:
                    yield Config(
                        "pair",
                        split_k=split_k,
                        block_m=block_m,
                        block_n=block_n,
                        block_k=block_k,
                        num_warps=num_warps,
                        num_stages=num_stages,
                        reduce_block=_reduce_block(problem, split_k),
                        input_precision=precision,
                        launch=launch,
                        prefetch=_prefetch(problem, launch, block_m, block_n),
                    )


def _warp_choices(tile: int) -> tuple[int, ...]:
    """Small tiles have too little work for four warps: 16 x 16 x 8192 takes 2.9 us with two and 3.0 us with four."""
    return (1, 2, 4) if tile <= 256 else (2, 4) if tile <= 1024 else (4, 8) if tile <= 8192 else (8,)


def _reduce_block(problem: Problem, split_k: int) -> int:
    """Outputs of a reducer program: about 128 programs, fewer where there is little to add up.

    Too large a block costs more than too small a one: 16 x 16 x 8192 takes 2.4 us with 8 or 16, 3.5 us with 64.
    """
    block = _power_of_two(ceil_divide(problem.m * problem.n, 128))
    return min(64, max(8, block if split_k >= 32 else 2 * block))


def _prefetch(problem: Problem, launch: str, block_m: int, block_n: int) -> str:
    """Operands worth an early fetch into L2: those that few programs share, as long as they are small.

    16 x 16 x 8192 takes 2.9 us without, 2.6 us with b and 2.4 us with both; 64 x 64 x 32768, of 8 MB, 5.2, 5.5, 5.7 us.
    """
    if launch == "plain":
        return ""
    if launch == "static_b":
        return "a"
    if problem.bytes > MOST_PREFETCH_BYTES:
        return ""
    return ("a" if problem.n <= 2 * block_n else "") + ("b" if problem.m <= 2 * block_m else "")


def _split_is_sane(problem: Problem, device: Device, tiles: int, split_k: int) -> bool:
    return (
        split_k <= MOST_SPLITS
        and tiles * split_k <= 4 * device.multiprocessors
        and problem.accumulate_dtype.itemsize * split_k * problem.m * problem.n <= MOST_WORKSPACE_BYTES
    )


def _launches(problem: Problem, device: Device) -> tuple[str, ...]:
    if not device.has_dependent_launch:
        return ("plain",)
    return ("static_b", "wait_first") if problem.static_b else ("wait_first",)


def _precisions(problem: Problem, device: Device) -> tuple[str, ...]:
    if problem.precision is None or device.vendor != "nvidia" or device.capability < (8, 0):
        return ("ieee",)
    if problem.a_dtype in HALVES and problem.b_dtype in HALVES:
        return ("ieee",)
    fine = FINE_ENOUGH[problem.precision]
    return fine[-1:] if problem.precision == "tf32" else fine


def _tile_sizes(size: int, static_b: bool) -> tuple[int, ...]:
    """Tile sides worth trying: the whole side up to 32, halves of it beyond, quarters for a static launch's one
    block."""
    cover = _power_of_two(size)
    if cover <= 32:
        return (16, 32)[: 1 + (cover > 16)]
    if cover == 64:
        return (16, 32, 64) if static_b else (32, 64)
    return (32, 64, 128)


def _batch_invariant(problem: Problem, device: Device) -> Config:
    """The one config of a batch-invariant problem: 16-row tiles, and a split that suits a single one of them."""
    is_half = problem.precision is None and problem.accumulate_dtype == torch.float32
    block_n = min(32, max(16, _power_of_two(problem.n)))
    block_k = 128 if is_half else 64
    fill = max(1, device.multiprocessors // ceil_divide(problem.n, block_n))
    short_chain = ceil_divide(problem.k, 1024 if is_half else 128)
    split_k = min(max(fill, short_chain), 1024, ceil_divide(problem.k, block_k))
    launch = "wait_first" if device.has_dependent_launch else "plain"
    return Config(
        "pair",
        split_k=split_k,
        block_m=16,
        block_n=block_n,
        block_k=block_k,
        num_stages=3,
        launch=launch,
        prefetch="b" if launch == "wait_first" else "",
        input_precision="tf32" if problem.precision == "tf32" else "ieee",
    )


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
