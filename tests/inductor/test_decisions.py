"""Where M is dynamic, the pass asks `plan` about every M the graph may see, and adds no guard in doing so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import decompose_k as dk
from decompose_k.inductor import decide
from decompose_k.inductor.sizes import bounds_of, buckets_of, describe_shape, hint_of, is_same
from rewriting import Rewriter
from support import random


@pytest.fixture
def winning_up_to(monkeypatch):
    """Lets the plan choose Decompose-K for M up to a number; returns the problems it was asked about."""

    def install(most):
        asked = []

        def plan(problem, device):
            asked.append(problem)
            config = dk.Config("bmm_sum", split_k=2) if problem.m <= most else dk.Config("mm")
            return SimpleNamespace(config=config, reason=f"M = {problem.m} was asked")

        monkeypatch.setattr(decide, "plan", plan)
        return asked

    return install


def run(model, m, *, dynamic=None, low=None, high=None, dtype=torch.bfloat16):
    x, w = random((m, 64), dtype), random((5, 64), dtype, seed=1)
    if low is not None:
        torch._dynamo.mark_dynamic(x, 0, min=low, max=high)
    rewriter = Rewriter("wins")
    compiled = rewriter.compile(model, dynamic=dynamic)
    compiled(x, w)
    return rewriter, compiled, w


def relu(x, w):
    return torch.relu(F.linear(x, w))


def silu(x, w):
    return F.silu(F.linear(x, w))


def test_one_m_is_asked_about_once(winning_up_to):
    asked = winning_up_to(64)
    rewriter, *_ = run(silu, 7)
    assert {problem.m for problem in asked} == {7}
    assert (asked[0].activation, asked[0].n, asked[0].k) == ("silu", 5, 64)
    assert (asked[0].a_layout, asked[0].b_layout) == ("row", "column")
    (decision,) = rewriter.rewritten
    assert (decision.reason, decision.fused) == ("M = 7 was asked", ("silu",))


def test_the_m_being_compiled_for_decides_first(winning_up_to):
    asked = winning_up_to(64)
    rewriter, *_ = run(silu, 7, dynamic=True)
    assert {problem.m for problem in asked} == {7}
    assert rewriter.rewritten[0].fused == ("silu",)


def test_a_smaller_m_counts_with_what_torch_takes_along(winning_up_to):
    winning_up_to(64)
    rewriter, *_ = run(relu, 300, dynamic=True)
    (decision,) = rewriter.rewritten
    assert decision.fused == ("relu",)
    assert decision.reason == "M is dynamic, and Decompose-K is expected to win for M up to 64"


def test_a_smaller_m_leaves_the_rest_of_the_tail_to_the_compiler(winning_up_to):
    winning_up_to(64)
    rewriter, *_ = run(silu, 300, dynamic=True)
    (decision,) = rewriter.rewritten
    assert decision.fused == ()


def test_a_bounded_m_that_wins_everywhere_takes_the_whole_tail(winning_up_to):
    asked = winning_up_to(512)
    rewriter, *_ = run(silu, 300, low=2, high=512)
    assert rewriter.rewritten[0].fused == ("silu",)
    assert max(problem.m for problem in asked) <= 512


def test_no_m_in_the_range_wins(winning_up_to):
    asked = winning_up_to(64)
    rewriter, *_ = run(relu, 300, low=257, high=1024)
    assert rewriter.rewritten == []
    assert rewriter.left[0].reason == "M = 300 was asked"
    assert {problem.m for problem in asked} == {300, 512, 1024}


def test_asking_adds_no_guard(winning_up_to):
    winning_up_to(64)
    rewriter, compiled, w = run(silu, 300, dynamic=True)
    for m in (2, 7, 63, 64, 65, 511, 1000):
        x = random((m, 64), torch.bfloat16)
        torch.testing.assert_close(compiled(x, w), silu(x, w), rtol=0.02, atol=0.02)
    assert rewriter.frames == 1


def test_an_impossible_backend_is_a_reason(monkeypatch):
    monkeypatch.setenv("DECOMPOSE_K_BACKEND", "triton")
    rewriter, *_ = run(relu, 7)
    assert rewriter.rewritten == []
    assert rewriter.left[0].reason.startswith("backend must be auto or torch on cpu")


def symbol(value):
    environment = ShapeEnv()
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    mode = torch._subclasses.FakeTensorMode(shape_env=environment)
    return mode.from_tensor(torch.ones(value), symbolic_context=context).shape[0], environment


def test_what_is_known_of_a_size():
    size, environment = symbol(7)
    guards = len(environment.guards)
    assert hint_of(size) == 7
    assert bounds_of(size) == (2, 1 << 15)
    assert buckets_of(size)[:3] == (2, 4, 8)
    assert is_same(size, size)
    assert not is_same(size, 7)
    assert not is_same(size, size + 1)
    assert describe_shape((size, 3)) == f"[{size.node.expr}, 3]"
    assert bounds_of(4 * size) == (8, 1 << 15)
    assert hint_of(4 * size) == 28
    assert len(environment.guards) == guards


def test_what_is_known_of_a_size_that_depends_on_data():
    size = ShapeEnv().create_unbacked_symint()
    torch._check(size >= 0)
    torch._check(size <= 100)
    assert hint_of(size) is None
    assert bounds_of(size) == (0, 100)
    assert buckets_of(size) == (1, 2, 4, 8, 16, 32, 64, 128)


def test_m_that_depends_on_data(winning_up_to):
    winning_up_to(512)

    def model(x, w, keep):
        return relu(x[keep], w)

    x, w = random((9, 64), torch.bfloat16), random((5, 64), torch.bfloat16, seed=1)
    keep = torch.arange(9) % 2 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        rewriter = Rewriter("wins")
        result = rewriter.compile(model)(x, w, keep)
    torch.testing.assert_close(result, model(x, w, keep), rtol=0.02, atol=0.02)
    assert rewriter.rewritten[0].fused == ("relu",)
