"""Reserved shared memory: how much leaves room for how many programs, and which configs ask for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decompose_k.config import RESERVE_STEP_KIB, Config
from decompose_k.heuristics import candidates
from decompose_k.legality import MOST_RESIDENT, ceil_divide, is_legal, reserve_for, shared_bytes
from decompose_k.problem import Problem
from stub_devices import DEVICES

WITH_DEPENDENT_LAUNCH = {name: device for name, device in DEVICES.items() if device.has_dependent_launch}
dependent = pytest.mark.parametrize("device", WITH_DEPENDENT_LAUNCH.values(), ids=WITH_DEPENDENT_LAUNCH)
H200 = DEVICES["H200"]
PAIR = Config("pair", split_k=16, block_k=64, launch="wait_first", reserve_kib=144)
ROUTER = Problem.make(16, 256, 7168, b_layout="column", out_dtype=torch.float32)


def held(reserve_kib, device):
    """Programs that a multiprocessor holds: it has 1 KiB more than a program may ask for, and each takes 1 KiB more."""
    return (device.shared_bytes + 1024) // ((reserve_kib << 10) + 1024)


@dependent
@pytest.mark.parametrize("residency", range(1, MOST_RESIDENT + 1))
def test_a_reserve_leaves_room_for_so_many_programs_and_no_less_would_do(residency, device):
    reserve_kib = reserve_for(residency, device)
    steps = range(0, device.shared_bytes >> 10, RESERVE_STEP_KIB)
    exact = [step for step in steps if held(step, device) == residency]
    assert reserve_kib == (exact[0] if exact else 0)
    assert exact or device.shared_bytes < 200 << 10


@dependent
def test_more_programs_need_no_reserve(device):
    assert reserve_for(MOST_RESIDENT + 1, device) == 0


@dependent
@pytest.mark.parametrize("m", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("static_b", [False, True], ids=["wait_first", "static_b"])
def test_candidates_leave_room_for_their_own_programs_alone(m, static_b, device):
    problem = replace(ROUTER, m=m, static_b=static_b)
    found = candidates(problem, device)
    assert len(set(map(str, found))) == len(set(found)) == len(found) or m > 16
    pairs = [config for config in found if config.kernel == "pair"]
    assert pairs or m <= 2
    for config in pairs:
        tiles = ceil_divide(m, config.block_m) * ceil_divide(problem.n, config.block_n)
        needed = ceil_divide(tiles * config.split_k, device.multiprocessors)
        if needed > MOST_RESIDENT:
            assert config.reserve_kib == 0
            continue
        taken = max(config.reserve_kib << 10, shared_bytes(config, problem))
        most = needed + (config.launch == "static_b")
        assert taken <= device.shared_bytes // needed
        if reserve_for(most, device):
            assert taken > (device.shared_bytes + 1024) // (most + 1) - 1024


def test_devices_without_dependent_launch_reserve_nothing():
    for device in DEVICES.values():
        if not device.has_dependent_launch:
            assert not any(config.reserve_kib for config in candidates(ROUTER, device))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (replace(PAIR, launch="plain"), "dependent launch"),
        (replace(PAIR, reserve_kib=36 * 7), "shared memory"),
        (Config("dot", block_k=8192, launch="wait_first", reserve_kib=36), "reserves no shared memory"),
    ],
    ids=["plain", "too_much", "dot"],
)
def test_reserves_without_use_or_room_are_illegal(config, reason):
    assert is_legal(PAIR, ROUTER, H200) is None
    assert reason in is_legal(config, replace(ROUTER, m=1) if config.kernel == "dot" else ROUTER, H200)


def test_no_candidate_comes_twice():
    for static_b in (False, True):
        for dtype in (torch.bfloat16, torch.float32):
            found = candidates(Problem.make(128, 16, 8192, dtype, static_b=static_b), H200)
            assert len(set(found)) == len(found)


@pytest.mark.parametrize(("precision", "expected"), [("tf32", {"tf32"}), ("highest", {"tf32x3"}), ("ieee", {"ieee"})])
def test_operands_of_two_dtypes_are_multiplied_as_precision_allows(precision, expected):
    problem = Problem.make(64, 256, 7168, b_dtype=torch.float32, precision=precision)
    pairs = [config for config in candidates(problem, H200) if config.kernel == "pair"]
    assert {config.input_precision for config in pairs} == expected


@pytest.mark.parametrize("wrong", [-36, 1, 35, True, 36.0, None])
def test_a_reserve_is_a_multiple_of_the_step(wrong):
    with pytest.raises(ValueError, match="reserve_kib must be 0 or a multiple of 36; got"):
        Config("pair", reserve_kib=wrong)
