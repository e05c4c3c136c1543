"""Registers that a thread of a Triton kernel needs, estimated before compiling: a tile that does not fit would spill.

The estimates are fitted to what Triton 3.6 and 3.9 report for 6900 compiled kernels, on sm_80, sm_90, sm_100 and gfx942
(where nothing spilled). Above the limit lie all but one of those that do not fit into a thread's registers, and 4 % of
the others. They follow from who holds what:

- A sum is held by one thread, a value of an operand by the thread that loads it, until the tensor cores take it from
  shared memory.
- `tf32x3` cuts operands in registers, where warps that share a row or a column hold copies of it.
- Without tensor cores (plain fp32, or halves of two kinds) a thread reads the rows of a and the columns of b that its
  outputs need from shared memory. Some kernels do so for the whole of a K block before they multiply.

Not foreseen, and no reason to refuse a tile: NVIDIA's assembler may put a few words on the stack, long before 255
registers, where that lets one more program share a multiprocessor. 2 % of the kernels below the limit have such words;
told that a thread may have 255 registers, it leaves the stack alone.
"""

from __future__ import annotations

import torch

from decompose_k.config import Config
from decompose_k.device import Device
from decompose_k.problem import Problem

# A thread has 255 registers; addresses, masks and loop variables take the rest.
MOST_REGISTERS = 200
# The loop that reserves shared memory costs a few more: tiles of 192 and 197 then spill 16 and 24 bytes.
MOST_REGISTERS_BESIDE_RESERVE = 185
WARP = 32
# A thread's tile of outputs without tensor cores is this long and wide at the most.
MOST_OUTPUT_SIDE = 4


def pair_registers(config: Config, problem: Problem, device: Device) -> float:
    """Estimated 32-bit registers a thread of stage 1: its sums, its share of a K block, copies and addresses."""
    scattered = scattered_values(config, problem) / (WARP * config.num_warps)
    return _held(config, problem, device) + 2 * scattered


def _held(config: Config, problem: Problem, device: Device) -> float:
    threads = WARP * config.num_warps
    sums = config.block_m * config.block_n / threads
    loaded = config.block_k * (config.block_m + config.block_n) / threads
    is_hopper = device.capability[0] == 9
    if problem.accumulate_dtype == torch.float64:
        return 3 * (sums + loaded)
    if problem.is_one_half:
        loaded_of_a = config.block_k * config.block_m / threads
        held = (0.75 if config.num_stages > 1 and not is_hopper else 0.5) * loaded
        return sums + max(sums + held, 0.75 * loaded_of_a)
    if config.input_precision == "tf32x3":
        parts = (2.5 if is_hopper else 7.0) * loaded
        return max(sums + parts, loaded + _parts_with_copies(config, problem, device))
    copied = (2 if is_hopper else 4) * loaded
    if config.input_precision == "tf32":
        return sums + copied
    return sums + max(copied, _hoisted_share(config, problem, device) * _outer_product_reads(config))


def dot_registers(config: Config, problem: Problem) -> float:
    """Estimated 32-bit registers a thread of the dot kernel: the weights that it holds, half as much for the rest.

    128 words of weights take 60 to 192 registers. With 16 warps a thread has 128 registers instead of 255.
    """
    words = config.block_n * config.block_k / (WARP * config.num_warps) * problem.accumulate_dtype.itemsize / 4
    return 1.5 * words * (2 if config.num_warps > 8 else 1)


def scattered_values(config: Config, problem: Problem) -> int:
    """Values of a K block that are loaded one by one, each with an address or a mask of its own.

    A batch-invariant choice may depend neither on m nor on where rows lie: there it is all of them.
    """
    if problem.batch_invariant:
        return config.block_k * (config.block_m + config.block_n)
    a = 0 if _is_vectorized(problem.a_layout, problem.m, problem.k) else config.block_m
    b = 0 if _is_vectorized(problem.b_layout, problem.k, problem.n) else config.block_n
    return config.block_k * (a + b)


def _is_vectorized(layout: str, rows: int, columns: int) -> bool:
    """Whether a matrix without padding lets a thread load several values at once: Triton wants strides of 16s."""
    return layout != "strided" and (columns if layout == "row" else rows) % 16 == 0


def _parts_with_copies(config: Config, problem: Problem, device: Device) -> float:
    """Registers for the operands of `tf32x3` as bf16 parts, and for its sums, with the copies that warps hold.

    Triton puts all warps of products that are added one to the other along one side of the tile: along the rows where
    there are at least as many as columns, and always where b is multiplied out of shared memory.
    """
    reads_b_from_shared = device.capability >= (9, 0) and config.block_m >= 64 and config.num_warps % 4 == 0
    # Three packed halves are 1.5 registers; the rest is what stays of the originals.
    part = 2.0 if reads_b_from_shared else 1.55 if device.capability[0] == 9 else 1.75
    # A bf16 operand is not cut, and read from shared memory piece by piece.
    a_part, b_part = (0.25 if dtype == torch.bfloat16 else part for dtype in (problem.a_dtype, problem.b_dtype))
    rows, columns = config.block_m, config.block_n
    if reads_b_from_shared:
        rows = max(16, rows // config.num_warps)
        return rows * (2.2 * columns + a_part * config.block_k) / WARP
    if rows >= columns:
        rows = max(16, rows // config.num_warps)
    else:
        columns = max(8, columns // config.num_warps)
    return (rows * columns + config.block_k * (a_part * rows + b_part * columns)) / WARP


def _outer_product_reads(config: Config) -> int:
    """Operand values that a thread reads for its outputs over one K block, where no tensor core multiplies.

    Triton gives a thread 1 x 1, 2 x 2 or 4 x 4 outputs, puts lanes and then warps along a row before the next row, and
    repeats the pattern over the tile.
    """
    outputs = config.block_m * config.block_n // (WARP * config.num_warps)
    side = MOST_OUTPUT_SIDE if outputs >= MOST_OUTPUT_SIDE**2 else 2 if outputs >= 4 else 1
    across = min(config.block_n // side, WARP * config.num_warps)
    down = min(config.block_m // side, WARP * config.num_warps // across)
    return config.block_k * (config.block_m // down + config.block_n // across)


def _hoisted_share(config: Config, problem: Problem, device: Device) -> float:
    """Registers for each of those reads, 0 where they are made one by one: measured, and not explained.

    A tile 32 x 64 x 128 of 8 warps, fp32, spills 2700 bytes; its mirror image takes 98 registers.
    """
    is_pipelined, is_dependent = config.num_stages > 1, config.launch != "plain"
    if device.vendor == "amd":
        return 0.0
    if config.block_n > config.block_m:
        is_read_whole = config.launch == "static_b" or (is_dependent and problem.b_layout != "column")
        return 0.55 if (problem.a_dtype != problem.b_dtype if is_pipelined else is_read_whole) else 0.0
    if config.block_m * config.block_n >= MOST_OUTPUT_SIDE**2 * WARP * config.num_warps:
        return 0.75 if is_pipelined and is_dependent and config.block_m >= 64 else 0.4
    if config.block_n == config.block_m and device.capability[0] != 9:
        return 0.4
    return 0.3 if config.launch == "static_b" else 0.0
