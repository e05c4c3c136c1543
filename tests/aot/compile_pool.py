"""A few worker processes that compile requests; one that dies fails its own request alone."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")
SECONDS_PER_REQUEST = 120


class CompilePool:
    """Answers requests for `worker.py` in the order of asking; used as a context manager."""

    def __init__(self, workers: int) -> None:
        self._requests: queue.Queue[tuple[dict[str, object], Future] | None] = queue.Queue()
        self._cache = tempfile.TemporaryDirectory(prefix="triton-cache-")
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(workers)]
        self._closed = threading.Event()

    def __enter__(self) -> CompilePool:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for _ in self._threads:
            self._requests.put(None)
        for thread in self._threads:
            thread.join()
        self._cache.cleanup()

    def submit(self, target: str, launcher: str, **arguments: object) -> Future:
        """A future of the worker's answer; `{"error": ...}` where the compiler raised, hung or killed its process."""
        future: Future = Future()
        self._requests.put(({"target": target, "launcher": launcher, "arguments": arguments}, future))
        return future

    def _serve(self) -> None:
        with contextlib.ExitStack() as stack:
            worker = None
            while (item := self._requests.get()) is not None and not self._closed.is_set():
                request, future = item
                worker = worker or stack.enter_context(_Worker(self._cache.name))
                answer = worker.ask(request)
                if answer is None:
                    future.set_result({"error": f"the compiler died or hung:\n{worker.last_words()}"})
                    stack.close()
                    worker = None
                else:
                    future.set_result(answer)


class _Worker:
    def __init__(self, cache: str) -> None:
        self._cache = cache

    def __enter__(self) -> _Worker:
        environment = os.environ | {"TRITON_CACHE_DIR": self._cache, "OMP_NUM_THREADS": "1"}
        # An interpreted kernel cannot be compiled, and the tests may have been started beside interpreted ones.
        environment.pop("TRITON_INTERPRET", None)
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ask(self, request: dict[str, object]) -> dict[str, object] | None:
        """The answer, or None if the process ended without one or was stopped for taking too long."""
        timer = threading.Timer(SECONDS_PER_REQUEST, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            return None
        finally:
            timer.cancel()
        return json.loads(line) if line else None

    def last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        return self._errors.read()[-2000:]
