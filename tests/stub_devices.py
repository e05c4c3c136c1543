"""Devices as their drivers describe them, so that choices for any GPU are tested without one."""

from __future__ import annotations

from decompose_k.device import Device
from decompose_k.entries import Entry, Measured
from decompose_k.timing import Timing

DEVICES = {
    "A100": Device("NVIDIA A100-SXM4-80GB", "cuda", "nvidia", (8, 0), 108, 166912, 40 << 20, 2.0e12),
    "H100": Device("NVIDIA H100 80GB HBM3", "cuda", "nvidia", (9, 0), 132, 232448, 50 << 20, 3.4e12),
    "H200": Device("NVIDIA H200", "cuda", "nvidia", (9, 0), 132, 232448, 60 << 20, 4.8e12),
    "B200": Device("NVIDIA B200", "cuda", "nvidia", (10, 0), 148, 232448, 126 << 20, 8.0e12),
    "RTX 5090": Device("NVIDIA GeForce RTX 5090", "cuda", "nvidia", (12, 0), 170, 101376, 96 << 20, 1.8e12),
    "L4": Device("NVIDIA L4", "cuda", "nvidia", (8, 9), 58, 101376, 48 << 20, 3.0e11),
    "MI300X": Device("AMD Instinct MI300X", "cuda", "amd", (0, 0), 304, 65536, 4 << 20, 5.3e12),
    "laptop": Device("NVIDIA GeForce RTX 4060 Laptop GPU", "cuda", "nvidia", (8, 9), 24, 101376, 32 << 20, 2.6e11),
}
CPU = Device("Some CPU, 2 threads", type="cpu", vendor="cpu", multiprocessors=2)


def timing(p50_us, method="graph-cold"):
    return Timing(p50_us * 0.9, p50_us, p50_us * 1.1, 9, method)


def entry_of(problem, config, chosen_us=2.0, torch_us=7.0, others=()):
    """An entry in which `config` won against torch and against `others`, pairs of a config and its microseconds."""
    measured = [Measured(str(config), timing(chosen_us), config)]
    measured += [Measured(str(other), timing(microseconds), other) for other, microseconds in others]
    measured.append(Measured("torch.mm", timing(torch_us)))
    ordered = tuple(sorted(measured, key=lambda one: one.timing.p50_us))
    return Entry(problem.bucketed(), config, ordered, "2026-01-02T03:04:05+00:00")
