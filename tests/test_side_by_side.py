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
from decompose_k.bench.agenda import Agenda
from decompose_k.bench.cases import LeftOut, custom_case
from decompose_k.bench.machine import Ceilings, Machine
from decompose_k.bench.measure import Bench, Measured
from decompose_k.bench.run import Settings, run_cases
from decompose_k.bench.side_by_side import measure_here, measure_side_by_side, tuning_timer
from decompose_k.bench.turns import Alone, SharedTurns
from decompose_k.bench.variant import AUTO, COMPILED, TORCH

CPU = torch.device("cpu")
CASES = [custom_case((2, 3, k), torch.float32) for k in (64, 65, 96, 128)]
MACHINE = Machine.of(CPU)
CEILINGS = Ceilings(1e10, {torch.float32: 1e11})
BENCH = Bench(CPU, MACHINE, CEILINGS, repetitions=3, variants=(TORCH, AUTO), columns=())
SPAWN = multiprocessing.get_context("spawn")


def agenda_of(cases, budget=None):
    deadline = None if budget is None else time.monotonic() + budget
    return Agenda(cases, deadline, time.monotonic, lambda _: None)


def measured(bench, cases, jobs):
    found = []
    measure_side_by_side(bench, agenda_of(cases), jobs, found.append)
    return found


def test_every_case_is_measured_by_some_process():
    found = measured(BENCH, CASES, 2)
    assert sorted((row.k, row.variant) for answer in found for row in answer.rows) == sorted(
        (case.shape.k, variant) for case in CASES for variant in (TORCH, AUTO)
    )


@pytest.mark.parametrize("jobs", [1, 3])
def test_each_case_is_measured_once(jobs):
    assert sorted(answer.missing[0] for answer in measured(Fake(), CASES, jobs)) == ["128", "64", "65", "96"]


@dataclass(frozen=True)
class Fake:
    """What stands for a bench in another process: it answers with the case's K, or dies, or raises.

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
        return Measured(missing=[str(case.shape.k)])

    def note(self, what, seconds):
        begin = time.monotonic()
        time.sleep(seconds)
        with Path(self.log).open("a") as file:
            file.write(f"{what} {os.getpid()} {begin} {time.monotonic()}\n")


@pytest.mark.parametrize("jobs", [1, 4])
def test_a_case_that_ends_its_process_is_left_out_and_no_other(jobs):
    found = measured(Fake(dies_at=65), CASES, jobs)
    (left_out,) = (answer for answer in found if isinstance(answer, LeftOut))
    assert left_out == LeftOut(CASES[1], "it ended its process, with code 1")
    assert sorted(answer.missing[0] for answer in found if answer is not left_out) == ["128", "64", "96"]


def test_processes_that_cannot_start_are_an_error_at_once():
    with pytest.raises(RuntimeError, match="ended as it started, with code 1"):
        measured(Unpicklable(), CASES, 2)
    assert multiprocessing.active_children() == []


class Unpicklable:
    """Cannot be made in another process."""

    def __reduce__(self):
        return fail, ()


def fail():
    raise ValueError("not here")


def test_what_a_process_raises_is_raised():
    with pytest.raises(RuntimeError, match="2x3x96.*ValueError: no"):
        measured(Fake(raises_at=96), CASES, 2)
    assert multiprocessing.active_children() == []


def test_what_hears_of_it_may_stop_it():
    def refuse(*_):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        measure_side_by_side(Fake(), agenda_of(CASES), 2, refuse)
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


def wait_until(is_so, seconds=10):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_alone_nobody_waits():
    turns = Alone()
    with turns.gpu(), turns.gpu(), turns.machine():
        pass


def test_nothing_is_left_behind_where_a_process_ends_while_it_has_the_machine(tmp_path):
    """Also of the compilers that another had started, and which were stopped with it."""
    pids = tmp_path / "pids"
    found = measured(Compiling(str(pids)), CASES[:2], 2)
    assert any(isinstance(answer, LeftOut) for answer in found)
    wait_until(lambda: not any(is_running(int(pid)) for pid in pids.read_text().split()))


@dataclass(frozen=True)
class Compiling:
    """The first case starts another program; the second waits for it, and ends its process while that is stopped."""

    pids: str

    def measure_or_leave_out(self, case, seconds, turns):
        pids = Path(self.pids)
        if case == CASES[0] and pids.exists():
            return Measured()
        if case == CASES[0]:
            with subprocess.Popen(["sleep", "60"]) as child:
                pids.write_text(f"{child.pid}")
        wait_until(pids.exists)
        with turns.machine():
            os._exit(1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["terminated", "killed"])
def test_processes_end_with_the_one_that_started_them(number, tmp_path):
    pids = tmp_path / "pids"
    parent = SPAWN.Process(target=measure_for_long, args=(str(pids),))
    parent.start()
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2, seconds=60)
    time.sleep(0.1)
    os.kill(parent.pid, number)
    parent.join()
    wait_until(lambda: not any(is_running(int(pid)) for pid in pids.read_text().split()))


def measure_for_long(pids):
    measure_side_by_side(Sleeping(pids), agenda_of(CASES), 2, lambda _: None)


@dataclass(frozen=True)
class Sleeping:
    """One has the machine for a minute; the other is stopped meanwhile."""

    pids: str

    def measure_or_leave_out(self, case, seconds, turns):
        with Path(self.pids).open("a") as file:
            file.write(f"{os.getpid()} ")
        # Until the other has said so too.
        wait_until(lambda: len(Path(self.pids).read_text().split()) == 2)
        with turns.machine():
            time.sleep(60)


def is_running(pid):
    return Path(f"/proc/{pid}").exists() and state_of(pid) != "Z"


def test_here_and_there_say_the_same():
    found = []
    measure_here(BENCH, agenda_of(CASES[:1]), found.append)
    found += measured(BENCH, CASES[:1], 1)
    here, there = ([replace(row, p20_us=0, p50_us=0, p80_us=0, noise=0) for row in answer.rows] for answer in found)
    assert here == there != []


def test_the_processes_time_candidates_in_turns():
    assert tuning_timer() is not None
    (found,) = measured(Listening(), CASES[:1], 1)
    assert found.missing == ["1", "call", "call"]


class Listening:
    """Asks in its process how candidates are timed there."""

    def measure_or_leave_out(self, case, seconds, turns):
        import torch._inductor.config as inductor_config

        timer = tuning_timer()
        names = [timer.benchmark_gpu.__name__, timer.benchmark_cpu.__name__]
        return Measured(missing=[str(inductor_config.compile_threads), *names])


def test_compiled_variants_are_measured_in_processes():
    found = measured(replace(BENCH, variants=(TORCH, COMPILED)), CASES[:2], 2)
    assert {row.variant for answer in found for row in answer.rows} == {TORCH, COMPILED}


@pytest.fixture
def asked(monkeypatch):
    """How a run's cases are measured: here, or in how many processes."""
    heard = []

    def note(where, agenda):
        tasks = []
        while (task := agenda.next()) is not None:
            tasks.append(task)
        heard.append((where, tasks))

    monkeypatch.setattr(run, "measure_ceilings", lambda *_: CEILINGS)
    monkeypatch.setattr(run, "free_bytes", lambda _: 1 << 40)
    monkeypatch.setattr(run, "measure_here", lambda bench, agenda, done: note("here", agenda))
    monkeypatch.setattr(run, "measure_side_by_side", lambda bench, agenda, jobs, done: note(jobs, agenda))
    monkeypatch.setattr(run.Machine, "of", lambda device: MACHINE)
    return heard


