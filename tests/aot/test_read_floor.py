"""The read floor compiles for every target and grid without spilling what it reads, and waits where it says so."""

from __future__ import annotations

import pytest

from targets import TARGETS

# The smallest and the largest operand of the seed grid, and one beyond what programs hold at once.
WORDS = (65536, 1048576, 1 << 24)
CASES = [
    (name, words, share, warps, launch)
    for name, target in TARGETS.items()
    for words in WORDS
    for share, warps in ((0.5, 8), (1, 4), (4, 4))
    for launch in (("plain", "wait_first", "static_b") if target.device.has_dependent_launch else ("plain",))
]


@pytest.fixture(scope="module")
def answers(compile_pool):
    return {
        case: compile_pool.submit(
            case[0],
            "launches:read_floor",
            words=case[1],
            programs=round(case[2] * TARGETS[case[0]].device.multiprocessors),
            num_warps=case[3],
            launch=case[4],
        )
        for case in CASES
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_compiles_within_the_limits(answers, case):
    answer = answers[case].result()
    assert "error" not in answer, answer["error"]
    (kernel,) = answer["kernels"]
    assert kernel["spills"] == 0, str(kernel)
    assert kernel["grid_fits"]
    assert kernel["waits"] == (case[4] != "plain")
