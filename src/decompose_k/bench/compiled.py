"""Functions through torch.compile, each compiled anew, with a note of what Inductor's autotuning chose."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from decompose_k import settings

if TYPE_CHECKING:
    from decompose_k.bench.variant import Product


@dataclass(frozen=True, slots=True)
class Round:
    """One autotuning round: what was tuned, its choices by name, and their times in ms."""

    name: str
    times: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        best, _ = min(self.times, key=lambda choice: choice[1])
        decomposed = sum(choice.startswith("decompose_k") for choice, _ in self.times)
        offered = f", {decomposed} of them decompose-K" if decomposed else ""
        return f"{best} (of {len(self.times)}{offered})"


@dataclass(slots=True)
class Compiled:
    """A function of two matrices compiled for the exact shapes of its first call; `chosen` after that.

    Inductor's cache of graphs is left aside, since a graph does not depend on how an operator is tuned. So is that of
    candidates' timings on a CPU; on a GPU it is used, and to be begun anew by `fresh_timings`. Raises what compiling
    raises.
    """

    function: Product
    mode: str | None = None
    tuned: str = "mm"
    rounds: list[Round] = field(default_factory=list)
    _ready: Product | None = None

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The function's result."""
        if self._ready is not None:
            return self._ready(a, b)
        # One graph or none: a fallback to eager at a recompile limit would be measured as if it were compiled.
        compiled: Product = torch.compile(self.function, fullgraph=True, dynamic=False, mode=self.mode)
        with _without_caches(keeps_timings=a.is_cuda), _listening(self.rounds):
            result = compiled(a, b)
        self._ready = compiled
        return result

    def chosen(self) -> str | None:
        """What won the autotuning of the product; None where nothing was tuned."""
        return next((str(one) for one in self.rounds if one.name == self.tuned), None)


def forget_compiled() -> None:
    """Reset Dynamo, whose limit of recompilations else ends a sweep over exact shapes after eight of them."""
    torch.compiler.reset()


@contextlib.contextmanager
def without_torch_s_own_warnings() -> Iterator[None]:
    """Leave out what torch's compiler is warned of by other parts of torch while it is imported and tunes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        yield


@contextlib.contextmanager
def fresh_timings() -> Iterator[None]:
    """Begin Inductor's caches anew, until the end, in this process and those that it starts.

    Two modes that autotune the same product then time its candidates once. What a file of an earlier run says may have
    been timed on a busier machine, or with another driver.
    """
    from triton import knobs

    # Triton's compiled kernels depend on their source alone, and stay where they are.
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        settings.environment(TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=str(knobs.cache.dir)),
    ):
        yield


@contextlib.contextmanager
def _without_caches(*, keeps_timings: bool) -> Iterator[None]:
    """Compile anew, and quietly."""
    with without_torch_s_own_warnings():
        import torch._functorch.config as functorch_config
        import torch._inductor.config as inductor_config

        wanted = {
            "fx_graph_cache": False,
            "autotune_local_cache": keeps_timings,
            "autotune_num_choices_displayed": 0,
            "max_autotune_report_choices_stats": False,
        }
        patches = {name: value for name, value in wanted.items() if hasattr(inductor_config, name)}
        with inductor_config.patch(patches), functorch_config.patch(enable_autograd_cache=False):
            yield


@contextlib.contextmanager
def _listening(rounds: list[Round]) -> Iterator[None]:
    """Note every autotuning round until the end, beside whoever listens already."""
    from torch._inductor import select_algorithm

    # Private, and not in every release: where it is missing, what was chosen stays untold.
    find_cache = getattr(select_algorithm, "get_algorithm_selector_cache", lambda: None)
    listeners: list[Callable[..., None]] = getattr(find_cache(), "feedback_saver_fns", [])

    def listen(timings: Any, name: str, *_: object) -> None:
        if timings:
            rounds.append(Round(name, tuple((str(choice.name), float(time)) for choice, time in timings.items())))

    listeners.append(listen)
    try:
        yield
    finally:
        listeners.remove(listen)
