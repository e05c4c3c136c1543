"""Made-up rows, so that what is made from rows can be tested without measuring."""

from __future__ import annotations

from decompose_k.bench.rows import Row

DEFAULTS = {
    "suite": "seed",
    "name": "seed grid M=N=16",
    "status": "definition",
    "m": 16,
    "n": 16,
    "k": 8192,
    "a_dtype": "bf16",
    "b_dtype": "bf16",
    "out_dtype": "bf16",
    "layout": "NN",
    "activation": "relu",
    "static_b": False,
    "variant": "torch",
    "label": "relu(torch.mm)",
    "ours": False,
    "backend": "torch",
    "config": None,
    "p20_us": 9.0,
    "p50_us": 10.0,
    "p80_us": 11.0,
    "repetitions": 30,
    "timing": "graph-cold",
    "error": 1.6e-3,
    "torch_error": 1.6e-3,
    "bytes": 524800,
    "flops": 4194304,
    "bandwidth": 4.0e12,
    "rate": 8.0e14,
    "device": "NVIDIA H200",
    "device_type": "cuda",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "version": "0.1.0",
    "commit": None,
    "date": "2026-01-02T03:04:05+00:00",
}


def row(p50_us: float = 10.0, spread: float = 0.1, **changes: object) -> Row:
    """A row of this median, its percentiles `spread` to either side."""
    times = {"p20_us": p50_us * (1 - spread), "p50_us": p50_us, "p80_us": p50_us * (1 + spread)}
    return Row.from_json({**DEFAULTS, **times, **changes})


def pair(torch_us: float, ours_us: float, spread: float = 0.1, **changes: object) -> list[Row]:
    """torch's row and ours for one case."""
    ours = {
        "variant": "auto",
        "label": "Decompose-K, auto",
        "ours": True,
        "config": {"kernel": "bmm_sum", "split_k": 8},
    }
    return [row(torch_us, spread, **changes), row(ours_us, spread, **{**ours, **changes})]
