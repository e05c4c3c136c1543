"""Which config a problem runs with, and why: a decision without measuring and without touching a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from decompose_k import cache
from decompose_k.arguments import check_backend, check_split_k
from decompose_k.config import Config
from decompose_k.costs import predict_microseconds
from decompose_k.device import Device
from decompose_k.dtypes import HALVES, dtype_name
from decompose_k.forgetting import forget, forgettable
from decompose_k.heuristics import candidates
from decompose_k.legality import is_legal, triton_refusal
from decompose_k.problem import Problem
from decompose_k.reference import WHOLE_COPY_BYTES
from decompose_k.settings import default_backend

TORCH_MM = Config("mm")
HEURISTIC, ASKED = "heuristic", "asked"
SPLIT_KERNELS = ("bmm_sum", "pair")
# Of what it takes without the promise, a choice that was not measured is to be predicted less than this. Of 260
# products on an H200 the choices so made take 0.91 as long as those measured without the promise, at worst 1.22, and of
# the seed grid's 0.96, at worst 1.06; with 0.94 it was 0.92 and 0.97, the worst the same.
_PROMISED = 0.97

# Chunks of this length serve every CPU shape about equally well.
CPU_CHUNK = 4096

# On a CPU without vector instructions for halves, torch's half-precision product costs about 1 ns a multiplication, or
# 0.2 ns where both operands are contiguous along K or neither is; the split form costs 0.04 ns, and 0.8 ns for each
# operand element that it widens. Medians in microseconds, bf16, one thread of an AVX2 EPYC, torch.mm then split:
#   b [K, N]    16 x 16 x 64      26   161    1 x 256 x 7168  9146  1996    64 x 64 x 32768  215388   6401
#   b [N, K].T  16 x 16 x 8192   383   468    1 x 256 x 7168   355  1665    64 x 64 x 32768   32421  14652
# For fp32 both forms call the same BLAS, and the split one won nowhere by more than the noise, 4 chunks:
#   b [K, N]    16 x 16 x 8192    78   172   32 x 32 x 32768  1355  1545    64 x 64 x 32768    8246   8723


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs a problem on a device: the config, one sentence of why, and the runners-up in order.

    `origin` says where the choice comes from: `tuned` or `shipped` (remembered from a measurement), `heuristic`, or
    `asked` for by an explicit split_k.
    """

    problem: Problem
    device: Device
    config: Config
    reason: str
    alternatives: tuple[Config, ...] = ()
    origin: str = HEURISTIC


def plan(
    problem: Problem,
    device: Device | torch.device | str | None = None,
    *,
    backend: str = "auto",
    split_k: int | None = None,
) -> Plan:
    """What `matmul` would run for a problem: config = choice(problem, device), without measuring anything.

    What was tuned for the problem is taken before what the package ships, that before the heuristic's first candidate,
    and torch's own kernel where there is none. An explicit `split_k` forces the split form with that many chunks;
    `backend="triton"` forces a Triton kernel and raises where none can do the problem.

    Args:
        problem: what is computed; its `device_type` says where when `device` is None.
        device: a `Device`, a torch device, or None for the current device of the problem's type.
        backend: `auto`, `torch` or `triton`.
        split_k: chunks of K, from 1 to K, or None for a choice.

    Raises:
        TypeError, ValueError: a wrong argument, or a backend that cannot do the problem.

    >>> print(plan(Problem.make(16, 16, 8192, device_type="cpu"), split_k=8).config)
    torch bmm+sum split_k=8
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"problem must be a decompose_k.Problem; got {type(problem).__name__}")
    check_backend(backend)
    if split_k is not None:
        check_split_k(split_k, problem.k)
    return choose(problem, device_facts(problem, device), default_backend() if backend == "auto" else backend, split_k)


def device_facts(problem: Problem, device: Device | torch.device | str | None) -> Device:
    """Where a problem is planned for; raises TypeError or ValueError for what is no device of its type."""
    if isinstance(device, Device):
        found = device
    elif device is None or isinstance(device, (str, torch.device)):
        found = _device_of(problem.device_type if device is None else device)
    else:
        raise TypeError(f"device must be a Device, a torch.device, a string or None; got {type(device).__name__}")
    if found.type != problem.device_type:
        raise ValueError(f"device must be of the problem's device_type {problem.device_type!r}; got {found.type!r}")
    return found


def workspace_bytes(config: Config, problem: Problem) -> int:
    """Bytes of the buffer of partial products, partials[split_k, M, N] in the accumulate dtype."""
    if config.kernel in ("mm", "dot") or problem.k == 0:
        return 0
    return config.split_k * problem.m * problem.n * problem.accumulate_dtype.itemsize


def forget_choices() -> None:
    """Choose anew from the next call on: to be called where what choices follow from has changed."""
    forget()


@forgettable(4096)
def choose(problem: Problem, device: Device, backend: str, split_k: int | None) -> Plan:
    """The plan for checked arguments; `backend` is what the environment made of `auto`.

    Choices are made for the bucketed problem, so that a range of M shares them, and must be legal for the exact one.
    """
    untuned = replace(_untuned(problem, device, backend, split_k), problem=problem)
    if 0 in (problem.m, problem.n, problem.k):
        return untuned
    measured = _measured(problem, device, backend, split_k)
    if measured is not None:
        return _plan_measured(measured, problem, untuned)
    if problem.static_b:
        # Nothing was measured with the promise.
        without = replace(problem, static_b=False)
        measured = _measured(without, device, backend, split_k)
        if measured is not None and not _promise_pays(untuned.config, measured.entry.config, problem, device):
            found = _plan_measured(measured, without, untuned)
            return replace(found, reason=f"{found.reason} (without the promise of a static weight)")
    return untuned


def _measured(problem: Problem, device: Device, backend: str, split_k: int | None) -> cache.Remembered | None:
    """The first choice that is remembered of a problem and serves it."""
    for remembered in _remembered(problem.bucketed(), device):
        if _is_usable(remembered.entry.config, problem, device, backend, split_k):
            return remembered
    return None


def _plan_measured(measured: cache.Remembered, problem: Problem, untuned: Plan) -> Plan:
    """The plan of what is remembered of `problem`, with the heuristic's ranking behind it."""
    config = measured.entry.config
    others = tuple(other for other in (untuned.config, *untuned.alternatives) if other != config)
    reason = _remembered_reason(measured, problem)
    return replace(untuned, config=config, reason=reason, alternatives=others, origin=measured.origin)


