"""The register estimates refuse what is known to spill, and nothing that won on a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import decompose_k
from decompose_k import store
from decompose_k.config import INPUT_PRECISIONS, Config
from decompose_k.device import Device
from decompose_k.dtypes import dtype_from_name
from decompose_k.entries import Entry
from decompose_k.legality import is_legal
from decompose_k.problem import Problem
from decompose_k.registers import dot_registers, pair_registers
from decompose_k.shapes import OPERAND_LAYOUTS

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
A100 = Device("stub A100", capability=(8, 0), multiprocessors=108, shared_bytes=163 << 10, bandwidth=2.0e12)
H200 = Device("stub H200", capability=(9, 0), multiprocessors=132, shared_bytes=227 << 10, bandwidth=4.8e12)
B200 = Device("stub B200", capability=(10, 0), multiprocessors=148, shared_bytes=227 << 10, bandwidth=8.0e12)

STRIDED = {"a_layout": "strided", "b_layout": "strided"}

# Bytes a thread that Triton 3.6 or 3.9 spills: (bytes, device, problem, config).
SPILLS = {
    "bf16_large_tile": (96, H200, (32, 896, 7168, BF16, BF16, {"b_layout": "column"}), ("32x128x256", 4, 1, "ieee")),
    "fp16_odd_strides": (2880, H200, (100, 100, 10001, FP16, FP16, {}), ("64x64x256", 4, 1, "ieee")),
    "fp16_odd_strides_ampere": (3720, A100, (100, 100, 10001, FP16, FP16, {}), ("64x64x128", 4, 3, "ieee")),
    "bf16_strided": (400, H200, (7, 13, 1009, BF16, BF16, STRIDED), ("16x16x256", 2, 1, "ieee")),
    "ieee_wide": (2712, H200, (64, 64, 8192, FP32, FP32, {"precision": "ieee"}), ("32x64x128", 8, 1, "ieee")),
    "ieee_wide_blackwell": (2912, B200, (64, 64, 8192, FP32, FP32, {"precision": "ieee"}), ("32x64x128", 8, 1, "ieee")),
    "ieee_pipelined": (24, H200, (128, 128, 16384, FP32, FP32, {"precision": "ieee"}), ("128x128x64", 8, 2, "ieee")),
    "ieee_ampere": (48, A100, (64, 64, 32768, FP32, FP32, {"precision": "ieee"}), ("64x64x64", 8, 3, "ieee")),
    "ieee_halves_of_two_kinds": (2528, H200, (64, 64, 8192, BF16, FP16, {}), ("32x64x128", 8, 1, "ieee")),
    "tf32x3_copies": (32, H200, (64, 64, 8192, FP32, FP32, {}), ("32x64x64", 4, 1, "tf32x3")),
    "tf32x3_mixed": (208, H200, (64, 24, 28672, BF16, FP32, {"b_layout": "column"}), ("32x32x128", 4, 2, "tf32x3")),
    "tf32x3_mixed_long": (64, H200, (16, 24, 28672, BF16, FP32, {"b_layout": "column"}), ("16x16x256", 4, 1, "tf32x3")),
    "tf32x3_ampere": (8, A100, (64, 64, 8192, FP32, FP32, {}), ("64x32x64", 8, 2, "tf32x3")),
    "fp64": (96, A100, (64, 64, 16384, FP64, FP64, {"a_layout": "column"}), ("64x32x128", 4, 1, "ieee")),
}  # fmt: skip
DOT_SPILLS = {
    "bf16": (80, (2, 512, 16384, BF16, BF16), (2, 16384, 4)),
    "fp64": (2568, (1, 32, 4096, FP64, FP64), (4, 4096, 4)),
    "fp64_16_warps": (176, (2, 512, 16384, FP64, FP64), (2, 16384, 16)),
}
RECORDS = Path(__file__).parents[1] / "results" / "h200"
SHIPPED = Path(decompose_k.__file__).parent / "data" / "tuned"


def launch_of(device):
    return "wait_first" if device.has_dependent_launch else "plain"


def pair(tile, num_warps, num_stages, precision, launch="wait_first"):
    m, n, k = map(int, tile.split("x"))
    return Config(
        "pair",
        split_k=10_000,
        block_m=m,
        block_n=n,
        block_k=k,
        num_warps=num_warps,
        num_stages=num_stages,
        input_precision=precision,
        launch=launch,
    )


@pytest.mark.parametrize(("spilled", "device", "problem", "config"), SPILLS.values(), ids=SPILLS)
def test_a_pair_that_spills_is_refused(spilled, device, problem, config):
    *shape, a_dtype, b_dtype, rest = problem
    described = Problem.make(*shape, a_dtype, b_dtype=b_dtype, **rest)
    assert spilled > 0
    assert "spill" in (is_legal(pair(*config, launch_of(device)), described, device) or "")


@pytest.mark.parametrize(
    ("problem", "config", "reserve_kib"),
    [
        (Problem.make(64, 64, 8192, FP32), pair("32x32x64", 4, 2, "tf32x3"), 108),
        (Problem.make(256, 256, 8192, FP16, a_layout="column"), pair("64x64x256", 4, 3, "ieee"), 144),
    ],
    ids=["tf32x3", "columns_of_a"],
)
def test_a_pair_that_spills_beside_a_reserve_alone_is_refused_with_it(problem, config, reserve_kib):
    assert is_legal(config, problem, H200) is None
    assert "spill" in is_legal(replace(config, reserve_kib=reserve_kib), problem, H200)


@pytest.mark.parametrize(("spilled", "problem", "config"), DOT_SPILLS.values(), ids=DOT_SPILLS)
def test_a_dot_that_spills_is_refused(spilled, problem, config):
    *shape, a_dtype, b_dtype = problem
    described = Problem.make(*shape, a_dtype, b_dtype=b_dtype, b_layout="column")
    block_n, block_k, num_warps = config
    assert spilled > 0
    refusal = is_legal(Config("dot", block_n=block_n, block_k=block_k, num_warps=num_warps), described, A100)
    assert "spill" in (refusal or "")


def recorded():
    """The Triton configs of the records, once each: (problem, config)."""
    rows = [json.loads(line) for file in sorted(RECORDS.glob("*.jsonl")) for line in file.read_text().splitlines()]
    found = {}
    for row in rows:
        if row.get("ours") and row["backend"] == "triton":
            a_layout, b_layout = OPERAND_LAYOUTS[row["layout"]]
            a_dtype, b_dtype, out_dtype = (dtype_from_name(row[f"{name}_dtype"]) for name in ("a", "b", "out"))
            problem = Problem.make(
                *(row["m"], row["n"], row["k"], a_dtype),
                b_dtype=b_dtype,
                out_dtype=out_dtype,
                a_layout=a_layout,
                b_layout=b_layout,
                static_b=row["static_b"],
            )
            found[problem, Config.from_json(row["config"])] = None
    return list(found)


def shipped():
    """Every choice that comes with the package, and the device it was measured on."""
    for file in SHIPPED.glob("*.json"):
        document = store.read(file)
        for values in document.entries.values():
            yield Entry.from_json(values), document.header.device


def test_every_shipped_choice_is_legal():
    entries = list(shipped())
    assert len(entries) > 700
    refused = {
        entry.key: str(entry.config) for entry, device in entries if is_legal(entry.config, entry.problem, device)
    }
    assert refused == {}


def test_every_config_of_the_records_is_legal():
    configs = recorded()
    assert len(configs) > 100
    assert {problem: str(config) for problem, config in configs if is_legal(config, problem, H200)} == {}


tiles = st.sampled_from([16, 32, 64, 128])
dtypes = st.sampled_from([(BF16, BF16), (FP32, FP32), (BF16, FP32), (FP32, FP16), (BF16, FP16), (FP64, FP64)])
devices = st.sampled_from([A100, H200, B200])


@given(
    tiles,
    tiles,
    dtypes,
    devices,
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 3]),
    st.sampled_from(INPUT_PRECISIONS),
)
def test_a_longer_k_block_takes_more_registers(m, n, types, device, num_warps, num_stages, precision):
    problem = Problem.make(128, 128, 8192, types[0], b_dtype=types[1])
    sizes = [
        pair_registers(pair(f"{m}x{n}x{k}", num_warps, num_stages, precision, launch_of(device)), problem, device)
        for k in (32, 64, 128, 256)
    ]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(sizes)
    assert sizes[0] > 0


@given(tiles, tiles, dtypes, devices, st.sampled_from([1, 2, 4, 8]))
def test_odd_strides_take_more_registers(m, n, types, device, num_warps):
    config = pair(f"{m}x{n}x64", num_warps, 1, "ieee", launch_of(device))
    problem = Problem.make(128, 128, 8192, types[0], b_dtype=types[1])
    odd = [replace(problem, k=8191), replace(problem, n=127), replace(problem, a_layout="strided")]
    assert all(pair_registers(config, other, device) > pair_registers(config, problem, device) for other in odd)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
def test_a_dot_of_more_columns_takes_more_registers(dtype):
    problem = Problem.make(1, 256, 4096, dtype)
    sizes = [dot_registers(Config("dot", block_n=n, block_k=4096), problem) for n in (1, 2, 4)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[1] < sizes[2]


LIMITS = {
    "warps": {"num_warps": 64},
    "reduce_warps": {"reduce_warps": 64},
    "reduce_block": {"reduce_block": 1 << 21},
    "tile": {"block_m": 1 << 12, "block_k": 1 << 12},
    "splits": {"split_k": 1 << 17},
    "group_m": {"group_m": 1 << 33},
}


@pytest.mark.parametrize("changes", LIMITS.values(), ids=LIMITS)
def test_what_no_gpu_can_launch_is_refused(changes):
    problem = Problem.make(4, 4, 1 << 25)
    config = Config("pair", split_k=1 << 15, block_k=64)
    assert is_legal(config, problem, H200) is None
    assert is_legal(replace(config, **changes), problem, H200) is not None


def test_the_tile_reducer_has_a_limit_of_columns():
    config = Config("pair", split_k=4, block_k=64, reducer="tile")
    assert is_legal(config, Problem.make(4, 16 * 70000, 256), H200) is not None
    assert is_legal(replace(config, reducer="flat"), Problem.make(4, 16 * 70000, 256), H200) is None
