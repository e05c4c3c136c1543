"""The study's variants on a GPU: all of them run, are right and are timed; what reads reads everything."""

from __future__ import annotations

import pytest
import torch

from decompose_k.bench.check import call_first, check, make_inputs
from decompose_k.bench.compiled import forget_compiled
from decompose_k.bench.machine import Ceilings, Machine
from decompose_k.bench.measure import Bench
from decompose_k.bench.suites import suite_cases
from decompose_k.bench.variant import COMPILED_MAX, COMPILED_MAX_NO_GRAPHS, CUSTOM_OP_FUSED, FLOORS, VARIANTS
from decompose_k.bench.variants import variants_of

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SEED = suite_cases(["epilogue-bf16"])[0]
ROUTER = next(case for case in suite_cases(["router"]) if case.shape.m == 16)


@pytest.mark.parametrize("case", [SEED, ROUTER], ids=["seed", "router"])
def test_every_variant_runs_and_is_right(case):
    forget_compiled()
    a, b = make_inputs(case, CUDA, torch.Generator(CUDA).manual_seed(0))
    working, broken = call_first(case, variants_of(case, CUDA, VARIANTS), a, b)
    assert [str(one) for one in broken] == []
    assert [str(checked) for checked in check(case, working, [(a, b)]) if not checked.passed] == []
    for variant in working:
        if variant.is_floor:
            assert all(variant.error(option(a, b), a, b) == 0.0 for option in variant.options.values())


def test_every_column_is_measured():
    ceilings = Ceilings(4e12, {torch.bfloat16: 8e14})
    names = ("torch", COMPILED_MAX, COMPILED_MAX_NO_GRAPHS, CUSTOM_OP_FUSED, "auto", *FLOORS)
    bench = Bench(CUDA, Machine.of(CUDA), ceilings, repetitions=3, seconds=5.0, variants=names)
    rows = {row.variant: row for row in bench.measure(SEED).rows}
    assert set(names) - set(rows) <= {"floor-wait-first", "floor-static"}
    assert rows[COMPILED_MAX].timing == "stream-cold"
    assert rows["auto"].timing == "graph-cold"
    for column in ("warm_us", "weight_cold_us", "event_us", "host_us"):
        assert getattr(rows["auto"], column) > 0
    assert rows["auto"].noise is not None
    assert rows["floor-plain"].chosen
    assert "decompose-K" in rows[COMPILED_MAX_NO_GRAPHS].chosen
