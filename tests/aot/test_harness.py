"""The compile harness finds the faults that it is there to find."""

from __future__ import annotations

import pytest

from targets import TARGETS

every_target = pytest.mark.parametrize("target", TARGETS)


@every_target
def test_a_small_kernel_is_measured(compile_pool, target):
    (kernel,) = compile_pool.submit(target, "toy:launch_sum").result()["kernels"]
    assert kernel["name"] == "sum_kernel"
    assert kernel["grid"] == [1, 1]
    assert kernel["grid_fits"]
    assert 0 < kernel["registers"] < 256
    assert kernel["stack"] == kernel["spills"] == 0
    assert 0 < kernel["shared"] <= 1024


@every_target
def test_spills_are_found(compile_pool, target):
    (kernel,) = compile_pool.submit(target, "toy:launch_spilling").result()["kernels"]
    assert kernel["stack"] > 0
    assert kernel["spills"] > 0


def test_a_grid_past_the_limit_is_found(compile_pool):
    (kernel,) = compile_pool.submit("sm_90", "toy:launch_sum", grid=65536).result()["kernels"]
    assert not kernel["grid_fits"]


def test_a_compile_error_is_reported(compile_pool):
    assert "no_such_option" in compile_pool.submit("sm_90", "toy:launch_unknown_option").result()["error"]


def test_a_dying_compiler_fails_its_own_request_alone(compile_pool):
    futures = [compile_pool.submit("sm_90", f"toy:{name}") for name in ("launch_sum", "abort", "launch_sum")]
    answers = [future.result() for future in futures]
    assert ["kernels" in answer for answer in answers] == [True, False, True]
    assert "died" in answers[1]["error"]
