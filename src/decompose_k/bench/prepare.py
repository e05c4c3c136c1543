"""Call every variant of every case once, in processes side by side, before anything is timed.

Compilers take most of a study's time: a case of the seed grid with all its variants takes 23 s where nothing of it was
compiled yet, else 8 s, and is timed for 2 s (H200). What the processes leave behind are the caches of Triton's kernels
and of the compiler's generated code. Which candidate autotuning picks is not taken from them (see `compiled`): that is
measured anew, on a machine at rest, and here candidates are called once, not timed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as OutOfTime
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

import torch

from decompose_k.bench.check import call_first, make_inputs
from decompose_k.bench.compiled import forget_compiled
from decompose_k.bench.variants import variants_of

if TYPE_CHECKING:
    from decompose_k.bench.cases import Case


def prepare(
    cases: Sequence[Case],
    names: Callable[[Case], Sequence[str]],
    device: torch.device,
    jobs: int,
    *,
    seconds: float | None = None,
    announce: Callable[[str], None],
) -> int:
    """Call the variants that `names` tells for each case, in `jobs` processes; returns how many cases were called.

    Ends after `seconds` with what is begun by then. A case that raises here raises again where it is measured, and is
    told then; one that ends its process ends the preparing.
    """
    done = 0
    pool = ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_compile_alone,
        initargs=(torch.get_num_threads(),),
    )
    try:
        waiting = [pool.submit(call_case, case, tuple(names(case)), str(device)) for case in cases]
        for finished in as_completed(waiting, timeout=seconds):
            error = finished.exception()
            if isinstance(error, BrokenProcessPool):
                announce(f"a process ended while it prepared; {done} of {len(cases)} cases are")
                break
            if error is None:
                done += 1
                announce(f"prepared {done} of {len(cases)}")
    except OutOfTime:
        announce(f"no more time to prepare; {done} of {len(cases)} cases are")
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return done


def call_case(case: Case, names: tuple[str, ...], device: str) -> None:
    """Call each variant of a case once, on random operands."""
    place = torch.device(device)
    forget_compiled()
    a, b = make_inputs(case, place, torch.Generator(place).manual_seed(0))
    call_first(case, variants_of(case, place, names), a, b)


def _compile_alone(threads: int) -> None:
    """Compile in this process: the compiler's own helpers would be as many again for each.

    The number of threads is the parent's, since code for a CPU depends on it.
    """
    import torch._inductor.config as inductor_config

    torch.set_num_threads(threads)
    inductor_config.compile_threads = 1
    # These two keep what they time in files, which whoever measures would find.
    inductor_config.benchmark_epilogue_fusion = False
    inductor_config.shape_padding = False
    # Private: where a release has no such timer, candidates are timed, and the GPU is what the processes wait for.
    with contextlib.suppress(ImportError):
        from torch._inductor.runtime.benchmarking import benchmarker

        timer: Any = benchmarker
        timer.benchmark_gpu = call_once


def call_once(call: Callable[[], object], *_: object, **__: object) -> float:
    """In the place of a timer: the call, and the same time for each."""
    call()
    return 1.0
