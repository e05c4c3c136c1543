"""Measure cases in several processes, which compile side by side and are timed one at a time.

Compilers take most of a study's time: of a case of the seed grid, a processor for more than a minute and the GPU, on
which they time candidates, for some seconds; it is timed for one second (H200). One process at a time has the GPU, and
while the host's time counts the others are stopped.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import torch

from decompose_k.bench.cases import LeftOut
from decompose_k.bench.turns import SharedTurns

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from decompose_k.bench.cases import Case
    from decompose_k.bench.measure import Bench, Measured


_ENDING_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Task:
    """A case, and for how many seconds it may be timed."""

    case: Case
    seconds: float | None


# A task, what came of it, and how long that took.
Done = Callable[[Task, "Measured | LeftOut", float], None]


def measure_here(bench: Bench, tasks: Iterable[Task], done: Done) -> None:
    """Measure one task after the other in this process."""
    for task in tasks:
        started = time.monotonic()
        found = bench.measure_or_leave_out(task.case, task.seconds)
        done(task, found, time.monotonic() - started)


def measure_side_by_side(bench: Bench, tasks: Iterable[Task], jobs: int, done: Done) -> None:
    """Measure tasks in `jobs` processes, each asked for its next one when it is done with one.

    A task that ends its process is left out; the others that were under way then begin anew. What measuring raises is
    raised.
    """
    interrupted: list[Task] | None = []
    while interrupted is not None:
        tasks = chain(interrupted, tasks)
        interrupted = _until_one_ends(bench, tasks, jobs, done)


def tuning_timer() -> Any:
    """What Inductor times candidates with; None where a release has no such thing. Private."""
    try:
        from torch._inductor.runtime.benchmarking import benchmarker
    except ImportError:
        return None
    return benchmarker


def _until_one_ends(bench: Bench, tasks: Iterator[Task], jobs: int, done: Done) -> list[Task] | None:
    """Measure all, which gives None, or until a process ends: then the tasks that others had under way."""
    context = multiprocessing.get_context("spawn")
    turns = SharedTurns(context, jobs)
    busy: dict[Any, tuple[Task, float]] = {}
    processes: list[BaseProcess] = []
    try:
        for index, task in zip(range(jobs), tasks, strict=False):
            here, there = context.Pipe()
            arguments = (there, turns, index, bench, torch.get_num_threads())
            processes.append(context.Process(target=_work, args=arguments, daemon=True))
            processes[-1].start()
            there.close()
            _give(here, task, busy)
        while busy:
            ready: list[Any] = wait(list(busy))
            for pipe in ready:
                task, started = busy.pop(pipe)
                found = _taken(pipe)
                if found is None:
                    done(task, LeftOut(task.case, "it ended its process"), time.monotonic() - started)
                    return [task for task, _ in busy.values()]
                done(task, found, time.monotonic() - started)
                following = next(tasks, None)
                if following is not None:
                    _give(pipe, following, busy)
                else:
                    # With nothing more to come it ends by itself.
                    pipe.close()
        for process in processes:
            process.join(_ENDING_SECONDS)
        return None
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _give(pipe: Any, task: Task, busy: dict[Any, tuple[Task, float]]) -> None:
    """Send a task; a process that has ended since shows when its answer is waited for."""
    busy[pipe] = task, time.monotonic()
    try:
        pipe.send(task)
    except OSError:
        return


def _taken(pipe: Any) -> Measured | LeftOut | None:
    """A process's answer; None where it has ended. Raises what it raised."""
    try:
        found: Measured | LeftOut | Exception = pipe.recv()
    except (EOFError, OSError):
        return None
    if isinstance(found, Exception):
        raise found
    return found


def _work(pipe: Connection, turns: SharedTurns, index: int, bench: Bench, threads: int) -> None:
    """The life of a process: measure what comes, until nothing can come any more."""
    turns.join(index)
    # The code that compilers make for a CPU depends on the number of threads.
    torch.set_num_threads(threads)
    _tune_in_turn(turns)
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
