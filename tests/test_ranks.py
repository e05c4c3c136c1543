"""Ranks of one job choose alike: the first decides, all use it, and only it writes files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import json, os, sys, warnings
import torch
import torch.distributed as dist
import decompose_k as dk
from decompose_k import cache
from stub_devices import entry_of

rank, scenario, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ["DECOMPOSE_K_CACHE_DIR"] = f"{folder}/rank{rank}"
here = dk.Device.of("cpu")
problem = dk.Problem.make(3, 4, 2048, device_type="cpu")
only_own = dk.Problem.make(3, 5, 2048, device_type="cpu")
split = dk.Config("bmm_sum", split_k=7 + rank)
# Each rank has a home with choices of its own.
cache.remember([entry_of(problem if rank == 0 else only_own, split)], here)
before = sorted(path.name for path in cache.directory().iterdir())
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
said = None
group = dist.new_group([0, 1]) if scenario == "group" else None
if scenario == "synchronize":
    cache.synchronize()
elif scenario == "failure":
    def fail(*arguments, **options):
        raise KeyError("no timer")
    from decompose_k import tuner
    tuner.time_variants = fail
    try:
        dk.tune([only_own])
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
else:
    results = dk.tune([problem, dk.Problem.make(2, 2, 2048, device_type="cpu")], repetitions=2, group=group)
    said = [[result.status, str(result.config)] for result in results]
    # A second time, when all is remembered.
    again = dk.tune([problem, dk.Problem.make(2, 2, 2048, device_type="cpu")], repetitions=2, group=group)
    assert [result.status for result in again] == ["remembered"] * 2
plans = [dk.plan(one) for one in (problem, only_own, dk.Problem.make(2, 2, 2048, device_type="cpu"))]
print(json.dumps({
    "said": said,
    "configs": [str(plan.config) for plan in plans],
    "origins": [plan.origin for plan in plans],
    "entries": len(json.loads((cache.directory() / before[-1]).read_text())["entries"]),
}))
dist.barrier()
dist.destroy_process_group()
"""


def run_ranks(scenario, folder):
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(here.parent / "src"), str(here)))}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), scenario, str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = []
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert rank.returncode == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    return found


def test_synchronizing_makes_all_ranks_choose_as_the_first(tmp_path):
    first, second = run_ranks("synchronize", tmp_path)
    assert first["configs"] == second["configs"]
    assert first["configs"][0] == "torch bmm+sum split_k=7"
    assert first["origins"] == second["origins"] == ["tuned", "heuristic", "heuristic"]
    # The second rank's own file is neither used nor changed.
    assert (first["entries"], second["entries"]) == (1, 1)


@pytest.mark.parametrize("scenario", ["tune", "group"])
def test_the_first_rank_tunes_for_all(tmp_path, scenario):
    first, second = run_ranks(scenario, tmp_path)
    assert first["said"] == second["said"]
    assert [status for status, _ in first["said"]] == ["remembered", "measured"]
    assert first["configs"] == second["configs"]
    assert first["origins"] == second["origins"] == ["tuned", "heuristic", "tuned"]
    assert (first["entries"], second["entries"]) == (2, 1)


def test_a_failure_of_the_first_rank_is_heard_by_all(tmp_path):
    first, second = run_ranks("failure", tmp_path)
    assert first["said"] == "KeyError: 'no timer'"
    assert second["said"] == "RuntimeError: tuning failed on the first rank: KeyError: 'no timer'"
