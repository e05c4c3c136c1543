"""Every kernel that the heuristics would launch compiles for every target, within its limits and without spills."""

from __future__ import annotations

import pytest

from decompose_k.config import LAUNCHES, TRITON_KERNELS
from decompose_k.legality import shared_bytes
from shipped import shipped, untested_activations
from targets import TARGETS

SHIPPED = shipped()
# The assembler may trade registers that are there for one more program a multiprocessor, by keeping a word or a few on
# the stack. Which tile it does that to differs between its releases; with all registers allowed it never does.
FEW_WORDS = 16
# Beside the tiles, for the barriers of asynchronous instructions.
BARRIER_BYTES = 64


@pytest.fixture(scope="module")
def answers(compile_pool):
    """All of the launches, submitted at once: the tests wait, each for its own."""
    return {launch: compile_pool.submit(launch.target, "launches:engine", **launch.arguments) for launch in SHIPPED}


@pytest.mark.parametrize("launch", SHIPPED, ids=str)
def test_compiles_within_the_limits(answers, launch):
    answer = answers[launch].result()
    assert "error" not in answer, answer["error"]
    assert len(answer["kernels"]) == (1 if launch.config.kernel == "dot" else 2)
    # The compiler must not see that the loop which asks for it never runs.
    reserve = launch.config.reserve_kib << 10
    if reserve:
        own = shared_bytes(launch.config, launch.problem) + BARRIER_BYTES
        assert reserve <= answer["kernels"][0]["shared"] <= max(reserve, own)
    for kernel in answer["kernels"]:
        assert kernel["spills"] == 0, f"{launch.config} does not fit into the registers: {kernel}"
        assert kernel["stack"] <= FEW_WORDS or launch.rank != "first", f"the default {launch.config}: {kernel}"
        assert kernel["shared"] <= TARGETS[launch.target].shared_limit, f"{launch.config} takes too much: {kernel}"
        assert kernel["grid_fits"], str(kernel)
        assert kernel["waits"] == (launch.config.launch != "plain"), str(kernel)


@pytest.mark.parametrize("target", TARGETS)
def test_the_spread_is_wide_enough(target):
    mine = [launch for launch in SHIPPED if launch.target == target]
    assert {launch.config.kernel for launch in mine} == set(TRITON_KERNELS)
    assert {launch.config.reducer for launch in mine} == {"flat", "tile"}
    if TARGETS[target].device.has_dependent_launch:
        assert {launch.config.launch for launch in mine} == set(LAUNCHES) - {"plain"}
        assert len({launch.config.reserve_kib for launch in mine}) >= 3
    assert not untested_activations()
