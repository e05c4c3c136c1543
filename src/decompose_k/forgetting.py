"""What follows from remembered choices and is kept for later, until these change: one place that forgets it all."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, Protocol, TypeVar


class _Cached(Protocol):
    def cache_clear(self) -> None: ...


_AnyCached = TypeVar("_AnyCached", bound=_Cached)
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class _Kept:
    """What is to be emptied, and how often it was."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.generation = 0
        self.dependants: list[_Cached] = []


_KEPT = _Kept()


class Forgettable(Generic[_Parameters, _Result]):
    """A function's values by its arguments, until remembered choices change; see `forgettable`."""

    def __init__(self, function: Callable[_Parameters, _Result], most: int) -> None:
        functools.update_wrapper(self, function)

        @functools.lru_cache(maxsize=most)
        def values(_: int, *arguments: Any, **keywords: Any) -> _Result:
            return function(*arguments, **keywords)

        self._values: Any = values

    def __call__(self, *arguments: _Parameters.args, **keywords: _Parameters.kwargs) -> _Result:
        """The function's value, computed once in a generation of choices."""
        value: _Result = self._values(_KEPT.generation, *arguments, **keywords)
        return value

    def cache_clear(self) -> None:
        """Forget all values."""
        self._values.cache_clear()


def forgettable(most: int) -> Callable[[Callable[_Parameters, _Result]], Forgettable[_Parameters, _Result]]:
    """Decorator that keeps up to `most` values of a function that follow from remembered choices, until these change.

    What is being computed while they change is not kept for later, as an `lru_cache` that is emptied would keep it.
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Forgettable[_Parameters, _Result]:
        return register(Forgettable(function, most))

    return decorate


def register(cached: _AnyCached) -> _AnyCached:
    """Have something emptied when remembered choices change."""
    _KEPT.dependants.append(cached)
    return cached


def forget() -> None:
    """Read the files anew and choose anew, from the next call on."""
    with _KEPT.lock:
        _KEPT.generation += 1
    for cached in _KEPT.dependants:
        cached.cache_clear()
