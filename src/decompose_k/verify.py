"""The contract, checked on this machine: named checks that anyone can run and read."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from decompose_k.contract import CHECKS, GPU_CHECKS, Case

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, whether this machine keeps it, and what was seen."""

    name: str
    passed: bool
    detail: str


def verify(
    device: torch.device | str | None = None,
    *,
    quick: bool = False,
    progress: Callable[[str], None] | None = None,
) -> tuple[Check, ...]:
    """Check the contract on a device: same meaning as torch, accuracy, determinism, gradients, errors, embedding.

    A check that fails, or that cannot even run, is a `Check` with `passed=False`; nothing is raised for it.

    Args:
        device: where; by default the GPU if there is one, else the CPU.
        quick: fewer and smaller shapes.
        progress: called with the name of each check before it runs.

    Raises:
        TypeError, ValueError: a wrong argument.

    >>> all(check.passed for check in verify("cpu", quick=True))
    True
    """
    if not isinstance(quick, bool):
        raise TypeError(f"quick must be True or False; got {quick!r}")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be None or callable; got {progress!r}")
    place = _device(device)
    wanted = CHECKS | GPU_CHECKS if place.type == "cuda" else CHECKS
    checks = []
    for backend in _backends(place):
        for name, run in wanted.items():
            title = f"{backend}: {name}"
            if progress is not None:
                progress(title)
            checks.append(_check(title, run, Case(place, backend, quick)))
    return tuple(checks)


def _check(title: str, run: Callable[[Case], str], case: Case) -> Check:
    try:
        return Check(title, True, run(case))
    except Exception as error:  # noqa: BLE001 - whatever goes wrong in a check is what it has to report
        lines = str(error).strip().splitlines() or ["no message"]
        return Check(title, False, f"{type(error).__name__}: {lines[0]}")


def _backends(device: torch.device) -> tuple[str, ...]:
    has_triton = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return ("auto", "torch", "triton") if has_triton else ("auto", "torch")


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a torch.device, a string or None; got {type(device).__name__}")
    try:
        place = torch.device(device)
        torch.zeros(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device must name a device of this machine; got {device!r}: {error}") from error
    if place.type == "meta":
        raise ValueError(f"device must hold data; got {device!r}")
    return place
