"""Call every variant of every case once, in processes side by side, before anything is timed.

Compilers take most of a study's time: a case of the seed grid with all its variants compiles for a minute and is timed
for seconds. What the processes leave behind are the caches of Triton's kernels and of the compiler's generated code.
Which candidate its autotuning picks is not among them: that is measured anew, on a machine at rest.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as OutOfTime
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

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

    Ends after `seconds` with what is begun by then. What fails here fails again where it is measured, and is told then.
    """
    done = 0
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_be_modest)
    try:
        waiting = [pool.submit(call_case, case, tuple(names(case)), str(device)) for case in cases]
        for finished in as_completed(waiting, timeout=seconds):
            with contextlib.suppress(Exception):
                finished.result()
                done += 1
                announce(f"prepared {done} of {len(cases)}")
    except (OutOfTime, BrokenProcessPool):
        pass
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return done


def call_case(case: Case, names: tuple[str, ...], device: str) -> None:
    """Call each variant of a case once, on random operands."""
    place = torch.device(device)
    forget_compiled()
    a, b = make_inputs(case, place, torch.Generator(place).manual_seed(0))
    call_first(case, variants_of(case, place, names), a, b)


def _be_modest() -> None:
    """One core for each process: the compiler's own helpers would be as many again for each."""
    import torch._inductor.config as inductor_config

    torch.set_num_threads(1)
    inductor_config.compile_threads = 1
