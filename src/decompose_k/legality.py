"""Whether a config can compute a problem on a device within the contract: the one predicate for choosing and tuning."""

from __future__ import annotations

import torch

from decompose_k.config import MOST_SPLITS_AT_ONCE, RESERVE_STEP_KIB, Config
from decompose_k.device import Device
from decompose_k.dtypes import HALVES
from decompose_k.problem import Problem
from decompose_k.registers import MOST_REGISTERS, MOST_REGISTERS_BESIDE_RESERVE, dot_registers, pair_registers

MOST_THREADS = 1024
MOST_BLOCK_ELEMENTS = 1 << 20
MOST_GRID_Y = 65535
MOST_GROUP = 1 << 16
MOST_DOT_ROWS = 2
MOST_DOT_K = 16384
MOST_RESIDENT = 3
# From here on a program goes through many K blocks, also where several programs share each multiprocessor. Products of
# halves are that much shorter: 16 x 16 x 65536 takes 3.2 us.
LONG_K, LONG_K_OF_HALVES = 1 << 17, 1 << 19

# What each precision of a problem lets a kernel do with fp32 operands, plainest first.
FINE_ENOUGH = {
    None: ("ieee",),
    "ieee": ("ieee",),
    "highest": ("ieee", "tf32x3"),
    "tf32x3": ("ieee", "tf32x3"),
    "tf32": ("ieee", "tf32x3", "tf32"),
}


def is_legal(config: Config, problem: Problem, device: Device) -> str | None:
    """None if `config` can compute `problem` on `device` within the contract, else the reason why not."""
    if config.backend == "torch":
        return None
    return (
        triton_refusal(problem, device)
        or _precision_refusal(config, problem, device)
        or _launch_refusal(config, problem, device)
        or _limit_refusal(config, problem, device)
        or (_dot_refusal(config, problem) if config.kernel == "dot" else _pair_refusal(config, problem, device))
    )


def triton_refusal(problem: Problem, device: Device) -> str | None:
    """Why no Triton kernel can compute a problem on a device; None where one can."""
    if device.type != "cuda":
        return f"the Triton kernels need a GPU; the device is {device.name}"
    if not problem.is_float:
        return "the Triton kernels take fp16, bf16, fp32 and fp64 only"
    if torch.bfloat16 in (problem.a_dtype, problem.b_dtype) and not device.has_bf16:
        return f"{device.name} has no bf16 tensor cores"
    if problem.accumulate_dtype == torch.float64:
        if device.vendor == "amd" or device.capability >= (10, 0):
            return f"Triton 3.6 has no dependable fp64 dot for {device.name}"
        if problem.a_dtype != problem.b_dtype:
            return "Triton 3.6 cannot multiply fp64 with another dtype without failing or spilling registers"
    return None


def _precision_refusal(config: Config, problem: Problem, device: Device) -> str | None:
    allowed = FINE_ENOUGH[problem.precision]
    if config.input_precision not in allowed:
        return f"input_precision must be one of {', '.join(allowed)} for this problem; got {config.input_precision}"
    if config.input_precision != "ieee" and not (device.vendor == "nvidia" and device.capability >= (8, 0)):
        return f"{device.name} has no tf32"
    if problem.batch_invariant and config.input_precision == "tf32x3":
        return "tf32x3 recomputes whole tiles with unusual values, so a row's bits would depend on its neighbours"
    return None


def _launch_refusal(config: Config, problem: Problem, device: Device) -> str | None:
    if config.launch != "plain" and not device.has_dependent_launch:
        return f"launch={config.launch} needs programmatic dependent launch, which {device.name} lacks"
    if config.prefetch and config.launch == "plain":
        return "prefetch is of use only before the wait of a dependent launch"
    if config.prefetch_blocks and not (config.prefetch and config.kernel == "pair"):
        return "prefetch_blocks is of use only to a pair that prefetches an operand"
    if config.reserve_kib and config.launch == "plain":
        return "reserve_kib is of use only where programs of calls to come wait, with a dependent launch"
    if config.launch == "static_b" and not problem.static_b:
        return "launch=static_b reads b before earlier kernels have finished: the caller must promise static_b"
    return None


