"""Compiling ahead: what needs it once, and that a worker that fails, dies or does not start costs no more than its
kernel. The workers here run torch's kernels on the CPU; what they do with a kernel of Triton's is the same."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import pytest
import torch

import decompose_k as dk
from decompose_k.compiling import NO_TIME, code_of, compile_ahead

CPU = torch.device("cpu")
PROBLEM = dk.Problem.make(16, 256, 7168, out_dtype=torch.float32, b_layout="column")
PAIR = dk.Config("pair", split_k=14, block_k=128, num_stages=4)


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (replace(PROBLEM, m=32), PAIR),
        (replace(PROBLEM, n=512), PAIR),
        (replace(PROBLEM, static_b=True), PAIR),
        (replace(PROBLEM, batch_invariant=True), PAIR),
        (PROBLEM, replace(PAIR, split_k=15)),
        (PROBLEM, replace(PAIR, prefetch_blocks=2)),
        (replace(PROBLEM, k=7168 * 2), replace(PAIR, split_k=28)),
    ],
    ids=["m", "n", "static_b", "batch_invariant", "split_k", "prefetch_blocks", "k and split_k"],
)
def test_what_does_not_change_the_code_is_compiled_once(problem, config):
    if config.split_k == 28:
        # 14 and 28 splits take a block of 16 and one of 32.
        assert code_of(problem, config) != code_of(PROBLEM, PAIR)
        config = replace(PAIR, split_k=14)
    assert code_of(problem, config) == code_of(PROBLEM, PAIR)


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (replace(PROBLEM, n=250), PAIR),
        (replace(PROBLEM, k=7160), PAIR),
        (replace(PROBLEM, m=1), PAIR),
        (replace(PROBLEM, out_dtype=torch.bfloat16), PAIR),
        (replace(PROBLEM, bias_dtype=torch.float32), PAIR),
        (replace(PROBLEM, activation="relu"), PAIR),
        (replace(PROBLEM, b_layout="row"), PAIR),
        (replace(PROBLEM, k=1 << 28), PAIR),
        (PROBLEM, replace(PAIR, split_k=56)),
        (PROBLEM, replace(PAIR, split_k=1)),
        (PROBLEM, replace(PAIR, block_n=32)),
        (PROBLEM, replace(PAIR, reduce_block=64)),
        (PROBLEM, replace(PAIR, launch="wait_first")),
    ],
    ids=str,
)
def test_what_changes_the_code_is_compiled_anew(problem, config):
    assert code_of(problem, config) != code_of(PROBLEM, PAIR)


def test_a_dot_kernel_is_compiled_for_its_rows():
    dot = dk.Config("dot", block_k=8192)
    assert code_of(replace(PROBLEM, m=1), dot) != code_of(replace(PROBLEM, m=2), dot)


def on_cpu(k, **rest):
    return dk.Problem.make(4, 4, k, torch.float32, device_type="cpu", **rest)


def test_workers_run_what_they_are_given_and_say_what_failed():
    good = [(on_cpu(64), dk.Config("bmm_sum", split_k=4, group_m=index)) for index in range(1, 6)]
    # A Triton config cannot run on a CPU.
    bad = (on_cpu(512), PAIR)
    failures = compile_ahead([*good, bad, *good], CPU, 2)
    assert list(failures) == [code_of(*bad)]
    assert failures[code_of(*bad)].startswith("ValueError: config must be legal")


def test_with_nothing_to_compile_no_worker_starts():
    assert compile_ahead([], CPU, 2, worker_code="raise SystemExit(1)") == {}


WORKER = """
import json, os, sys, time
print("[null]", flush=True)
for line in sys.stdin:
    problem, config = json.loads(line)
    if config["split_k"] == 2:
        os.abort()
    if config["split_k"] == 3:
        time.sleep(60)
    print(json.dumps(["no registers" if config["split_k"] == 4 else None]), flush=True)
"""
ITEMS = [(on_cpu(64), dk.Config("bmm_sum", split_k=1, group_m=index)) for index in range(1, 9)]


def item(split_k):
    return on_cpu(31), dk.Config("bmm_sum", split_k=split_k, group_m=10 * split_k)


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_worker_that_dies_loses_its_own_kernel_alone(jobs):
    work = [*ITEMS[:4], item(2), item(4), *ITEMS[4:]]
    failures = compile_ahead(work, CPU, jobs, worker_code=WORKER)
    assert failures == {code_of(*item(2)): "the compiler died", code_of(*item(4)): "no registers"}


def test_the_time_ends_what_hangs_and_keeps_what_is_done():
    begun = time.monotonic()
    failures = compile_ahead([ITEMS[0], item(4), item(3), *ITEMS[1:]], CPU, 1, seconds=5.0, worker_code=WORKER)
    assert time.monotonic() - begun < 30
    assert failures.pop(code_of(*item(4))) == "no registers"
    assert failures == dict.fromkeys([code_of(*work) for work in (item(3), *ITEMS[1:])], NO_TIME)


@pytest.mark.parametrize("code", ["raise SystemExit(1)", "print('hello')", "print(3)"], ids=["ends", "text", "number"])
def test_where_no_worker_starts_nothing_has_failed(code):
    assert compile_ahead(ITEMS, CPU, 2, worker_code=code) == {}


def test_a_worker_has_the_path_of_its_parent(monkeypatch, tmp_path):
    (tmp_path / "only_here.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import only_here;" + WORKER
    assert compile_ahead([item(4)], CPU, 1, worker_code=code) == {code_of(*item(4)): "no registers"}
