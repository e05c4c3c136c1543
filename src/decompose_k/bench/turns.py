"""Whose turn it is where several processes measure on one GPU: all may compile, one at a time has what is timed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

# Kernels that others launched before they were stopped end in microseconds.
_SETTLING_SECONDS = 0.005


class Turns(Protocol):
    """What measuring asks for, besides compiling, for which nobody has to ask."""

    def gpu(self) -> AbstractContextManager[object]:
        """Alone on the GPU; may be nested."""

    def machine(self) -> AbstractContextManager[object]:
        """Alone on the GPU and on the host; `gpu` may be nested in it."""


class Alone:
    """The turns of a process that measures by itself."""

    def gpu(self) -> AbstractContextManager[object]:
        """At once."""
        return nullcontext()

    machine = gpu


ALONE = Alone()


class SharedTurns:
    """The turns of `count` processes that share this object, each of which joins when it starts.

    Of the GPU there is one lock. Who has the machine has that lock, and all others are stopped by a signal, with the
    compilers that they started; so nobody waits until a compiler has come to an end. A process that ends within its
    turn leaves the others waiting, or stopped, until they are killed.
    """

    def __init__(self, context: BaseContext, count: int) -> None:
        self._lock = context.RLock()
        self._groups = context.Array("i", count, lock=False)

    def join(self, index: int) -> None:
        """Take part as the process of this index, as the leader of a process group of its own.

        It stays in the session: the kernel then ends the group's stopped processes when their parents are gone.
        """
        os.setpgid(0, 0)
        with self._lock:
            self._groups[index] = os.getpid()

    def gpu(self) -> AbstractContextManager[object]:
        """As soon as no other process has it."""
        return self._lock

    @contextlib.contextmanager
    def machine(self) -> Iterator[None]:
        """As soon as no other process has the GPU, and then nobody runs."""
        with self._lock:
            self._signal_others(signal.SIGSTOP)
            try:
                time.sleep(_SETTLING_SECONDS)
                yield
            finally:
                self._signal_others(signal.SIGCONT)

    def _signal_others(self, number: signal.Signals) -> None:
        for group in self._groups:
            if group not in (0, os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, number)
