"""Whose turn it is where several processes measure on one GPU: all may compile at once, one at a time is timed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext


class Turns(Protocol):
    """What a case's measuring is divided into."""

    def compiling(self) -> AbstractContextManager[object]:
        """Everything before the timing; `gpu` is asked for beside it where the GPU is at work for longer."""

    def gpu(self) -> AbstractContextManager[object]:
        """While others compile: alone on the GPU."""

    def timing(self) -> AbstractContextManager[object]:
        """Alone on the GPU and on the host."""


class Alone:
    """The turns of a process that measures by itself."""

    def compiling(self) -> AbstractContextManager[object]:
        """At once."""
        return nullcontext()

    gpu = timing = compiling


class SharedTurns:
    """The turns of processes that share this object, which is handed to them when they start.

    Whoever waits to be timed waits until nobody compiles, and nobody begins to compile before all who wait were timed.
    A process that ends within its turn leaves the others waiting forever.
    """

    def __init__(self, context: BaseContext) -> None:
        self._changed = context.Condition()
        self._gpu = context.RLock()
        self._compiling, self._waiting, self._timed = (context.Value("i", 0, lock=False) for _ in range(3))

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """As soon as nobody is timed or waits for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting.value == self._timed.value == 0)
            self._compiling.value += 1
        try:
            yield
        finally:
            with self._changed:
                self._compiling.value -= 1
                self._changed.notify_all()

    def gpu(self) -> AbstractContextManager[object]:
        """As soon as no other process holds the GPU; may be nested."""
        return self._gpu

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """As soon as nobody compiles or is timed."""
        with self._changed:
            self._waiting.value += 1
            self._changed.wait_for(lambda: self._compiling.value == self._timed.value == 0)
            self._waiting.value -= 1
            self._timed.value = 1
        try:
            yield
        finally:
            with self._changed:
                self._timed.value = 0
                self._changed.notify_all()
