"""The suites of the study: the seed grid in its dtypes, real shapes from the corpus, dtypes, and the crossover."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from decompose_k.bench.cases import Case, corpus_cases, custom_case, with_dtype, with_rows
from decompose_k.bench.variant import (
    AUTO,
    BASELINES,
    COMPILED,
    COMPILED_MAX_NO_GRAPHS,
    CUSTOM_OP,
    DEFAULT_VARIANTS,
    FLOORS,
    GENERATION_3,
    OURS,
    SPLIT,
    STATIC,
    TORCH,
    TORCH_CAST,
)
from decompose_k.shapes import ALL, SUITES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from decompose_k.shapes import Shape

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

STUDY = "study"
DTYPES = "dtypes"
CROSSOVER = "crossover"
# (dtype, activation) of the seed grid.
GRIDS: dict[str, tuple[torch.dtype, str | None]] = {
    "epilogue-bf16": (BF16, "relu"),
    "matmul-bf16": (BF16, None),
    "matmul-fp16": (FP16, None),
    "matmul-fp32": (FP32, None),
}
CORPUS = ("router", "lora", "mhc", "gate", "indexer", "gram")
STUDY_SUITES = (*GRIDS, *CORPUS, DTYPES, CROSSOVER)
# From one token to a prefill, in fewer steps than the corpus has.
STUDY_ROWS = (1, 4, 16, 64, 256, 1024)

EVERY_SUITE = (*SUITES, *GRIDS, DTYPES, CROSSOVER)
SUITE_NAMES = (*EVERY_SUITE, STUDY, ALL)

# For readers of a report who never saw these names.
DESCRIPTIONS = {
    "seed": "M = N in 16 to 64 and K in 8192 to 32768, with relu: the grid of the published study in bf16",
    "epilogue-bf16": "the published study's grid, M = N in 16 to 64 and K in 8192 to 32768, with relu",
    "matmul-bf16": "the same grid without relu",
    "matmul-fp16": "the same grid without relu",
    "matmul-fp32": "the same grid without relu, in full fp32",
    "router": "scores of the experts of a mixture-of-experts layer: M tokens, N experts, K the hidden size",
    "lora": "the shrinking half of a LoRA adapter: N its rank, K the width of the layer",
    "mhc": "projections of manifold-constrained hyper-connections: N = 24, K several hidden sizes",
    "gate": "the gate of a shared expert: N = 1",
    "indexer": "weights of a sparse attention's indexer",
    "head": "heads of reward models and rerankers: N = 1 or 2",
    "wgrad": "the gradient of a router's weight",
    "gram": "X^T X, a covariance: M = N columns, K rows of data in the millions",
    DTYPES: "three sizes in every kind of operand and result dtypes",
    CROSSOVER: "M, N and K swept, to find where Decompose-K stops to pay",
}

_GRID_VARIANTS = (*BASELINES, *OURS, *FLOORS)
_REAL_VARIANTS = (TORCH, TORCH_CAST, COMPILED, COMPILED_MAX_NO_GRAPHS, CUSTOM_OP, AUTO, STATIC, SPLIT, *FLOORS)
_DTYPE_VARIANTS = (TORCH, TORCH_CAST, COMPILED_MAX_NO_GRAPHS, AUTO, GENERATION_3, SPLIT)
_CROSSOVER_VARIANTS = (TORCH, TORCH_CAST, AUTO, GENERATION_3, SPLIT)

_DTYPE_SIZES = ((16, 16, 16384, "NN"), (64, 64, 16384, "NN"), (16, 256, 7168, "NT"))
_DTYPE_KINDS = (
    (BF16, BF16, BF16),
    (BF16, BF16, FP32),
    (FP16, FP16, FP16),
    (FP16, FP16, FP32),
    (BF16, FP32, FP32),
    (FP32, BF16, FP32),
    (FP32, FP32, FP32),
    (FP32, FP32, BF16),
    (FP64, FP64, FP64),
)
_CROSSOVER_ROWS = (1, 16, 64, 256, 1024)
_CROSSOVER_COLUMNS = (16, 64, 256, 1024)
_CROSSOVER_DEPTHS = (512, 1024, 2048, 4096, 16384, 65536)


def suite_cases(names: Iterable[str]) -> tuple[Case, ...]:
    """Every case of the named suites; raises ValueError for an unknown one.

    `study` is every suite of the study, its real shapes at the study's values of M; `all` is the whole corpus.
    """
    return tuple(dict.fromkeys(case for name in names for case in _cases_of(name)))


def study_cases() -> tuple[Case, ...]:
    """Every case of the study, in the order in which a budget should be spent: a bit of each suite, then more.

    Models that ask for the same product are one case, by the name of the first.
    """
    parts: list[tuple[Case, ...]] = [grid_cases(name) for name in GRIDS]
    for name in CORPUS:
        cases = corpus_cases([name])
        parts.append(_distinct(with_rows(cases, STUDY_ROWS) if cases[0].shape.has_static_weight else cases))
    turns = itertools.zip_longest(*map(spread, [*parts, dtype_cases(), crossover_cases()]))
    return tuple(case for turn in turns for case in turn if case is not None)


def _distinct(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Of the cases of one suite with the same sizes, dtypes and layouts the first."""
    found: dict[Shape, Case] = {}
    for case in cases:
        found.setdefault(replace(case.shape, name="", status=""), case)
    return tuple(found.values())


