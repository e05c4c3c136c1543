"""Calling every variant once in other processes, before a study is timed."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch

from decompose_k.bench.cases import custom_case
from decompose_k.bench.prepare import _compile_alone, call_case, call_once, prepare
from decompose_k.bench.run import Settings, run_cases
from decompose_k.bench.variant import AUTO, COMPILED, TORCH

CPU = torch.device("cpu")
SMALL = custom_case((2, 3, 64), torch.float32)
OTHER = custom_case((3, 2, 65), torch.float32)


def names(case):
    return (TORCH, AUTO)


def test_every_case_is_called_in_some_process():
    heard = []
    assert prepare([SMALL, OTHER], names, CPU, 2, announce=heard.append) == 2
    assert heard == ["prepared 1 of 2", "prepared 2 of 2"]


def test_a_case_that_fails_costs_no_other():
    broken = replace(SMALL, shape=replace(SMALL.shape, k=-1))
    assert prepare([broken, OTHER], names, CPU, 1, announce=lambda _: None) == 1


def test_little_is_begun_when_time_is_up():
    cases = [custom_case((2, 3, k), torch.float32) for k in range(64, 164)]
    heard = []
    assert prepare(cases, names, CPU, 1, seconds=0.0, announce=heard.append) <= 2
    assert heard[-1].startswith("no more time to prepare")


def test_a_case_that_ends_its_process_ends_the_preparing(monkeypatch):
    monkeypatch.setattr("decompose_k.bench.prepare.call_case", end_process)
    heard = []
    assert prepare([SMALL, OTHER], names, CPU, 1, announce=heard.append) == 0
    assert heard == ["a process ended while it prepared; 0 of 2 cases are"]


def end_process(*_):
    os._exit(1)


def test_what_hears_of_it_may_stop_it():
    def refuse(text):
        raise RuntimeError(text)

    with pytest.raises(RuntimeError, match="prepared 1 of 1"):
        prepare([SMALL], names, CPU, 1, announce=refuse)


def test_a_call_compiles_what_is_to_be_compiled(monkeypatch):
    compiled = []
    run = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **kw: compiled.append(1) or run(*a, **kw))
    call_case(SMALL, (TORCH, COMPILED), "cpu")
    assert compiled


def test_a_run_prepares_before_it_measures(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(
        "decompose_k.bench.run.prepare", lambda cases, *rest, **kw: steps.append(f"prepare {len(cases)}")
    )
    settings = Settings(repetitions=1, variants=(TORCH,), columns=(), prepare=True, jobs=3)
    outcome = run_cases([SMALL, OTHER], CPU, tmp_path, settings, announce=steps.append)
    assert steps[:2] == ["measuring the ceilings", "prepare 2"]
    assert len(steps) == 4
    assert len(outcome.rows) == 2


def test_the_budget_that_is_left_is_shared(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr("decompose_k.bench.run.prepare", lambda *_, seconds, **__: given.append(seconds))
    settings = Settings(repetitions=1, budget=100.0, variants=(TORCH,), columns=(), prepare=True)
    ticks = iter([0.0, 40.0, *range(41, 60)])
    run_cases([SMALL], CPU, tmp_path, settings, announce=lambda _: None, clock=lambda: float(next(ticks)))
    assert given == [30.0]


def test_candidates_are_called_and_not_timed():
    called = []
    assert call_once(lambda: called.append(1), rep=40) == call_once(
        lambda: called.append(2), is_vetted_benchmarking=True
    )
    assert called == [1, 2]


def test_the_processes_call_candidates_once():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _compile_alone, (1,)) as pool:
        assert pool.submit(timer_of_candidates).result() == "call_once"


def timer_of_candidates():
    from torch._inductor.runtime.benchmarking import benchmarker

    return benchmarker.benchmark_gpu.__name__
