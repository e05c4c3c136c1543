"""Measure cases in several processes, which compile side by side and are timed one at a time.

Compilers take most of a study's time: of a case of the seed grid, a processor for more than a minute and the GPU, on
which they time candidates, for some seconds; it is timed for one second (H200). One process at a time times anything on
the GPU, and while the host's time counts the others are stopped. First calls and warm-ups ask nobody: some of their
microseconds fall into another's samples, and decide no median.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import torch

from decompose_k.bench.cases import LeftOut
from decompose_k.bench.turns import SharedTurns

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from decompose_k.bench.agenda import Agenda, Task
    from decompose_k.bench.measure import Bench, Measured

_ENDING_SECONDS = 10.0
_READY = "ready"
# Of Linux: the signal that a process gets when its parent ends, however that ends.
_PR_SET_PDEATHSIG = 1

Done = Callable[["Measured | LeftOut"], None]
Busy = dict[Any, tuple["BaseProcess", "Task"]]


def measure_here(bench: Bench, agenda: Agenda, done: Done) -> None:
    """Measure one case after the other in this process."""
    while (task := agenda.next()) is not None:
        done(bench.measure_or_leave_out(task.case, task.seconds))
        agenda.end(task)


def measure_side_by_side(bench: Bench, agenda: Agenda, jobs: int, done: Done) -> None:
    """Measure the cases of an agenda in `jobs` processes, each asked for its next one when it is done with one.

    A case that ends its process is left out; the others that were under way then begin anew. What measuring raises is
    raised, and RuntimeError where the processes cannot start.
    """
    while len(agenda):
        _until_one_ends(bench, agenda, min(jobs, len(agenda)), done)


def tuning_timer() -> Any:
    """What Inductor times candidates with; None where a release has no such thing. Private."""
    try:
        from torch._inductor.runtime.benchmarking import benchmarker
    except ImportError:
        return None
    return benchmarker if all(hasattr(benchmarker, name) for name in ("benchmark_gpu", "benchmark_cpu")) else None


def _until_one_ends(bench: Bench, agenda: Agenda, jobs: int, done: Done) -> None:
    """Measure until the agenda gives nothing more, or until a process ends before its case."""
    context = multiprocessing.get_context("spawn")
    turns = SharedTurns(context, jobs)
    processes: dict[Any, BaseProcess] = {}
    try:
        for index in range(jobs):
            here, there = context.Pipe()
            arguments = (there, turns, index, bench, torch.get_num_threads(), os.getpid())
            process: BaseProcess = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            processes[here] = process
            there.close()
        for pipe, started in processes.items():
            if _taken(pipe) != _READY:
                started.join(_ENDING_SECONDS)
                raise RuntimeError(f"a process that was to measure ended as it started, with code {started.exitcode}")
        if _serve(processes, agenda, done):
            for idle in processes.values():
                idle.join(_ENDING_SECONDS)
    finally:
        _end_all(list(processes.values()))


def _serve(processes: dict[Any, BaseProcess], agenda: Agenda, done: Done) -> bool:
    """Hand out cases until there are none, which is True, or until a process ended: then others are under way."""
    busy: Busy = {}
    for pipe, process in processes.items():
        _give_next(pipe, process, agenda, busy)
    while busy:
        ready: list[Any] = wait(list(busy))
        for pipe in ready:
            process, task = busy.pop(pipe)
            found = _taken(pipe)
            if found is None:
                process.join(_ENDING_SECONDS)
                done(LeftOut(task.case, f"it ended its process, with code {process.exitcode}"))
            else:
                done(found)
            agenda.end(task)
            if found is None or not _give_next(pipe, process, agenda, busy):
                agenda.put_back([task for _, task in busy.values()])
                return False
    return True


def _give_next(pipe: Any, process: BaseProcess, agenda: Agenda, busy: Busy) -> bool:
    """Have a process begin the next case, or end where there is none; False where it has ended already."""
    task = agenda.next()
    if task is None:
        pipe.close()
        return True
    try:
        pipe.send(task)
    except OSError:
        agenda.put_back([task])
        return False
    busy[pipe] = process, task
    return True


def _taken(pipe: Any) -> Any:
    """A process's word or answer; None where it has ended. Raises what it raised."""
    try:
        found = pipe.recv()
    except (EOFError, OSError):
        return None
    if isinstance(found, Exception):
        raise found
    return found


def _end_all(processes: list[BaseProcess]) -> None:
    """Kill what still runs, or is stopped, with the compilers that it started."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
    for process in processes:
        process.join()


def _work(pipe: Connection, turns: SharedTurns, index: int, bench: Bench, threads: int, parent: int) -> None:
    """The life of a process: measure what comes, until nothing can come any more."""
    _end_with(parent)
    turns.join(index)
    # The code that compilers make for a CPU depends on the number of threads.
    torch.set_num_threads(threads)
    _tune_in_turn(turns)
    pipe.send(_READY)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            found: object = bench.measure_or_leave_out(task.case, task.seconds, turns)
        except Exception as error:  # noqa: BLE001 - told where it is waited for
            found = RuntimeError(f"{task.case}: {type(error).__name__}: {error}")
        pipe.send(found)


def _end_with(parent: int) -> None:
    """Have this process end when its parent does, also if that is killed and this one stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that was to be told has ended")


def _tune_in_turn(turns: SharedTurns) -> None:
    """Compile in this process alone, whose helpers would be as many again, and time candidates when no other does."""
    import torch._inductor.config as inductor_config

    inductor_config.compile_threads = 1
    timer = tuning_timer()
    for name in ("benchmark_gpu", "benchmark_cpu"):
        setattr(timer, name, _in_turn(getattr(timer, name), turns))


def _in_turn(time_gpu: Callable[..., Any], turns: SharedTurns) -> Callable[..., Any]:
    """A timer that asks for the GPU only after a first call, which may compile what it times and tune parts of it."""

    def call(function: Callable[[], Any], *arguments: Any, **keywords: Any) -> Any:
        function()
        with turns.gpu():
            return time_gpu(function, *arguments, **keywords)

    return call
