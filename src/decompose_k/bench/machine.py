"""Facts about the machine that every row carries, and its measured ceilings."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import device as TorchDevice

from decompose_k import settings
from decompose_k._version import __version__, triton_version
from decompose_k.device import Device, free_bytes
from decompose_k.dtypes import HALVES, accumulate_dtype
from decompose_k.timing import make_input_sets, time_variants

_PROBE_BYTES = {"cuda": 1 << 30, "cpu": 128 << 20}
_PROBE_SIZE = {"cuda": 4096, "cpu": 1024}
_PROBE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and with what rows were measured."""

    device: str
    device_type: str
    torch: str
    triton: str | None
    version: str
    commit: str | None
    date: str

    @classmethod
    def of(cls, device: TorchDevice) -> Machine:
        """The facts about this process on a device, now."""
        return cls(
            device=Device.of(device).name,
            device_type=device.type,
            torch=torch.__version__,
            triton=triton_version(),
            version=__version__,
            commit=commit_of(Path(__file__).parent),
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device was seen to reach: bytes/s from memory, and flop/s of a large square product by operand dtype."""

    bandwidth: float
    rates: dict[torch.dtype, float]

    def rate(self, a: torch.dtype, b: torch.dtype) -> float:
        """Highest measured flop/s of a product of these dtypes."""
        return self.rates[rate_dtype(a, b)]


def commit_of(directory: Path) -> str | None:
    """Commit of the checkout that tracks this directory, with `-dirty` if it was changed; None outside of one."""
    try:
        command = ["git", "ls-files", "--error-unmatch", "__init__.py"]
        subprocess.run(command, cwd=directory, capture_output=True, check=True, timeout=10)
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def rate_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The dtype in which the product's multiplications count: the operands' if equal, else the accumulator's."""
    return a if a == b else accumulate_dtype(a, b)


def measure_ceilings(device: torch.device, dtypes: set[torch.dtype]) -> Ceilings:
    """Measure memory bandwidth (the better of reading and copying) and the rate of torch.mm for each dtype."""
    rates = {dtype: _matmul_rate(device, dtype) for dtype in dtypes}
    if device.type == "cpu" and any(dtype in HALVES for dtype in rates):
        # A CPU without half-precision instructions multiplies halves best as fp32, which is then their ceiling.
        full = rates.get(torch.float32) or _matmul_rate(device, torch.float32)
        rates = {dtype: max(rate, full) if dtype in HALVES else rate for dtype, rate in rates.items()}
    return Ceilings(_bandwidth(device), rates)


def _bandwidth(device: torch.device) -> float:
    size = _PROBE_BYTES[device.type]
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    timings = time_variants(
        {"read": lambda: source.sum(), "copy": lambda: target.copy_(source)},
        [()],
        device,
        bytes_per_set=2 * size,
        repetitions=10,
        seconds=_PROBE_SECONDS,
    )
    return max(size / timings["read"].p50_us, 2 * size / timings["copy"].p50_us) * 1e6


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    size = _PROBE_SIZE[device.type]
    bytes_per_set = 2 * size * size * dtype.itemsize

    def make() -> tuple[torch.Tensor, ...]:
        return tuple(torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))

    input_sets = make_input_sets(make, bytes_per_set, device)[:4]
    timing = time_variants(
        {"mm": torch.mm},
        input_sets,
        device,
        bytes_per_set=bytes_per_set,
        repetitions=5,
        seconds=_PROBE_SECONDS,
    )
    return 2 * size**3 / timing["mm"].p50_us * 1e6


def machine_facts() -> dict[str, Any]:
    """What `info` shows."""
    has_gpu = torch.cuda.is_available()
    names = [Device.of("cpu").name]
    if has_gpu:
        names += [Device.of(f"cuda:{index}").name for index in range(torch.cuda.device_count())]
    triton = triton_version()
    usable = "triton" if triton and has_gpu else None
    return {
        "decompose-k": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": triton or "not installed",
        "devices": names,
        "free memory": f"{free_bytes(torch.device('cpu')) / 1e9:.1f} GB",
        "backends": ["torch", *([usable] if usable else [])],
        "default backend": settings.default_backend(),
        "cache": str(settings.cache_directory()),
    }
