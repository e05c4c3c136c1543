"""Measuring in several processes: who may do what at the same time, and what becomes of a process that ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from decompose_k.bench import run
from decompose_k.bench.cases import LeftOut, custom_case
from decompose_k.bench.machine import Ceilings, Machine
from decompose_k.bench.measure import Bench, Measured
from decompose_k.bench.run import Settings, run_cases
from decompose_k.bench.side_by_side import Task, measure_here, measure_side_by_side, tuning_timer
from decompose_k.bench.turns import Alone, SharedTurns
from decompose_k.bench.variant import AUTO, COMPILED, TORCH

CPU = torch.device("cpu")
CASES = [custom_case((2, 3, k), torch.float32) for k in (64, 65, 96, 128)]
MACHINE = Machine.of(CPU)
CEILINGS = Ceilings(1e10, {torch.float32: 1e11})
BENCH = Bench(CPU, MACHINE, CEILINGS, repetitions=3, variants=(TORCH, AUTO), columns=())
SPAWN = multiprocessing.get_context("spawn")


def measured(bench, cases, jobs):
    found = {}
    measure_side_by_side(
        bench, [Task(case, None) for case in cases], jobs, lambda task, answer, _: found.update({task.case: answer})
    )
    return found


def test_every_case_is_measured_by_some_process():
    found = measured(BENCH, CASES, 2)
    assert list(found) != []
    assert {case: [row.variant for row in answer.rows] for case, answer in found.items()} == {
        case: [TORCH, AUTO] for case in CASES
    }


@pytest.mark.parametrize("jobs", [1, 3])
def test_each_task_is_done_once(jobs):
    found = []
    tasks = iter([Task(case, 0.1) for case in CASES])
    measure_side_by_side(Fake(), tasks, jobs, lambda task, answer, seconds: found.append((task.case, answer, seconds)))
    assert sorted(case.shape.k for case, _, _ in found) == [64, 65, 96, 128]
    assert all(answer == Measured(missing=["0.1"]) and seconds > 0 for _, answer, seconds in found)


@dataclass(frozen=True)
class Fake:
    """What stands for a bench in another process: it answers with how long it may take, or dies, or raises.

    What it does in its turns is written into a file: begin and end with the process, on one clock for all.
    """

    dies_at: int | None = None
    raises_at: int | None = None
    log: str | None = None

    def measure_or_leave_out(self, case, seconds, turns):
        if self.dies_at == case.shape.k:
            with turns.machine():
                os._exit(1)
        if self.raises_at == case.shape.k:
            with turns.machine():
                raise ValueError("no")
        if self.log is not None:
            for _ in range(20):
                self.note("host", 0.002)
            with turns.gpu():
                self.note("gpu", 0.02)
            with turns.machine():
                self.note("machine", 0.05)
        return Measured(missing=[str(seconds)])

    def note(self, what, seconds):
        begin = time.monotonic()
        time.sleep(seconds)
        with Path(self.log).open("a") as file:
            file.write(f"{what} {os.getpid()} {begin} {time.monotonic()}\n")


@pytest.mark.parametrize("jobs", [1, 4])
def test_a_case_that_ends_its_process_is_left_out_and_no_other(jobs):
    found = measured(Fake(dies_at=65), CASES, jobs)
    assert {case.shape.k: type(answer) for case, answer in found.items()} == {
        64: Measured,
        65: LeftOut,
        96: Measured,
        128: Measured,
    }
    assert found[CASES[1]] == LeftOut(CASES[1], "it ended its process")


def test_what_a_process_raises_is_raised():
    with pytest.raises(RuntimeError, match="2x3x96.*ValueError: no"):
        measured(Fake(raises_at=96), CASES, 2)
    assert multiprocessing.active_children() == []


def test_what_hears_of_it_may_stop_it():
    def refuse(*_):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        measure_side_by_side(Fake(), [Task(case, None) for case in CASES], 2, refuse)
    assert multiprocessing.active_children() == []


def test_one_at_a_time_has_the_gpu_and_nobody_runs_beside_the_machine(tmp_path):
    log = tmp_path / "log"
    measured(Fake(log=str(log)), CASES, 3)
    lines = [line.split() for line in log.read_text().splitlines()]
    spans = [(what, pid, float(begin), float(end)) for what, pid, begin, end in lines]
    assert len({pid for _, pid, _, _ in spans}) == 3
    assert {what for what, *_ in spans} == {"host", "gpu", "machine"}
    for what, pid, begin, end in spans:
        for other, other_pid, other_begin, other_end in spans:
            if pid != other_pid and what in ("gpu", "machine") and other in ("gpu", "machine"):
                assert end <= other_begin or other_end <= begin
            if pid != other_pid and what == "machine":
                # What was under way may have been stopped in the midst of it, and nothing else happened.
                assert not begin < other_begin < end
                assert not begin < other_end < end


def test_compilers_that_a_process_started_are_stopped_with_it():
    turns = SharedTurns(SPAWN, 2)
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=join_and_start_another, args=(turns, there), daemon=True)
    process.start()
    child = here.recv()
    try:
        with turns.machine():
            wait_until(lambda: {state_of(process.pid), state_of(child)} == {"T"})
        wait_until(lambda: "T" not in {state_of(process.pid), state_of(child)})
        with contextlib.suppress(ValueError), turns.machine():
            raise ValueError
        wait_until(lambda: "T" not in {state_of(process.pid), state_of(child)})
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    # It has gone without a word, and nobody minds.
    with turns.machine(), turns.gpu():
        pass


def join_and_start_another(turns, pipe):
    turns.join(0)
    with subprocess.Popen(["sleep", "60"]) as child:
        pipe.send(child.pid)


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until(is_so):
    deadline = time.monotonic() + 5
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_alone_nobody_waits():
    turns = Alone()
    with turns.gpu(), turns.gpu(), turns.machine():
        pass


def test_here_and_there_say_the_same():
    found = []
    measure_here(BENCH, [Task(CASES[0], None)], lambda task, answer, seconds: found.append((task, answer, seconds)))
    ((task, answer, seconds),) = found
    assert task.case == CASES[0]
    assert seconds > 0
    there = measured(BENCH, CASES[:1], 1)[CASES[0]]
    assert [replace(row, p20_us=0, p50_us=0, p80_us=0, noise=0) for row in answer.rows] == [
        replace(row, p20_us=0, p50_us=0, p80_us=0, noise=0) for row in there.rows
    ]


def test_the_processes_time_candidates_in_turns():
    assert tuning_timer() is not None
    found = measured(Listening(), CASES[:1], 1)
    assert found[CASES[0]].missing == ["1", "call", "call"]


class Listening:
    """Asks in its process how candidates are timed there."""

    def measure_or_leave_out(self, case, seconds, turns):
        import torch._inductor.config as inductor_config

        timer = tuning_timer()
        names = [timer.benchmark_gpu.__name__, timer.benchmark_cpu.__name__]
        return Measured(missing=[str(inductor_config.compile_threads), *names])


def test_compiled_variants_are_measured_in_processes():
    found = measured(replace(BENCH, variants=(TORCH, COMPILED)), CASES[:2], 2)
    assert {row.variant for answer in found.values() for row in answer.rows} == {TORCH, COMPILED}


@pytest.fixture
def asked(monkeypatch):
    """How a run's cases are measured: here, or in how many processes."""
    heard = []
    monkeypatch.setattr(run, "measure_ceilings", lambda *_: CEILINGS)
    monkeypatch.setattr(run, "free_bytes", lambda _: 1 << 40)
    monkeypatch.setattr(run, "measure_here", lambda bench, tasks, done: heard.append(("here", list(tasks))))
    monkeypatch.setattr(run, "measure_side_by_side", lambda bench, tasks, jobs, done: heard.append((jobs, list(tasks))))
    monkeypatch.setattr(run.Machine, "of", lambda device: MACHINE)
    return heard


