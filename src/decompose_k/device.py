"""Where a problem runs: the few facts about a device that choices depend on."""

from __future__ import annotations

import functools
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Device:
    """A processor, described without touching it.

    `vendor` is `nvidia`, `amd` or `cpu`; `capability` is NVIDIA's (major, minor), (0, 0) elsewhere; `multiprocessors`
    counts the threads that torch uses on a CPU, and so does its `name`; `bandwidth` is the memory's peak in bytes/s, 0
    where it is not known; `half_instructions` names the halves, bf16 and fp16, that a CPU multiplies in hardware.
    """

    name: str
    type: str = "cuda"
    vendor: str = "nvidia"
    capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 1
    shared_bytes: int = 0
    l2_bytes: int = 0
    bandwidth: float = 0.0
    half_instructions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.multiprocessors < 1:
            raise ValueError(f"multiprocessors must be >= 1; got {self.multiprocessors}")

    def microseconds_to_move(self, count: int) -> float:
        """Time to move so many bytes once at the memory's peak."""
        return count / (self.bandwidth or 1e12) * 1e6

    @property
    def has_dependent_launch(self) -> bool:
        """Whether kernels can be launched with programmatic dependent launch (NVIDIA Hopper and later)."""
        return self.vendor == "nvidia" and self.capability >= (9, 0)

    @property
    def has_bf16(self) -> bool:
        """Whether the tensor cores take bf16."""
        return self.vendor == "amd" or self.capability >= (8, 0)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file; `from_json` restores an equal device."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Device:
        """The device that `to_json` described."""
        values = dict(values)
        values["capability"] = tuple(values.get("capability", (0, 0)))
        values["half_instructions"] = tuple(values.get("half_instructions", ()))
        return cls(**values)

    @classmethod
    def of(cls, device: torch.device | str) -> Device:
        """Facts about a torch device, read once per device; touches the GPU only when asked about one."""
        device = torch.device(device)
        if device.type != "cuda":
            return _cpu(device.type, torch.get_num_threads())
        return _gpu(torch.cuda.current_device() if device.index is None else device.index)


# Assumed where the system does not say what is free.
_UNKNOWN_MEMORY = 4 << 30


def free_bytes(device: torch.device) -> int:
    """Memory that is free for new tensors on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return _UNKNOWN_MEMORY


@functools.cache
def _cpu(kind: str, threads: int) -> Device:
    name = f"{_cpu_model()}, {threads} thread{'' if threads == 1 else 's'}" if kind == "cpu" else kind
    halves = half_instructions(_cpu_facts("flags", "Features")) if kind == "cpu" else ()
    return Device(name=name, type=kind, vendor="cpu", multiprocessors=threads, half_instructions=halves)


# What Linux calls the instructions that multiply halves, on x86 and on Arm.
_HALF_FLAGS = {
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}


def half_instructions(flags: str) -> tuple[str, ...]:
    """The halves that a CPU with these flags multiplies in hardware.

    >>> half_instructions("fpu sse2 avx2 avx512_bf16 amx_bf16")
    ('bf16',)
    """
    present = set(flags.split())
    return tuple(name for name, wanted in _HALF_FLAGS.items() if present & wanted)


def _cpu_model() -> str:
    return _cpu_facts("model name") or platform.processor() or platform.machine()


def _cpu_facts(*names: str) -> str:
    """The first line of the system's description of its CPU that has one of the names; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() in names), "")


@functools.cache
def _gpu(index: int) -> Device:
    facts = torch.cuda.get_device_properties(index)
    is_amd = torch.version.hip is not None
    # The clock is in kHz and counts one of the two transfers per cycle; the bus width is in bits.
    bandwidth = 2e3 * getattr(facts, "memory_clock_rate", 0) * getattr(facts, "memory_bus_width", 0) / 8
    return Device(
        name=facts.name,
        type="cuda",
        vendor="amd" if is_amd else "nvidia",
        capability=(0, 0) if is_amd else (facts.major, facts.minor),
        multiprocessors=facts.multi_processor_count,
        shared_bytes=getattr(facts, "shared_memory_per_block_optin", 65536),
        l2_bytes=getattr(facts, "L2_cache_size", 0),
        bandwidth=bandwidth,
    )
