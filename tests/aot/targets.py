"""The processors that kernels are compiled for, none of which is needed to do so."""

from __future__ import annotations

from dataclasses import dataclass

from decompose_k.device import Device


@dataclass(frozen=True)
class Target:
    """What Triton compiles for (`backend`, `arch`, `warp_size`) and the device that the heuristics are asked about."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    device: Device

    @property
    def shared_limit(self) -> int:
        """Most shared memory, in bytes, that one program may use."""
        return self.device.shared_bytes


def _nvidia(name: str, major: int, sms: int, shared_kib: int, l2_mb: int, bandwidth: float) -> Target:
    device = Device(
        name=name,
        capability=(major, 0),
        multiprocessors=sms,
        shared_bytes=shared_kib * 1024,
        l2_bytes=l2_mb * 10**6,
        bandwidth=bandwidth,
    )
    return Target(f"sm_{major}0", "cuda", 10 * major, 32, device)


_MI300X = Device(
    name="MI300X",
    vendor="amd",
    multiprocessors=304,
    shared_bytes=64 * 1024,
    l2_bytes=4 * 10**6,
    bandwidth=5.3e12,
)

TARGETS = {
    target.name: target
    for target in (
        _nvidia("A100", 8, 108, 163, 40, 2.0e12),
        _nvidia("H200", 9, 132, 227, 60, 4.8e12),
        _nvidia("B200", 10, 148, 227, 126, 8.0e12),
        Target("gfx942", "hip", "gfx942", 64, _MI300X),
    )
}