def _limit_refusal(config: Config, problem: Problem, device: Device) -> str | None:
    """What no GPU or no Triton can launch, whatever the problem."""
    most_warps = MOST_THREADS // (64 if device.vendor == "amd" else 32)
    if max(config.num_warps, config.reduce_warps) > most_warps:
        return f"num_warps and reduce_warps must be <= {most_warps} on {device.name}"
    splits_at_once = min(1 << (config.split_k - 1).bit_length(), MOST_SPLITS_AT_ONCE)
    blocks = (
        config.block_m * config.block_k,
        config.block_k * config.block_n,
        config.block_m * config.block_n,
        config.reduce_block * splits_at_once,
    )
    if max(blocks) > MOST_BLOCK_ELEMENTS:
        return f"a block of a kernel must have at most {MOST_BLOCK_ELEMENTS} elements; got {max(blocks)}"
    if config.split_k > MOST_GRID_Y or (config.reducer == "tile" and problem.n > MOST_GRID_Y * config.block_n):
        return f"the second dimension of a grid must be <= {MOST_GRID_Y}; got split_k={config.split_k}, n={problem.n}"
    if max(config.group_m, config.num_stages) > MOST_GROUP:
        return f"group_m and num_stages must be <= {MOST_GROUP}; got {config.group_m} and {config.num_stages}"
    return None


def _dot_refusal(config: Config, problem: Problem) -> str | None:
    if min(problem.m, problem.n) > MOST_DOT_ROWS:
        return f"the dot kernel takes min(m, n) <= {MOST_DOT_ROWS}; got {min(problem.m, problem.n)}"
    if not problem.k <= config.block_k <= MOST_DOT_K:
        return f"the dot kernel takes k <= block_k <= {MOST_DOT_K}; got k={problem.k}, block_k={config.block_k}"
    if config.reserve_kib:
        return f"the dot kernel reserves no shared memory; got reserve_kib={config.reserve_kib}"
    if config.split_k != 1:
        return f"the dot kernel does not split K; got split_k={config.split_k}"
    if config.launch == "static_b" and problem.n < problem.m:
        return "with n < m the dot kernel streams a, which static_b says nothing about"
    if config.launch == "static_b" and torch.float16 in (problem.a_dtype, problem.b_dtype):
        held = config.block_n * config.block_k / (32 * config.num_warps)
        if held > 16:
            return f"a thread would hold {held:.0f} fp16 weights and spill registers; 16 is the limit"
    if problem.batch_invariant:
        return "the dot kernel's order of summation differs from that of more rows"
    return _spill_refusal(dot_registers(config, problem))


def _pair_refusal(config: Config, problem: Problem, device: Device) -> str | None:
    if config.block_k < 32 or min(config.block_m, config.block_n) < 16:
        return "the pair needs block_m, block_n >= 16 and block_k >= 32"
    if config.launch == "static_b" and k_blocks(config, problem) > 1:
        return "launch=static_b holds the weight in registers: one block_k a program"
    chain = _chain(config, problem)
    if chain > _longest_chain(config, problem) and not problem.batch_invariant:
        return f"rounding in sums of {chain} products would exceed that of torch's own kernel"
    shared = max(shared_bytes(config, problem), config.reserve_kib << 10)
    if shared > device.shared_bytes:
        return f"needs {shared} bytes of shared memory; {device.name} has {device.shared_bytes}"
    return _spill_refusal(pair_registers(config, problem, device), _most_registers(config, problem))


def _most_registers(config: Config, problem: Problem) -> int:
    """The limit of a pair: lower beside a reserve, in the two forms that were seen to spill with it alone."""
    cuts_in_registers = config.input_precision == "tf32x3" and config.block_m < 64 and config.num_stages == 2
    turns_a = problem.a_layout != "row" and config.num_stages > 1
    is_lower = config.reserve_kib > 0 and (cuts_in_registers or turns_a)
    return MOST_REGISTERS_BESIDE_RESERVE if is_lower else MOST_REGISTERS