def _promise_pays(untuned: Config, measured: Config, problem: Problem, device: Device) -> bool:
    """Whether a config that was not measured promises more, for a static weight, than one that was without it.

    Where torch's kernel was the fastest, a prediction alone does not outdo it.
    """
    if untuned.launch != "static_b" or measured.backend == "torch":
        return False
    bucket = problem.bucketed()
    without = replace(bucket, static_b=False)
    return predict_microseconds(untuned, bucket, device) < _PROMISED * predict_microseconds(measured, without, device)


def _remembered(problem: Problem, device: Device) -> Iterator[cache.Remembered]:
    """What was measured of a bucketed problem, and then of its product with another epilogue.

    Such kin count only where a Triton kernel won: a further epilogue costs torch more than it costs us.
    """
    yield from cache.remembered(problem, device)
    yield from (kin for kin in cache.remembered_kin(problem, device) if kin.entry.config.backend == "triton")


def _untuned(problem: Problem, device: Device, backend: str, split_k: int | None) -> Plan:
    bucket = problem.bucketed()
    if backend == "torch" or device.type != "cuda":
        if backend == "triton":
            raise ValueError(f"backend must be auto or torch on {device.type}: Triton kernels need a GPU; got 'triton'")
        return _plan_torch(bucket, device, split_k)
    if 0 in (problem.m, problem.n, problem.k):
        return Plan(problem, device, TORCH_MM, "there is nothing to multiply")
    obstacle = _missing_triton() or triton_refusal(problem, device)
    if obstacle is None:
        found = [config for config in candidates(bucket, device) if _is_legal(config, problem, device)]
        found = _filtered(found, problem, device, backend, split_k)
        if found:
            return _plan_found(problem, device, tuple(found), split_k)
        obstacle = "no Triton kernel is legal for it on this device"
    if backend == "triton":
        raise ValueError(f"backend must be auto or torch for {describe(problem)}: {obstacle}; got 'triton'")
    fallback = _plan_torch(bucket, device, split_k)
    return replace(fallback, reason=f"torch, because {obstacle}")


def _is_usable(config: Config, problem: Problem, device: Device, backend: str, split_k: int | None) -> bool:
    """Whether a remembered config serves the exact problem and what the caller asked for."""
    if backend not in ("auto", config.backend) or config.split_k > problem.k:
        return False
    if split_k is not None and (config.split_k != split_k or config.kernel not in SPLIT_KERNELS):
        return False
    return _is_legal(config, problem, device)


def _is_legal(config: Config, problem: Problem, device: Device) -> bool:
    return config.backend == "torch" or triton_objection(config, problem, device) is None


def _remembered_reason(remembered: cache.Remembered, problem: Problem) -> str:
    entry = remembered.entry
    found = f"the best of {len(entry.timings)} that were measured on {entry.date[:10]}: {entry.chosen_us:.2f} us"
    if entry.torch_us is not None:
        found += f", torch {entry.torch_us:.2f} us"
    return found if entry.problem == problem.bucketed() else f"{found} (with another epilogue)"