def run_on(device, cases, folder, **settings):
    run_cases(cases, torch.device(device), folder, Settings(**settings), announce=lambda _: None)


@pytest.mark.parametrize(
    ("device", "jobs", "count", "expected"),
    [("cuda", 4, 4, 4), ("cuda", 16, 3, 3), ("cuda", 1, 4, "here"), ("cuda", 4, 1, "here"), ("cpu", 4, 4, "here")],
    ids=str,
)
def test_where_cases_are_measured(device, jobs, count, expected, asked, tmp_path):
    run_on(device, CASES[:count], tmp_path, jobs=jobs)
    where, tasks = asked[0]
    assert where == expected
    assert [task.case for task in tasks] == CASES[:count]
    assert [tasks for _, tasks in asked[1:]] in ([], [[]])


def test_without_the_compilers_timer_nobody_else_compiles(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "tuning_timer", lambda: None)
    run_on("cuda", CASES, tmp_path, jobs=4)
    assert [where for where, _ in asked] == ["here"]


def test_what_is_too_large_beside_others_is_measured_alone_after_them(asked, tmp_path, monkeypatch):
    large = custom_case((2, 3, 1 << 20), torch.float32)
    monkeypatch.setattr(run, "free_bytes", lambda _: 6 * large.bytes)
    run_on("cuda", [large, *CASES], tmp_path, jobs=4)
    assert [(where, [task.case for task in tasks]) for where, tasks in asked] == [(4, CASES), ("here", [large])]
    asked.clear()
    run_on("cuda", [large, CASES[0]], tmp_path, jobs=4)
    assert [(where, [task.case for task in tasks]) for where, tasks in asked] == [("here", [large, CASES[0]])]


def test_the_budget_is_shared_out():
    ticks = iter([40.0, 40.0, 60.0, 60.0])
    agenda = Agenda(CASES, 100.0, lambda: next(ticks), lambda _: None)
    assert [agenda.next().seconds for _ in CASES] == [60.0 / 8, 60.0 / 6, 40.0 / 4, 40.0 / 2]
    assert agenda.next() is None


def test_what_would_likely_end_past_the_budget_is_not_begun_also_after_an_interruption():
    now, heard = [0.0], []
    agenda = Agenda(CASES, 10.0, lambda: now[0], heard.append)
    first, second = agenda.next(), agenda.next()
    now[0] = 4.0
    agenda.end(first)
    agenda.put_back([second])
    again = agenda.next()
    assert (again.case, again.begun) == (second.case, 4.0)
    now[0] = 6.5
    agenda.put_back([again])
    assert agenda.next() is None
    assert [left.case for left in agenda.left_out] == CASES[1:]
    assert heard == [str(CASES[0]), str(CASES[1]), str(CASES[1])]