def _spill_refusal(registers: float, most: int = MOST_REGISTERS) -> str | None:
    if registers > most:
        return f"a thread would hold about {registers:.0f} registers, and spill; {most} is the limit"
    return None


def _chain(config: Config, problem: Problem) -> int:
    """Products that are added one after the other in one accumulator before anything rounds to nearest."""
    blocks = 1 if _rounds_every_block(config, problem) else k_blocks(config, problem)
    return min(problem.k, blocks * config.block_k)


def most_k_blocks(config: Config, problem: Problem) -> int:
    """K blocks of a program before rounding exceeds that of torch's own kernel; 0 if already one is too long."""
    blocks = _longest_chain(config, problem) // config.block_k
    return ceil_divide(problem.k, config.block_k) if blocks and _rounds_every_block(config, problem) else blocks


def _rounds_every_block(config: Config, problem: Problem) -> bool:
    return problem.precision is not None and config.input_precision == "tf32x3"


def _longest_chain(config: Config, problem: Problem) -> int:
    """The chain at which the error, measured against fp64 on an H200, reaches torch's own."""
    if problem.accumulate_dtype == torch.float64:
        return problem.k
    if problem.precision in (None, "tf32") and is_long(problem) and problem.out_dtype in HALVES:
        # Rounding the result costs more: 8000 products of fp16 in a row, 16 x 16 x 2^20, and 156000 of bf16, 2 x 13 x
        # 20569856, stay within what the contract allows. bf16 is eight times as coarse as fp16.
        return 1 << 16 if problem.out_dtype == torch.bfloat16 else 1 << 13
    if problem.is_one_half or problem.precision == "tf32":
        # 1366 products of bf16 in a row, 5 x 9 x 4099, fp32 out: 2.4 times torch's error, which splits K there.
        return 1024
    if config.input_precision == "ieee":
        # 64 products in a row: 1.5e-7 of error, 128: 2.1e-7, 256: 3.0e-7; torch.mm makes 2.4e-7 at K = 8192 and 3.5e-7
        # at K = 32768.
        chain = 64 if problem.k < 4096 else 128 if problem.k <= 16384 else min(256, problem.k // 128)
        # Of two kinds of halves twice torch's error is allowed, and it grows with the root of the chain.
        return chain if problem.precision else 4 * chain
    if torch.bfloat16 in (problem.a_dtype, problem.b_dtype):
        return 128 if problem.k < 1 << 14 else 256
    return 64


def shared_bytes(config: Config, problem: Problem) -> int:
    """Upper estimate of stage 1's own shared memory: the pipelined tiles, an fp32 copy of converted ones included."""
    sizes = [max(dtype.itemsize, 4 if problem.precision else 0) for dtype in (problem.a_dtype, problem.b_dtype)]
    tile = config.block_k * (config.block_m * sizes[0] + config.block_n * sizes[1])
    return tile * max(1, config.num_stages)


def reserve_for(residency: int, device: Device) -> int:
    """KiB of shared memory a program that leave a multiprocessor room for so many programs and no more.

    With more room they would gather on some multiprocessors while others wait: see `kernels.residency`. 0 for more than
    three programs, and where no step of the reserve leaves room for just so many.
    """
    if residency > MOST_RESIDENT:
        return 0
    # A multiprocessor has 1 KiB more than a program may ask for, and keeps 1 KiB for each program.
    too_much = (device.shared_bytes + 1024) // (residency + 1) - 1024
    reserve_kib = (too_much // (RESERVE_STEP_KIB << 10) + 1) * RESERVE_STEP_KIB
    return reserve_kib if residency * (reserve_kib + 1) << 10 <= device.shared_bytes + 1024 else 0


def is_long(problem: Problem) -> bool:
    """Whether K is so long that several programs to a multiprocessor each go through many K blocks."""
    is_half = problem.a_dtype in HALVES and problem.b_dtype in HALVES
    return problem.k >= (LONG_K_OF_HALVES if is_half else LONG_K)


def k_blocks(config: Config, problem: Problem) -> int:
    """K blocks that one program of stage 1 goes through."""
    return ceil_divide(ceil_divide(problem.k, config.split_k), config.block_k)


def ceil_divide(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)
