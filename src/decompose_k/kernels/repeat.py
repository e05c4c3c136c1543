"""Launching compiled kernels again, with as little work for the host as two kernels allow.

Triton's own launcher finds out anew at every call which compiled kernel suits its arguments: 34 us for the first stage
on the host of an H200, where all of torch.mm takes 15. For a call that is known to be alike, what is left is to
allocate (1.1 us a tensor), to fill in pointers and M, and to launch (4.6 us). A call is alike if the compiled code and
all plain arguments but M are the same: the caller sees to that with its key, in which M stands as its bucket.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import triton

if TYPE_CHECKING:
    from decompose_k.config import Config
    from decompose_k.kernels.launch import Launch

# (a, b, bias, m) -> result; b may come as its transpose, since only its address is read. None while a profiler listens
# to launches: it wants to hear more than is known here.
Repeat = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", int], "torch.Tensor | None"]

_runtime: Any = triton.knobs.runtime


def repeat_pair(partial: Launch, first: Any, reduce: Launch, second: Any, config: Config) -> Repeat:
    """`repeat(a, b, bias, m)` for the launches of a pair and their compiled kernels, for any M of the bucket."""
    workspace, out = reduce.tensors[0], reduce.tensors[2]
    splits, m_now, n = workspace.shape
    index, out_dtype, sums_dtype = out.device.index, out.dtype, workspace.dtype
    launch_first, head_first = direct_launch(first)
    launch_second, head_second = direct_launch(second)
    tail_first, tail_second = partial.trailing[1:], reduce.trailing[1:]
    block_m, tile_columns = config.block_m, partial.grid[0] // triton.cdiv(m_now, config.block_m)
    reduce_block = config.reduce_block if config.reducer == "flat" else 0
    empty, current_stream, is_heard = strided_empty(out.device), raw_stream(), launches_are_heard

    def repeat(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, m: int) -> torch.Tensor | None:
        if is_heard():
            return None
        result = empty((m, n), (n, 1), out_dtype)
        partials = empty((splits, m, n), (m * n, n, 1), sums_dtype)
        stream, target, sums = current_stream(index), result.data_ptr(), partials.data_ptr()
        addend = target if bias is None else bias.data_ptr()
        rows = -(-m // block_m)
        x, y = (-(-m * n // reduce_block), 1) if reduce_block else (rows, tile_columns)
        launch_first(
            rows * tile_columns, splits, 1, stream, *head_first, a.data_ptr(), b.data_ptr(), sums, m, *tail_first
        )
        launch_second(x, y, 1, stream, *head_second, sums, addend, target, m, *tail_second)
        return result

    return repeat


def repeat_dot(dot: Launch, compiled: Any, block_n: int, *, transposed: bool) -> Repeat:
    """`repeat(a, b, bias, m)` for the dot kernel; where it is `transposed`, the kernel's rows are b's columns."""
    out = dot.tensors[3]
    n = out.shape[0] if transposed else out.shape[1]
    index, out_dtype = out.device.index, out.dtype
    launch, head = direct_launch(compiled)
    tail = dot.trailing[1:]
    empty, current_stream, is_heard = strided_empty(out.device), raw_stream(), launches_are_heard

    def repeat(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, m: int) -> torch.Tensor | None:
        if is_heard():
            return None
        result = empty((m, n), (n, 1), out_dtype)
        target = result.data_ptr()
        addend = target if bias is None else bias.data_ptr()
        rows, columns, size = (b, a, m) if transposed else (a, b, n)
        launch(
            *(-(-size // block_n), 1, 1, current_stream(index), *head),
            *(rows.data_ptr(), columns.data_ptr(), addend, target, size, *tail),
        )
        return result

    return repeat


def direct_launch(compiled: Any, version: str = triton.__version__) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """(launch, head) for `launch(x, y, z, stream, *head, *arguments)` of a compiled kernel.

    What Triton calls for it differs between releases: those known take their arguments as here, 3.6 with 3.5 us and
    those up to 3.9 with 4.6 us. Any other is launched in the documented way, which takes 7 us.
    """
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not (3, 6) <= numbers <= (3, 9):

        def launch(x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
            compiled[x, y, z](*arguments, stream=stream)

        return launch, ()
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    needs_scratch = getattr(run, "global_scratch_size", 1) > 0 or getattr(run, "profile_scratch_size", 1) > 0
    if numbers == (3, 6) and not needs_scratch and hasattr(run, "launch_pdl"):
        options = (run.launch_cooperative_grid, run.launch_pdl)
        return run.launch, (function, *options, None, None, metadata, None, None, None)
    return run, (function, metadata, None, None, None)


def launches_are_heard() -> bool:
    """Whether a profiler has asked Triton to tell it of launches."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    # A chain of hooks is always there; without any hook its list is empty.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def strided_empty(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """empty(size, stride, dtype) on a device that is the current one: Inductor's, which takes half the time, if any."""
    quick: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    found: Any = getattr(quick, "_empty_strided_cuda", None)
    if found is not None and device.type == "cuda":
        return found
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def raw_stream() -> Callable[[int], int]:
    """current(index), the handle of a device's current stream: what Triton itself asks, if torch has it."""
    found: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return found or (lambda index: torch.cuda.current_stream(index).cuda_stream)
