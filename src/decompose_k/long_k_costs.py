"""Modelled time of a pair whose programs go through many K blocks: microseconds on an H200, an order elsewhere.

Where K is so long, what counts is no longer how a call begins and ends but the pace in between. A multiprocessor holds
several programs at once. Each waits for its own loads, and all share the arithmetic: a K block takes hardly more than
the longer of one program's way through it and the work of all programs on it, and no call beats the memory.

The costs were fitted to 3200 timings of 36 products on an H200, K from 2^18 to 2^24, but for those marked as set by
hand. Of these products the first choice takes 1.1 times as long as the best (median; 1.4 at the worst, but for two
whose rows are no multiple of 16), and among the first ten is one within 18 % of the best.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decompose_k.legality import ceil_divide, k_blocks, shared_bytes
from decompose_k.registers import WARP, pair_registers, scattered_values

if TYPE_CHECKING:
    from decompose_k.config import Config
    from decompose_k.device import Device
    from decompose_k.problem import Problem

# Of one multiprocessor.
_REGISTERS = 1 << 16
_MOST_PROGRAMS = 32
_MOST_REGISTERS_A_THREAD = 255
# What does not hide behind the longer of memory and arithmetic, and tells equals apart.
_EXPOSED = 0.1


@dataclass(frozen=True, slots=True)
class _Costs:
    """Microseconds: of a call, of waiting for one load, and of a K block's work by what it consists of.

    `chain` is how much of that work a program does one after the other, `registers` what a thread needs beyond the
    estimate, `memory` the time of the operands' bytes over that at the memory's peak. Per 1000 values: `elements`,
    `turned` (of an operand whose contiguous dimension is not K) and `scattered` (loaded one by one).
    """

    call: float
    latency: float
    chain: float
    elements: float
    multiplies: float
    warps: float
    turned: float
    scattered: float
    registers: float
    memory: float


_COSTS = {
    "half": _Costs(9.09, 0.618, 0.512, 0.0003, 0.0002, 1.35, 0.0618, 0.0248, 29, 1.17),
    "fp32 tf32x3": _Costs(9.96, 0.288, 0.612, 0.006, 0.214, 1.94, 0.0749, 0.0003, 34, 1.5),
    "mixed tf32x3": _Costs(0.793, 0.415, 0.801, 0.0422, 0.26, 1.73, 0.0066, 0.1, 20, 1.86),
    "ieee": _Costs(9.99, 0.47, 0.627, 0.0655, 0.245, 2.17, 0.0518, 0.0783, 92, 1.5),
    # By hand.
    "tf32": _Costs(9.5, 0.5, 0.6, 0.003, 0.02, 1.5, 0.07, 0.01, 30, 1.2),
    # The first and the last by hand: 16 x 16 x 2^20 takes 67 us, 32 x 32 x 2^20 127.
    "fp64": _Costs(3.0, 0.328, 0.124, 0.0744, 0.432, 0.594, 0.0087, 0.0189, 93, 1.14),
}


def predict_long_k(config: Config, problem: Problem, device: Device, arithmetic: str) -> float:
    """Modelled time of a pair, by one of the kinds of arithmetic that `costs` tells apart."""
    costs = _COSTS[arithmetic]
    tiles = ceil_divide(problem.m, config.block_m) * ceil_divide(problem.n, config.block_n)
    blocks = k_blocks(config, problem)
    programs = ceil_divide(tiles * ceil_divide(problem.k, blocks * config.block_k), device.multiprocessors)
    resident = min(programs, _resident(config, problem, device, costs))
    work = _work(config, problem, costs)
    own = costs.latency / max(1, config.num_stages - 1) + costs.chain * work * 4 / min(4, config.num_warps)
    waves = ceil_divide(programs, resident)
    # With more programs less of the waiting shows: 2 x 13 x 20569856 takes 890, 523, 369 and 285 us with one to four.
    arithmetic_time = waves * blocks * math.hypot(own, resident * work)
    memory_time = costs.memory * device.microseconds_to_move(problem.bytes)
    hidden = min(arithmetic_time, memory_time)
    return costs.call + max(arithmetic_time, memory_time) + _EXPOSED * hidden


def _resident(config: Config, problem: Problem, device: Device, costs: _Costs) -> int:
    """Programs that one multiprocessor holds at once, by their registers and their shared memory."""
    registers = min(_MOST_REGISTERS_A_THREAD, pair_registers(config, problem, device) + costs.registers)
    by_registers = _REGISTERS // int(WARP * config.num_warps * registers)
    # One stage of a pipeline is being multiplied and no longer in memory.
    stages = max(1, config.num_stages - 1)
    taken = shared_bytes(config, problem) * stages // max(1, config.num_stages) + 1024
    by_shared = (device.shared_bytes + 1024) // taken
    return max(1, min(by_registers, by_shared, _MOST_PROGRAMS))


def _work(config: Config, problem: Problem, costs: _Costs) -> float:
    """Time of a multiprocessor for one K block of one program."""
    values_of_a, values_of_b = config.block_k * config.block_m, config.block_k * config.block_n
    turned = values_of_a * (problem.a_layout == "column") + values_of_b * (problem.b_layout == "row")
    return (
        costs.elements * (values_of_a + values_of_b) * 1e-3
        + costs.multiplies * values_of_a * config.block_n * 1e-5
        + costs.warps * config.num_warps * 1e-2
        + costs.turned * turned * 1e-3
        + costs.scattered * scattered_values(config, problem) * 1e-3
    )
