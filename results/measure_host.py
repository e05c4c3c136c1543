"""Measure the host's time of eager calls beside torch's: `PYTHONPATH=src python3 results/measure_host.py FILE`.

Calls take turns in batches of a hundred, so that a drift of the machine hits all alike; the GPU is idle at the start of
a batch and never full. One JSON line for each pair of ours and torch's: medians over the batches, in microseconds, and
the ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import decompose_k as dk
from decompose_k.bench.machine import Machine

BATCH = 100
SHAPES = (
    (1, 256, 7168, torch.bfloat16),
    (16, 256, 7168, torch.bfloat16),
    (64, 128, 2880, torch.bfloat16),
    (1024, 256, 7168, torch.bfloat16),
    (16, 24, 28672, torch.float32),
)

Call = Callable[[], object]


def pairs(m: int, n: int, k: int, dtype: torch.dtype) -> dict[str, tuple[Call, Call]]:
    """(torch's call, ours) by name."""
    a = torch.randn(m, k, device="cuda", dtype=dtype)
    weight = torch.randn(n, k, device="cuda", dtype=dtype)
    bias = torch.randn(n, device="cuda", dtype=dtype)
    b, batch = weight.t(), a.view(1, m, k)
    return {
        "matmul": (lambda: torch.mm(a, b), lambda: dk.matmul(a, b)),
        "linear": (lambda: F.linear(a, weight), lambda: dk.linear(a, weight)),
        "linear with bias": (lambda: F.linear(a, weight, bias), lambda: dk.linear(a, weight, bias)),
        "linear of a batch": (lambda: F.linear(batch, weight), lambda: dk.linear(batch, weight)),
        "matmul, then relu": (lambda: torch.relu(torch.mm(a, b)), lambda: dk.matmul(a, b, activation="relu")),
    }


def host_microseconds(calls: dict[str, Call], batches: int) -> dict[str, float]:
    """Median host time of each call, batches interleaved."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(BATCH):
            call()
    for _ in range(batches):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(BATCH):
                call()
            samples[name].append((time.perf_counter() - start) / BATCH * 1e6)
    return {name: statistics.median(values) for name, values in samples.items()}


def main() -> None:
    """Measure every pair on every shape, in inference mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--batches", type=int, default=61)
    arguments = parser.parse_args()
    machine = Machine.of(torch.device("cuda"))
    with arguments.file.open("w", encoding="utf-8") as file, torch.inference_mode():
        for m, n, k, dtype in SHAPES:
            for name, (theirs, ours) in pairs(m, n, k, dtype).items():
                medians = host_microseconds({"torch": theirs, "ours": ours}, arguments.batches)
                record = {"call": name, "m": m, "n": n, "k": k, "dtype": str(dtype).removeprefix("torch.")}
                record |= {f"{who}_us": round(median, 2) for who, median in medians.items()}
                record |= {"ratio": round(medians["ours"] / medians["torch"], 3), "device": machine.device}
                record |= {"torch": machine.torch, "commit": machine.commit, "date": machine.date}
                file.write(json.dumps(record) + "\n")
                print(record)  # noqa: T201 - what a script that measures is for


if __name__ == "__main__":
    main()
