"""The corpus: what is in it, and what is refused."""

from __future__ import annotations

import pytest
import torch

from decompose_k.shapes import SUITES, corpus, parse_size, suite


def test_the_seed_suite_is_the_study_s_grid_and_inductor_s_own_benchmark():
    grid = [shape for shape in suite("seed") if shape.status == "definition"]
    assert {(shape.m, shape.k) for shape in grid} == {
        (m, k) for m in (16, 32, 48, 64) for k in (8192, 12288, 16384, 20480, 24576, 28672, 32768)
    }
    assert all(shape.m == shape.n and shape.a_dtype == torch.bfloat16 for shape in grid)
    assert [(shape.k, shape.a_dtype) for shape in suite("seed") if shape not in grid] == [(4096, torch.float16)]


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_has_shapes_of_its_own(name):
    assert suite(name)
    assert {shape.suite for shape in suite(name)} == {name}


def test_all_is_every_suite_together():
    assert set(suite("all")) == {shape for name in SUITES for shape in suite(name)} == set(corpus())
    assert len(set(corpus())) == len(corpus())


def test_a_row_of_the_file_is_one_shape_for_each_m():
    rows = [shape.m for shape in suite("router") if shape.name == "DeepSeek-V3/R1/V3.2"]
    assert rows == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_unverified_shapes_are_kept_and_marked():
    unverified = {shape.name for shape in corpus() if not shape.is_verified}
    assert "OLMoE" in unverified
    assert "Kimi-K2" not in unverified


def test_a_linear_weight_is_a_column_layout_and_static():
    shape = next(shape for shape in suite("mhc") if shape.m == 16)
    problem = shape.problem("cuda", activation="silu", static_b=shape.has_static_weight)
    assert (problem.a_layout, problem.b_layout, problem.b_dtype) == ("row", "column", torch.float32)
    assert problem.static_b
    assert problem.activation == "silu"


@pytest.mark.parametrize("shape", [suite(name)[0] for name in ("seed", "gram", "wgrad")], ids=lambda shape: shape.suite)
def test_only_inference_weights_are_static(shape):
    assert not shape.has_static_weight


def test_every_shape_is_a_valid_problem_on_both_devices():
    for shape in corpus():
        for device_type in ("cpu", "cuda"):
            problem = shape.problem(device_type)
            assert (problem.m, problem.n, problem.k) == (shape.m, shape.n, shape.k)


def test_an_unknown_suite_is_refused_with_the_names_that_are_allowed():
    with pytest.raises(ValueError, match=r"suite must be one of seed, router, .*all; got 'seeds'"):
        suite("seeds")


@pytest.mark.parametrize(
    "text", ["", "16", "16x16", "16x16x", "-1x16x16", "16x16x8192x2", "1.5x2x3", "axbxc", "16*16*4"]
)
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="MxNxK"):
        parse_size(text)


@pytest.mark.parametrize("text", ["16x256x7168", " 16X256X7168 "])
def test_a_size_is_read(text):
    assert parse_size(text) == (16, 256, 7168)
