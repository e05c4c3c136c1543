"""Legal, ranked configs for a problem on a device: a pure function, no measuring, no GPU call.

The rank is that of the modelled times in `costs`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

from decompose_k.config import Config
from decompose_k.costs import predict_microseconds
from decompose_k.device import Device
from decompose_k.dtypes import HALVES
from decompose_k.legality import (
    FINE_ENOUGH,
    MOST_DOT_K,
    MOST_DOT_ROWS,
    MOST_RESIDENT,
    ceil_divide,
    is_legal,
    is_long,
    most_k_blocks,
    reserve_for,
    shared_bytes,
    triton_refusal,
)
from decompose_k.problem import Problem
from decompose_k.registers import scattered_values

MOST_CANDIDATES = 30
# Partials above this never won a sweep on an H200, and Inductor's authors report the same bound.
MOST_WORKSPACE_BYTES = 8 << 20
MOST_SPLITS = 256
MOST_STAGES = 8
# What is fetched into L2 early, of all programs together: as much as arrives while the predecessor ends. Of 64 x 64 x
# 32768, 8.4 MB, 0.5 MB saves 0.3 us of 5.0, 2 MB 0.15, and all of it costs 0.3; of 32 x 32 x 32768 1 MB saves 0.6 us of
# 4.2, and all of its 4.2 MB 0.4.
PREFETCH_BYTES = 5 << 18
# Of halves, worth having on its way to a program: 256 x 256 x 6144 with tiles of 64 x 64 x 128 takes 6.35 us with all
# six K blocks, 6.1 with four, and 1024 x 64 x 14336 with 128 x 64 x 64 12.3 with eight, 11.9 with five.
PIPELINE_BYTES, FEWEST_FULL_STAGES = 128 << 10, 4
# Operands that a pair fetches into L2 before the wait; a static b it loads there. 256 x 64 x 7168 takes 4.5 us without,
# 4.25 with the first of four K blocks of both, and 4.7 with all of them; 16 x 16 x 8192 2.9, and 2.4 with both.
_PREFETCH = {"plain": "", "static_b": "a", "wait_first": "ab"}
# Of a long K: programs to a multiprocessor that are tried, warps on it at the most, K blocks of a program at the least,
# and outputs of its tile at the most.
LONG_PROGRAMS = (1, 2, 3, 4, 6, 8, 12, 16)
MOST_LONG_WARPS = 32
FEWEST_LONG_BLOCKS = 4
MOST_LONG_TILE = 1 << 13


@functools.lru_cache(maxsize=1024)
def candidates(problem: Problem, device: Device) -> tuple[Config, ...]:
    """At most 30 legal configs, best first; empty where the Triton engine cannot compute the problem.

    With `batch_invariant` they follow from n, k and the dtypes alone, so that every m runs the same arithmetic in the
    same order.
    """
    if triton_refusal(problem, device) is not None or 0 in (problem.m, problem.n, problem.k):
        return ()
    if problem.batch_invariant:
        return _batch_invariant_candidates(problem.bucketed(), device)
    found = dict.fromkeys(_enumerate(problem, device))
    legal = [config for config in found if is_legal(config, problem, device) is None]
    ranked = sorted([*legal, Config("mm")], key=lambda config: predict_microseconds(config, problem, device))
    return tuple(ranked[:MOST_CANDIDATES])


def _enumerate(problem: Problem, device: Device) -> Iterator[Config]:
    if is_long(problem):
        for precision in _precisions(problem, device):
            yield from _long_pairs(problem, device, precision)
        return
    launches = _launches(problem, device)
    if min(problem.m, problem.n) <= MOST_DOT_ROWS and problem.k <= MOST_DOT_K:
        yield from _dots(problem, launches)
    for precision in _precisions(problem, device):
        # With many columns a half-empty tile of 64 rows still beats 32: 4.4 against 4.7 us for 32 x 256 x 7168.
        rows = problem.m if problem.m <= 16 or problem.n < 128 else max(33, problem.m)
        for block_m in _tile_sizes(rows):
            for block_n in _tile_sizes(problem.n):
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
        tile = Config("pair", block_m=block_m, block_n=block_n, block_k=block_k, input_precision=precision)
        most_blocks = ceil_divide(problem.k, block_k)
        programs = (device.multiprocessors * 3 // 4, device.multiprocessors, device.multiprocessors * 2)
        wanted = {ceil_divide(most_blocks, max(1, count // tiles)) for count in programs}
        # One block, or twice the smallest fill, leaves part of the device empty and the second stage less to read.
        wanted |= {1, min(most_blocks, 2 * max(wanted))}
        # Where all of these but one block are too many, as many as may be.
        most_exact = most_k_blocks(tile, problem)
        if 1 < most_exact < min(wanted - {1}, default=1):
            wanted |= {most_exact}
        for blocks in sorted(wanted):
            split_k = ceil_divide(problem.k, block_k * blocks)
            if split_k > 1 and not _split_is_sane(problem, device, tiles, split_k):
                continue
            needed = ceil_divide(tiles * split_k, device.multiprocessors)
            num_stages = _stages(problem, tile, blocks, device.shared_bytes // min(needed, MOST_RESIDENT))
            for num_warps in _warp_choices(block_m * block_n, problem.precision):
                for launch, reserve_kib in _reserved_launches(launches, needed, device):
                    if reserve_kib and num_warps == 1:
                        # The reserve's loop takes one warp 168 registers, and the assembler then uses the stack.
                        continue
                    prefetch = _PREFETCH[launch]
                    yield replace(
                        tile,
                        split_k=split_k,
                        num_warps=num_warps,
                        num_stages=num_stages,
                        reduce_block=_reduce_block(problem, split_k),
                        launch=launch,
                        prefetch=prefetch,
                        prefetch_blocks=_prefetch_blocks(problem, prefetch, split_k, block_k, blocks),
                        reserve_kib=reserve_kib,
                    )


def _long_pairs(problem: Problem, device: Device, precision: str) -> Iterator[Config]:
    """Pairs of one wave of programs, several to a multiprocessor, each of which goes through many K blocks."""
    is_wide = max(problem.a_dtype.itemsize, problem.b_dtype.itemsize) > 2
    reduce_block = max(8, min(32, _power_of_two(problem.m * problem.n // 128)))
    for block_m, block_n in itertools.product(_long_sides(problem.m), _long_sides(problem.n)):
        if block_m * block_n > MOST_LONG_TILE:
            continue
        tiles = ceil_divide(problem.m, block_m) * ceil_divide(problem.n, block_n)
        for block_k, num_warps, programs in itertools.product(
            (32, 64, 128) if is_wide else (64, 128, 256), _long_warps(block_m * block_n), LONG_PROGRAMS
        ):
            blocks = ceil_divide(problem.k, block_k * max(1, programs * device.multiprocessors // tiles))
            split_k = ceil_divide(problem.k, block_k * blocks)
            workspace = problem.accumulate_dtype.itemsize * split_k * problem.m * problem.n
            is_sane = programs * num_warps <= MOST_LONG_WARPS and workspace <= MOST_WORKSPACE_BYTES
            if not is_sane or blocks < FEWEST_LONG_BLOCKS:
                continue
            tile = Config(
                "pair",
                split_k=split_k,
                block_m=block_m,
                block_n=block_n,
                block_k=block_k,
                num_warps=num_warps,
                reduce_block=reduce_block,
                reduce_warps=2,
                launch=_safe_launch(device),
                input_precision=precision,
            )
            # A program takes 1 KiB for itself.
            most_stages = (device.shared_bytes // programs - 1024) // shared_bytes(tile, problem)
            if scattered_values(tile, problem) and block_m * block_n > 1024:
                # What is loaded value by value is not worth a pipeline: 64 x 24 x 2^20 takes 190 us without, 460 with.
                most_stages = min(1, most_stages)
            for num_stages in sorted({min(3, most_stages), min(5, most_stages)} if most_stages > 0 else ()):
                yield replace(tile, num_stages=num_stages)


def _long_sides(size: int) -> tuple[int, ...]:
    """Tile sides of a long K: the whole side up to 32, 64 or its half of a side up to 64, else 64 or its double."""
    cover = max(16, _power_of_two(size))
    return (cover,) if cover <= 32 else (64, 32) if cover == 64 else (128, 64)


def _long_warps(tile: int) -> tuple[int, ...]:
    if tile <= 256:
        return (1, 2)
    if tile <= 1024:
        return (1, 2, 4)
    return (2, 4) if tile <= 2048 else (4, 8) if tile <= 4096 else (8,)


def _reserved_launches(launches: tuple[str, ...], needed: int, device: Device) -> Iterator[tuple[str, int]]:
    """Launches, each with room for the `needed` programs of a multiprocessor.

    With a static weight also for one more, which loads its weight while an earlier call still runs.
    """
    for launch in launches:
        residencies = (needed, needed + 1) if launch == "static_b" else (needed,)
        for reserve_kib in dict.fromkeys(reserve_for(residency, device) for residency in residencies):
            yield launch, 0 if launch == "plain" else reserve_kib


def _stages(problem: Problem, tile: Config, blocks: int, shared: int) -> int:
    """All K blocks of a program on their way at once, as far as its share of the shared memory and their use go."""
    block_bytes = shared_bytes(tile, problem)
    useful = max(FEWEST_FULL_STAGES, PIPELINE_BYTES // block_bytes) if problem.is_one_half else MOST_STAGES
    return max(1, min(blocks, MOST_STAGES, useful, shared // block_bytes))


def _warp_choices(tile: int, precision: str | None) -> tuple[int, ...]:
    """Small tiles have too little work for four warps: 16 x 16 x 8192 takes 2.1 us with two and 2.3 us with four."""
    if tile <= 512:
        return (1, 2, 4)
    if tile <= (2048 if precision is None else 1024):
        return (2, 4, 8) if tile == 2048 else (2, 4)
    return (4, 8)


def _reduce_block(problem: Problem, split_k: int) -> int:
    """Outputs of a reducer program: about 128 programs, fewer where there is little to add up.

    Too large a block costs more than too small a one: 16 x 16 x 8192 takes 2.4 us with 8 or 16, 3.5 us with 64. Of many
    outputs and few splits a block of 128 takes less: 256 x 512 x 2048 5.7 us, 6.9 us with 64.
    """
    outputs = problem.m * problem.n
    block = _power_of_two(ceil_divide(outputs, 128))
    most = 128 if outputs >= 1 << 15 and split_k <= 16 else 64
    return min(most, max(8, block if split_k >= 32 else 2 * block))


def _prefetch_blocks(problem: Problem, prefetch: str, split_k: int, block_k: int, blocks: int) -> int:
    """K blocks of each program that are fetched early, as near to `PREFETCH_BYTES` as whole blocks come; 0 for all."""
    a_bytes = problem.m * problem.a_dtype.itemsize if "a" in prefetch else 0
    b_bytes = problem.n * problem.b_dtype.itemsize if "b" in prefetch else 0
    block_bytes = split_k * block_k * (a_bytes + b_bytes)
    wanted = max(1, round(PREFETCH_BYTES / block_bytes)) if block_bytes else blocks
    return wanted if wanted < blocks else 0


def _split_is_sane(problem: Problem, device: Device, tiles: int, split_k: int) -> bool:
    return (
        split_k <= MOST_SPLITS
        and tiles * split_k <= 4 * device.multiprocessors
        and problem.accumulate_dtype.itemsize * split_k * problem.m * problem.n <= MOST_WORKSPACE_BYTES
    )


def _safe_launch(device: Device) -> str:
    return "wait_first" if device.has_dependent_launch else "plain"


def _launches(problem: Problem, device: Device) -> tuple[str, ...]:
    if not device.has_dependent_launch:
        return ("plain",)
    # Beside a long a, which comes after the wait, an early b does not pay: 512 x 16 x 6144 takes 5.4 us against 3.9.
    return ("static_b", "wait_first") if problem.static_b and problem.m < 16 * problem.n else ("wait_first",)


def _precisions(problem: Problem, device: Device) -> tuple[str, ...]:
    if problem.precision is None or device.vendor != "nvidia" or device.capability < (8, 0):
        return ("ieee",)
    if problem.a_dtype in HALVES and problem.b_dtype in HALVES:
        return ("ieee",)
    fine = FINE_ENOUGH[problem.precision]
    if problem.precision == "tf32":
        return fine[-1:]
    # Of two dtypes, one is exact in a third of the work: plain fp32 never won.
    return ("tf32x3",) if problem.a_dtype != problem.b_dtype and "tf32x3" in fine else fine


def _tile_sizes(size: int) -> tuple[int, ...]:
    """Tile sides worth trying: the whole side up to 64, its half and its quarter."""
    cover = _power_of_two(size)
    if cover <= 64:
        return tuple(side for side in (16, 32, 64) if side <= max(16, cover))
    return (32, 64, 128)


def _batch_invariant_candidates(problem: Problem, device: Device) -> tuple[Config, ...]:
    """The one choice of a batch-invariant problem, and for tuning what differs in tile, K block, split and warps."""
    first = _batch_invariant(problem, device)
    shortest = ceil_divide(problem.k, _invariant_chain(problem))
    others = (
        replace(first, block_n=block_n, block_k=block_k, split_k=split_k, num_warps=num_warps)
        for block_n in (16, 32, 64)
        for block_k in (64, 128)
        for split_k in sorted({shortest, first.split_k // 2, first.split_k, 2 * first.split_k})
        for num_warps in (2, 4)
        if shortest <= split_k <= ceil_divide(problem.k, block_k) and block_n <= max(16, _power_of_two(problem.n))
    )
    legal = [config for config in others if is_legal(config, problem, device) is None]
    ranked = sorted(legal, key=lambda config: predict_microseconds(config, problem, device))
    return tuple(dict.fromkeys((first, *ranked)))[:MOST_CANDIDATES]


def _batch_invariant(problem: Problem, device: Device) -> Config:
    """16-row tiles, and a split that suits a single one of them."""
    block_n = min(32, max(16, _power_of_two(problem.n)))
    block_k = 128 if problem.is_one_half else 64
    fill = max(1, device.multiprocessors // ceil_divide(problem.n, block_n))
    split_k = min(max(fill, ceil_divide(problem.k, _invariant_chain(problem))), 1024, ceil_divide(problem.k, block_k))
    launch = _safe_launch(device)
    prefetch = "b" if launch == "wait_first" else ""
    blocks = ceil_divide(ceil_divide(problem.k, split_k), block_k)
    return Config(
        "pair",
        split_k=split_k,
        block_m=16,
        block_n=block_n,
        block_k=block_k,
        num_stages=3,
        launch=launch,
        prefetch=prefetch,
        prefetch_blocks=_prefetch_blocks(problem, prefetch, split_k, block_k, blocks),
        input_precision="tf32" if "tf32" in _precisions(problem, device) else "ieee",
    )


def _invariant_chain(problem: Problem) -> int:
    """Products in a row that keep the error of a batch-invariant sum below torch's."""
    return 1024 if problem.is_one_half else 128


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