def part_of(cases: Sequence[Case], index: int, count: int) -> tuple[Case, ...]:
    """The `index`-th of `count` parts, from 1 to `count`, in the order that they had: every suite is shared out evenly.

    >>> [part_of(dtype_cases()[:5], index, 2) == dtype_cases()[:5][index - 1 :: 2] for index in (1, 2)]
    [True, True]
    """
    seen: Counter[str] = Counter()
    found = []
    for case in cases:
        if seen[case.shape.suite] % count == index - 1:
            found.append(case)
        seen[case.shape.suite] += 1
    return tuple(found)


def spread(cases: Sequence[Case]) -> tuple[Case, ...]:
    """The same cases in an order whose beginning is a sample of them all: steps of about 0.62 of their number.

    >>> spread(range(8))
    (0, 5, 2, 7, 4, 1, 6, 3)
    """
    count = len(cases)
    step = next((step for step in range(max(1, round(0.618 * count)), count) if math.gcd(step, count) == 1), 1)
    return tuple(cases[place * step % count] for place in range(count))


def grid_cases(name: str) -> tuple[Case, ...]:
    """The seed grid in the dtype and with the epilogue of a suite; its b is measured as a static weight as well."""
    dtype, activation = GRIDS[name]
    seed = (case for case in corpus_cases(["seed"]) if case.shape.status == "definition")
    return tuple(
        Case(replace(with_dtype(case, dtype).shape, suite=name), activation, static_weight=True) for case in seed
    )


def dtype_cases() -> tuple[Case, ...]:
    """Three sizes in every kind of operand and result dtypes that people use."""
    return tuple(
        custom_case((m, n, k), a, b_dtype=b, out_dtype=out, layout=layout, suite_name=DTYPES)
        for m, n, k, layout in _DTYPE_SIZES
        for a, b, out in _DTYPE_KINDS
    )


def crossover_cases() -> tuple[Case, ...]:
    """M, N and K swept, from where cutting K pays to where it does not: nn.Linear weights in bf16."""
    sizes = itertools.product(_CROSSOVER_ROWS, _CROSSOVER_COLUMNS, _CROSSOVER_DEPTHS)
    return tuple(custom_case(size, BF16, layout="NT", suite_name=CROSSOVER) for size in sizes)


def variants_for(suite: str) -> tuple[str, ...]:
    """What is measured in a suite where nothing is asked for: as much as the suite is there to show."""
    if suite in GRIDS:
        return _GRID_VARIANTS
    if suite in CORPUS:
        return _REAL_VARIANTS
    return {DTYPES: _DTYPE_VARIANTS, CROSSOVER: _CROSSOVER_VARIANTS}.get(suite, DEFAULT_VARIANTS)


_MAKERS: dict[str, Callable[[], Sequence[Case]]] = {
    STUDY: study_cases,
    DTYPES: dtype_cases,
    CROSSOVER: crossover_cases,
}


def _cases_of(name: str) -> Sequence[Case]:
    if name in _MAKERS:
        return _MAKERS[name]()
    if name in GRIDS:
        return grid_cases(name)
    if name not in SUITE_NAMES:
        raise ValueError(f"suite must be one of {', '.join(SUITE_NAMES)}; got {name!r}")
    return corpus_cases([name])
