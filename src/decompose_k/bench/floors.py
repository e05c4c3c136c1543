"""Read floors: kernels that only read A and B once, the fastest of several grids in each launch mode."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from decompose_k.bench.variant import FLOOR_PLAIN, FLOOR_STATIC, FLOOR_WAIT_FIRST, Product, Variant

if TYPE_CHECKING:
    from decompose_k.bench.cases import Case
    from decompose_k.device import Device

_LAUNCHES = {FLOOR_PLAIN: "plain", FLOOR_WAIT_FIRST: "wait_first", FLOOR_STATIC: "static_b"}
_LABELS = {
    FLOOR_PLAIN: "read floor",
    FLOOR_WAIT_FIRST: "read floor, dependent launch",
    FLOOR_STATIC: "read floor, static weight",
}
# Programs a multiprocessor, and warps a program.
_GRIDS = ((0.5, 8), (1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (4, 4))


def read_floor(name: str, case: Case, device: Device) -> Variant | None:
    """The read floor of a name; None where it cannot run or would say nothing."""
    launch = _LAUNCHES[name]
    if device.type != "cuda" or importlib.util.find_spec("triton") is None or case.shape.is_gram:
        return None
    if launch != "plain" and not device.has_dependent_launch:
        return None
    if launch == "static_b" and not case.static_weight:
        return None
    options = {
        f"{programs} programs of {warps} warps": _reader(launch, programs, warps)
        for share, warps in _GRIDS
        if (programs := round(share * device.multiprocessors)) >= 1
    }
    return Variant(
        name,
        _LABELS[name],
        next(iter(options.values())),
        "triton",
        static_b=launch == "static_b",
        options=options,
        error=unread,
    )


def unread(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """0 where the words of a result fold to what all words of a and b fold to, else 1: something was not read."""
    expected = _folded(a) ^ _folded(b)
    return float(_folded(result) != expected)


FLOOR_MAKERS: dict[str, Callable[[Case, Device], Variant | None]] = {
    name: functools.partial(read_floor, name) for name in _LAUNCHES
}


def _reader(launch: str, programs: int, num_warps: int) -> Product:
    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        from decompose_k.kernels.read import read_both

        return read_both(a, b, launch=launch, programs=programs, num_warps=num_warps)

    return call


def _folded(matrix: torch.Tensor) -> int:
    """The exclusive or of the 32-bit words of a dense matrix, by halves."""
    dense = matrix if matrix.is_contiguous() else matrix.T
    words = dense.reshape(-1).view(torch.int32)
    while words.numel() > 1:
        half = words.numel() // 2
        folded = words[:half] ^ words[half : 2 * half]
        words = torch.cat([folded, words[2 * half :]])
    return int(words.item()) if words.numel() else 0
