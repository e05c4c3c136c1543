"""The suites of the study: what is in them, and what is measured in each."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from decompose_k.bench.cases import with_rows
from decompose_k.bench.suites import (
    CORPUS,
    CROSSOVER,
    DESCRIPTIONS,
    DTYPES,
    EVERY_SUITE,
    GRIDS,
    STUDY_ROWS,
    STUDY_SUITES,
    SUITE_NAMES,
    part_of,
    spread,
    suite_cases,
    variants_for,
)
from decompose_k.bench.variant import AUTO, BASELINES, FLOORS, OURS, TORCH, VARIANTS

DEPTHS = (8192, 12288, 16384, 20480, 24576, 28672, 32768)


@pytest.mark.parametrize("name", EVERY_SUITE)
def test_every_suite_has_cases_of_its_own(name):
    cases = suite_cases([name])
    assert {case.shape.suite for case in cases} == {name}
    assert len(set(cases)) == len(cases)


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_is_the_seed_grid_in_its_dtype(name):
    cases = suite_cases([name])
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name.rpartition("-")[2]]
    assert {(case.shape.m, case.shape.n, case.shape.k) for case in cases} == {
        (size, size, k) for size in (16, 32, 48, 64) for k in DEPTHS
    }
    assert len(cases) == 28
    for case in cases:
        assert case.shape.a_dtype == case.shape.b_dtype == case.shape.out_dtype == dtype
        assert case.activation == ("relu" if name.startswith("epilogue") else None)
        assert case.static_weight


def test_the_study_has_every_suite_and_real_shapes_from_one_row_to_a_thousand():
    cases = suite_cases(["study"])
    assert tuple(dict.fromkeys(case.shape.suite for case in cases)) == STUDY_SUITES
    for name in CORPUS:
        rows = {case.shape.m for case in cases if case.shape.suite == name}
        assert rows == set(STUDY_ROWS) or name == "gram"


def test_the_crossover_sweeps_all_three_sizes():
    sizes = [(case.shape.m, case.shape.n, case.shape.k) for case in suite_cases([CROSSOVER])]
    rows, columns, depths = (set(values) for values in zip(*sizes, strict=True))
    assert min(len(rows), len(columns), len(depths)) >= 4
    assert len(sizes) == len(rows) * len(columns) * len(depths)


def test_the_dtypes_are_every_kind_of_pair():
    kinds = {(case.shape.a_dtype, case.shape.b_dtype) for case in suite_cases([DTYPES])}
    assert {torch.bfloat16, torch.float16, torch.float32, torch.float64} == {a for a, _ in kinds}
    assert any(a != b for a, b in kinds)


@pytest.mark.parametrize("name", EVERY_SUITE)
def test_every_suite_is_measured_against_torch_and_with_what_a_caller_gets(name):
    names = variants_for(name)
    assert names[0] == TORCH
    assert AUTO in names
    assert set(names) <= set(VARIANTS)


def test_the_grids_are_measured_with_everything():
    assert set(variants_for("epilogue-bf16")) == {*BASELINES, *OURS, *FLOORS}


@pytest.mark.parametrize("count", [1, 2, 3, 28, 150, 217])
def test_the_beginning_of_a_spread_is_a_sample_of_all(count):
    order = spread(range(count))
    assert sorted(order) == list(range(count))
    if count > 20:
        start = sorted(order[: count // 4])
        assert max(after - before for before, after in itertools.pairwise([0, *start, count])) <= 12


def test_the_study_has_each_product_of_a_suite_once():
    cases = suite_cases(["study"])
    products = [(case.shape.suite, case.problem("cpu"), case.static_weight) for case in cases]
    assert len(set(products)) == len(products)
    everything = {case.problem("cpu") for case in with_rows(suite_cases(["router"]), STUDY_ROWS)}
    assert {case.problem("cpu") for case in cases if case.shape.suite == "router"} == everything


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_parts_are_the_whole_and_share_every_suite(count):
    cases = suite_cases(["study"])
    parts = [part_of(cases, index, count) for index in range(1, count + 1)]
    assert sorted(itertools.chain(*parts), key=cases.index) == list(cases)
    for part in parts:
        assert list(part) == sorted(part, key=cases.index)
    sizes = [Counter(case.shape.suite for case in part) for part in parts]
    assert all(max(size[suite] for size in sizes) - min(size[suite] for size in sizes) <= 1 for suite in sizes[0])


def test_a_tenth_of_the_study_has_some_of_every_suite():
    cases = suite_cases(["study"])
    assert {case.shape.suite for case in cases[: len(cases) // 10]} == set(STUDY_SUITES)


def test_every_suite_is_described_to_readers():
    assert set(DESCRIPTIONS) == set(EVERY_SUITE)


def test_an_unknown_suite_is_refused_with_the_names_that_are_allowed():
    with pytest.raises(ValueError, match=r"suite must be one of seed, .*epilogue-bf16.*study, all; got 'seeds'"):
        suite_cases(["seeds"])
    assert len(set(SUITE_NAMES)) == len(SUITE_NAMES)
