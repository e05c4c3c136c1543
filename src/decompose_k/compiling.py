"""Compile the Triton kernels of many configs ahead, in worker processes that fill Triton's cache on disk.

A process compiles about one kernel a second, and a search over a model's shapes meets some hundreds. Workers are plain
Python processes that are told what to compile line by line: a compiler that aborts takes one worker and one kernel with
it, and a script that tunes needs no `if __name__ == "__main__"`, as it would with Python's own pools.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

from decompose_k.accuracy import brief, make_operands, own_product
from decompose_k.config import MOST_SPLITS_AT_ONCE, Config
from decompose_k.legality import ceil_divide, k_blocks
from decompose_k.problem import Problem

Work = tuple[Problem, Config]
Code = tuple[Any, ...]

NO_TIME = "there was no time to compile it"
_WORKER = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from decompose_k.compiling import serve; serve()"


def code_of(problem: Problem, config: Config) -> Code:
    """What of a problem and a config decides the code that Triton makes; equal values need compiling once.

    Triton compiles anew for sizes and strides that are 1 or divisible by 16, and the sizes of dense operands are their
    strides.
    """
    sizes = tuple((size == 1, size % 16 == 0) for size in (problem.m, problem.n, problem.k))
    is_wide = max(problem.m, problem.n) * problem.k >= 1 << 30
    rows = min(problem.m, problem.n) if config.kernel == "dot" else 0
    dtypes = (problem.a_dtype, problem.b_dtype, problem.out_dtype, problem.bias_dtype)
    layouts = (problem.a_layout, problem.b_layout, problem.activation)
    values = config.to_json()
    # What a kernel is told when it runs.
    del values["split_k"], values["prefetch_blocks"]
    return (*dtypes, *layouts, sizes, is_wide, rows, _kind_of_splits(problem, config), *values.values())


def compile_ahead(
    work: Sequence[Work],
    device: torch.device,
    jobs: int,
    *,
    seconds: float | None = None,
    worker_code: str = _WORKER,
) -> dict[Code, str]:
    """Compile what a search will run; returns why the rest failed, by code.

    Args:
        work: problems and configs, the most important first.
        device: where they will run; a worker runs each once, so it needs the device too.
        jobs: worker processes.
        seconds: how long it may take; what is left then has failed for want of time.
        worker_code: the program of a worker.
    """
    items: dict[Code, Work] = {}
    for problem, config in work:
        items.setdefault(code_of(problem, config), (problem, config))
    if not items:
        return {}
    crew = _Crew(items, [sys.executable, "-c", worker_code, json.dumps(sys.path), str(device)])
    with ThreadPoolExecutor(min(jobs, len(items))) as threads:
        try:
            running = [threads.submit(crew.labour) for _ in range(min(jobs, len(items)))]
            _, unfinished = wait(running, timeout=seconds)
        finally:
            crew.dismiss()
    left = dict.fromkeys(crew.unfinished(), NO_TIME) if unfinished else {}
    return left | crew.failures


def serve() -> None:
    """The life of a worker: say that it is ready, then compile what each line describes and answer in a line."""
    # Compilers print: what they say must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    device = torch.device(sys.argv[2])
    torch.zeros(1, device=device)
    _answer(answers, None)
    for line in sys.stdin:
        problem, config = json.loads(line)
        _answer(answers, _attempt(Problem.from_json(problem), Config.from_json(config), device))


class _Crew:
    """Workers that share a list of items; each is driven by a thread that waits for its answers."""

    def __init__(self, items: dict[Code, Work], command: list[str]) -> None:
        self.failures: dict[Code, str] = {}
        self._command = command
        self._todo = list(reversed(items.items()))
        self._unfinished = dict(items)
        self._workers: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        self._dismissed = threading.Event()

    def labour(self) -> None:
        """Have one worker after another compile items until there are none, or until no worker starts."""
        worker = self._hire()
        while worker is not None:
            with self._lock:
                if self._dismissed.is_set() or not self._todo:
                    return
                code, (problem, config) = self._todo.pop()
            answer = _ask(worker, json.dumps([problem.to_json(), config.to_json()]))
            with self._lock:
                if self._dismissed.is_set():
                    return
                del self._unfinished[code]
                if answer is None:
                    self.failures[code] = "the compiler died"
                elif answer[0] is not None:
                    self.failures[code] = answer[0]
            if answer is None:
                worker = self._hire()

    def unfinished(self) -> tuple[Code, ...]:
        """Items without an answer."""
        with self._lock:
            return tuple(self._unfinished)

    def dismiss(self) -> None:
        """End all workers, whatever they are doing."""
        with self._lock:
            self._dismissed.set()
            for worker in self._workers:
                worker.kill()
                worker.wait()
                for pipe in (worker.stdin, worker.stdout):
                    # What was written to a worker that died cannot be flushed.
                    with contextlib.suppress(OSError):
                        pipe.close()  # type: ignore[union-attr]

    def _hire(self) -> subprocess.Popen[str] | None:
        with self._lock:
            if self._dismissed.is_set():
                return None
            worker = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
            )
            self._workers.append(worker)
        return None if _ask(worker, None) is None else worker


def _ask(worker: subprocess.Popen[str], line: str | None) -> list[str | None] | None:
    """A worker's answer to a line, or its first word; None where it died."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        if line is not None:
            worker.stdin.write(line + "\n")
            worker.stdin.flush()
        answer = json.loads(worker.stdout.readline())
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, list) else None


def _answer(answers: Any, failure: str | None) -> None:
    answers.write(json.dumps([failure]) + "\n")
    answers.flush()


def _attempt(problem: Problem, config: Config, device: torch.device) -> str | None:
    try:
        operands = make_operands(problem, device, torch.Generator(device).manual_seed(0))
        own_product(problem, config)(*operands)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001 - whatever goes wrong is the answer
        return brief(error)
    return None


def _kind_of_splits(problem: Problem, config: Config) -> tuple[object, ...]:
    """The reducer is compiled for a power of two of splits, and for one block of them or many."""
    if config.kernel != "pair":
        return ()
    splits = ceil_divide(problem.k, k_blocks(config, problem) * config.block_k)
    at_once = min(1 << (splits - 1).bit_length(), MOST_SPLITS_AT_ONCE)
    return (at_once, splits > MOST_SPLITS_AT_ONCE)