def _plan_torch(problem: Problem, device: Device, split_k: int | None) -> Plan:
    if split_k is not None:
        asked = Config("bmm_sum", split_k=split_k)
        return Plan(problem, device, asked, f"split_k={split_k} was asked for", (TORCH_MM,), ASKED)
    split = Config("bmm_sum", split_k=natural_split_k(problem, device))
    if device.type == "cpu" and _widens_whole_copies(problem):
        return Plan(
            problem,
            device,
            TORCH_MM,
            "torch.mm on whole widened copies, which are small: torch has no product of these dtypes that rounds once",
            (split,),
        )
    if device.type == "cpu" and _needs_widening(problem) and _widening_pays(problem, device):
        reason = "widening the operands chunk by chunk costs less than torch's product in their dtypes on a CPU"
        return Plan(problem, device, split, reason, (TORCH_MM,))
    reason = f"torch's own kernel is the best of the torch engine on {device.type}"
    return Plan(problem, device, TORCH_MM, reason, (split,))


def natural_split_k(problem: Problem, device: Device) -> int:
    """Chunks of the torch engine's split form: a function of (N, K) and the device, never of M."""
    if device.type == "cpu":
        return max(1, problem.k // CPU_CHUNK)
    return max(1, min(64, problem.k // 256))


def _needs_widening(problem: Problem) -> bool:
    return problem.a_dtype in HALVES or problem.b_dtype in HALVES or problem.a_dtype != problem.b_dtype


def _widens_whole_copies(problem: Problem) -> bool:
    """Whether torch's kernel on whole widened copies is the fastest: where torch cannot round first, and they are
    small."""
    if not _needs_widening(problem) or problem.batch_invariant or not _torch_cannot(problem):
        return False
    wide_bytes = problem.k * (problem.m + problem.n) * problem.accumulate_dtype.itemsize
    return wide_bytes <= WHOLE_COPY_BYTES


def _torch_cannot(problem: Problem) -> bool:
    return (
        problem.a_dtype != problem.b_dtype
        or problem.out_dtype != problem.a_dtype
        or problem.bias_dtype is not None
        or problem.activation not in (None, "relu")
    )


def _widening_pays(problem: Problem, device: Device) -> bool:
    """Whether the split form beats torch's half-precision product, by the measurements above."""
    if _torch_cannot(problem) or problem.batch_invariant:
        return True
    if dtype_name(problem.a_dtype) in device.half_instructions:
        # 16 x 16 x 8192 in fp16, AVX512: 0.2 ms, and the split form twice as long.
        return False
    products = problem.m * problem.n
    elements = problem.m + problem.n
    if (problem.a_layout, problem.b_layout) in (("row", "column"), ("column", "row")):
        return products >= 10 * elements and products * problem.k >= 1 << 20
    return 4 * products >= 3 * elements and products * problem.k >= 1 << 18


def _missing_triton() -> str | None:
    return "triton is not installed" if importlib.util.find_spec("triton") is None else None


def _filtered(found: list[Config], problem: Problem, device: Device, backend: str, split_k: int | None) -> list[Config]:
    """What is left of the candidates of a backend, or those that take another split_k."""
    if split_k is not None:
        asked = dict.fromkeys(replace(config, split_k=split_k) for config in found if config.kernel == "pair")
        return [config for config in asked if _is_legal(config, problem, device)]
    return [config for config in found if config.backend == "triton" or backend != "triton"]


def triton_objection(config: Config, problem: Problem, device: Device) -> str | None:
    """Why a Triton config cannot run a problem on a device; None where it can."""
    return is_legal(config, problem, device) or _missing_triton()


def _plan_found(problem: Problem, device: Device, found: tuple[Config, ...], split_k: int | None) -> Plan:
    first, rest = found[0], found[1:]
    if split_k is not None:
        return Plan(problem, device, first, f"split_k={split_k} was asked for", rest, ASKED)
    if first.backend == "torch":
        reason = "the heuristic expects torch's own kernel to be the fastest here"
    else:
        reason = "first candidate of the heuristic"
    return Plan(problem, device, first, reason, rest)


def describe(problem: Problem) -> str:
    """A problem's operands, for messages."""
    return (
        f"[{problem.m}, {problem.k}] {dtype_name(problem.a_dtype)} @ [{problem.k}, {problem.n}]"
        f" {dtype_name(problem.b_dtype)}"
    )


def _device_of(device: str | torch.device) -> Device:
    try:
        return Device.of(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device must name a device of this machine; got {device!r}: {error}") from error