@pytest.mark.parametrize(
    ("device", "jobs", "count", "expected"),
    [("cuda", 4, 4, 4), ("cuda", 16, 3, 3), ("cuda", 1, 4, "here"), ("cuda", 4, 1, "here"), ("cpu", 4, 4, "here")],
    ids=str,
)
def test_where_cases_are_measured(device, jobs, count, expected, asked, tmp_path):
    run_cases(CASES[:count], torch.device(device), tmp_path, Settings(jobs=jobs), announce=lambda _: None)
    ((where, tasks),) = asked
    assert where == expected
    assert [task.case for task in tasks] == CASES[:count]


def test_without_the_compilers_timer_nobody_else_compiles(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "tuning_timer", lambda: None)
    run_cases(CASES, torch.device("cuda"), tmp_path, Settings(jobs=4), announce=lambda _: None)
    assert [where for where, _ in asked] == ["here"]


def test_the_budget_is_shared_out(asked, tmp_path):
    ticks = iter([0.0, 40.0, 40.0, 60.0, 60.0])
    run_cases(
        CASES,
        torch.device("cuda"),
        tmp_path,
        Settings(jobs=2, budget=100.0),
        announce=lambda _: None,
        clock=lambda: next(ticks),
    )
    ((_, tasks),) = asked
    assert [task.seconds for task in tasks] == [60.0 / 8, 60.0 / 6, 40.0 / 4, 40.0 / 2]
