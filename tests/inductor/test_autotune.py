"""torch's custom-operator autotuning with our candidates: right at every size, for either boundary, on each torch."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch._inductor import lowering

import decompose_k as dk
from decompose_k.dtypes import FLOATS, dtype_name
from decompose_k.inductor import autotuning as module
from decompose_k.inductor.candidates import candidates, splits_of
from support import assert_as_good_as_torch, random


def needs_compiler(test):
    test = pytest.mark.usefixtures("empty_caches")(test)
    return pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")(test)


def matrices(m=8, n=6, k=512, dtype=torch.float32):
    return random((m, k), dtype), random((k, n), dtype, seed=1)


WRONG = {
    "boundary": ({"boundary": "bmm"}, ValueError, "boundary must be one of mm, mm_relu; got 'bmm'"),
    "dispatch": ({"dispatch": "all"}, ValueError, "dispatch must be one of exact, range; got 'all'"),
    "no points": ({"split_points": ()}, ValueError, "split_points must be integers >= 1, at least one; got ()"),
    "zero point": ({"split_points": (0, 8)}, ValueError, "split_points must be integers >= 1"),
    "point of text": ({"split_points": ("8",)}, ValueError, "split_points must be integers >= 1"),
    "points twice": ({"split_points": (8, 8)}, ValueError, "split_points must ascend"),
    "points falling": ({"split_points": (8, 1)}, ValueError, "split_points must ascend"),
    "largest_m": ({"largest_m": 512}, ValueError, "largest_m must be an integer above the last of split_points"),
    "min_speedup": ({"min_speedup": 0.5}, ValueError, "min_speedup must be a number >= 1; got 0.5"),
    "cuda_graphs": ({"cuda_graphs": 1}, TypeError, "cuda_graphs must be True or False; got 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    arguments, kind, message = WRONG[name]
    with pytest.raises(kind) as raised:
        dk.inductor.autotune(**arguments)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.ones(2, 3), torch.ones(4, 5), "b must have K = 3"),
        (torch.ones(1, 2, 3), torch.ones(3, 5), "a must have 2 dimensions"),
        (torch.ones(2, 3), torch.ones(3, 5).double(), "a must have 2 dimensions and the real floating dtype of b"),
        (torch.ones(2, 3).long(), torch.ones(3, 5).long(), "a must have 2 dimensions and the real floating dtype of b"),
    ],
    ids=["K", "batch", "mixed", "integers"],
)
def test_wrong_operands(a, b, message):
    with pytest.raises(ValueError, match=message):
        dk.inductor.autotune()(a, b)


def test_what_this_torch_cannot_do_is_said(monkeypatch):
    def register(custom_op, configs=None, config_generator=None, dispatch_on=None, split_points=None):
        raise AssertionError("not to be called")

    monkeypatch.setattr(module, "_torch_autotuning", lambda: (register, None))
    with pytest.raises(RuntimeError, match=r"^min_speedup needs torch 2\.12: .* has no min_speedup_threshold"):
        dk.inductor.autotune(min_speedup=1.25)
    with pytest.raises(RuntimeError, match=r"^cuda_graphs needs torch 2\.12: .* has no benchmark_with_cudagraphs"):
        dk.inductor.autotune(cuda_graphs=True)


def test_a_torch_without_autotuning_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.kernel.custom_op", None)
    with pytest.raises(RuntimeError, match=r"^autotune needs a part of torch that torch .* lacks: "):
        dk.inductor.autotune(largest_m=4242)


def test_settings_are_part_of_the_operators_name():
    made = [
        dk.inductor.autotune("mm"),
        dk.inductor.autotune("mm_relu"),
        dk.inductor.autotune("mm_relu", dispatch="range"),
        dk.inductor.autotune("mm_relu", dispatch="range", split_points=(1, 8)),
        dk.inductor.autotune("mm_relu", dispatch="range", largest_m=4096),
    ]
    assert len({str(tuned._ranged) for tuned in made}) == len(made)
    again = dk.inductor.autotune("mm_relu", dispatch="range")
    assert again._ranged is made[2]._ranged
    assert again._exact is dk.inductor.autotune("mm_relu")._exact


def test_torchs_own_product_is_left_alone():
    before = dict(lowering.lowerings)
    dk.inductor.autotune("mm", largest_m=2048)
    aten = torch.ops.aten
    assert lowering.lowerings[aten.mm.default] is before[aten.mm.default]
    assert aten.mm.default not in getattr(lowering, "user_lowerings", {})


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 1 << 21), st.sampled_from(FLOATS))
def test_splits_divide_k_and_leave_enough(m, n, k, dtype):
    a, b = torch.empty(m, k, dtype=dtype, device="meta"), torch.empty(k, n, dtype=dtype, device="meta")
    splits = splits_of(a, b)
    assert len(splits) <= 6
    assert sorted(set(splits)) == list(splits)
    for count in splits:
        assert count >= 2
        assert k % count == 0
        assert k // count >= 128
        assert 4 * count * m * n <= 8 << 20


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_name)
def test_every_candidate_is_right(dtype, activation):
    a, b = matrices(k=4096, dtype=dtype)
    found = candidates(a, b, activation)
    names = [candidate.__name__ for candidate in found]
    assert names[0] == "mm"
    assert "decompose_k" in names
    assert any(name.startswith("split_") for name in names)
    # torch groups the winners of several ranges by this name.
    assert len(set(names)) == len(names)
    for candidate in found:
        assert_as_good_as_torch(candidate(a, b), a, b, activation=activation)


@pytest.mark.parametrize("shape", [(3, 5, 8191), (3, 5, 100), (0, 5, 512), (3, 0, 512), (3, 5, 0)], ids=str)
def test_where_nothing_divides_there_are_candidates_still(shape):
    m, n, k = shape
    a, b = matrices(m, n, k)
    found = candidates(a, b, "relu")
    assert [candidate.__name__ for candidate in found][:1] == ["mm"]
    for candidate in found:
        torch.testing.assert_close(candidate(a, b), torch.relu(a @ b))


@pytest.mark.parametrize("boundary", ["mm", "mm_relu"])
def test_the_operator_is_a_good_citizen(boundary):
    tuned = dk.inductor.autotune(boundary)
    a, b = (tensor.double().requires_grad_() for tensor in matrices(k=9))
    results = torch.library.opcheck(tuned._exact, (a, b))
    assert set(results.values()) == {"SUCCESS"}
    assert torch.autograd.gradcheck(tuned, (a, b))
    assert torch.autograd.gradgradcheck(tuned, (a, b))
    batch = random((3, 4, 9), torch.float64)
    expected = torch.stack([tuned(one, b) for one in batch])
    torch.testing.assert_close(torch.func.vmap(lambda one: tuned(one, b))(batch), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tuned(*matrices()).dtype == torch.bfloat16


def by_torch(boundary, a, b):
    return torch.relu(a @ b) if boundary == "mm_relu" else a @ b


@needs_compiler
@pytest.mark.parametrize(
    ("boundary", "dtype", "k"),
    [("mm", torch.bfloat16, 512), ("mm_relu", torch.float32, 512), ("mm_relu", torch.bfloat16, 1021)],
    ids=["mm bf16", "mm_relu fp32", "mm_relu bf16, K prime"],
)
def test_exact_dispatch(boundary, dtype, k):
    tuned = dk.inductor.autotune(boundary)
    a, b = matrices(k=k, dtype=dtype)
    result = torch.compile(lambda a, b: tuned(a, b) + 1, fullgraph=True)(a, b)
    tolerance = {"rtol": 0.02, "atol": 0.2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(result, by_torch(boundary, a, b) + 1, **tolerance)


@needs_compiler
def test_range_dispatch_serves_every_m_with_one_graph():
    tuned = dk.inductor.autotune("mm_relu", dispatch="range", split_points=(1, 8, 32), largest_m=64)
    compiled = torch.compile(lambda a, b: tuned(a, b), fullgraph=True)
    graphs = []
    for m in (16, 2, 8, 9, 32, 33, 64, 65, 300):
        a, b = matrices(m=m)
        if m == 16:
            torch._dynamo.mark_dynamic(a, 0)
        torch.testing.assert_close(compiled(a, b), torch.relu(a @ b), rtol=1e-4, atol=1e-4)
        graphs.append(counters["stats"]["unique_graphs"])
    assert len(set(graphs)) == 1
    # One row and none are sizes that the compiler never leaves open.
    for m in (1, 0):
        a, b = matrices(m=m)
        torch.testing.assert_close(compiled(a, b), torch.relu(a @ b), rtol=1e-4, atol=1e-4)


@needs_compiler
def test_range_dispatch_of_other_dynamic_sizes_is_exact():
    tuned = dk.inductor.autotune("mm_relu", dispatch="range", split_points=(1, 8), largest_m=64)
    compiled = torch.compile(lambda a, b: tuned(a, b), fullgraph=True, dynamic=True)
    for m, n, k in ((4, 6, 512), (5, 7, 640)):
        a, b = matrices(m, n, k)
        torch.testing.assert_close(compiled(a, b), torch.relu(a @ b), rtol=1e-4, atol=1e-4)


@needs_compiler
def test_plain_models_reach_either_boundary(monkeypatch):
    seen = []

    def spy(a, b, activation):
        seen.append((tuple(a.shape), activation))
        return candidates(a, b, activation)[:2]

    monkeypatch.setattr(module, "candidates", spy)

    def model(x, w):
        hidden = torch.relu(x @ w)
        # Operands that are views, and one that is still to be computed.
        return torch.sigmoid(x @ w.flip(1)), hidden, hidden.t() @ hidden, torch.relu(w.t() @ x.t())

    a, b = matrices()
    for boundary, expected in (("mm", [None] * 3), ("mm_relu", ["relu"] * 2)):
        seen.clear()
        torch.compiler.reset()
        # Settings that no other test uses, since an operator is registered once in a process.
        with dk.inductor.autotune(boundary, largest_m=7777) as installed:
            results = torch.compile(model, fullgraph=True)(a, b)
        for ours, own in zip(results, model(a, b), strict=True):
            torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-3)
        assert [activation for _, activation in seen] == expected
        left = {decision.reason for decision in installed.report().left}
        assert "K is less than 8 times M or N" in left
        assert len(installed.report().rewritten) == len(expected)
        if boundary == "mm_relu":
            assert "no relu follows alone" in left
    assert torch._inductor.config.joint_custom_pre_pass is None


@needs_compiler
def test_both_passes_share_the_slot():
    a, b = matrices()
    tuned = dk.inductor.autotune("mm_relu")

    def model(a, b):
        return torch.relu(a @ b) + torch.tanh(a.sin() @ b)

    with tuned as installed, dk.inductor.enable("everywhere") as enabled:
        result = torch.compile(model, fullgraph=True)(a, b)
        torch.testing.assert_close(result, model(a, b), rtol=1e-4, atol=1e-3)
        assert [decision.fused for decision in installed.report().rewritten] == [("relu",)]
        assert [decision.fused for decision in enabled.report().rewritten] == [("tanh",)]
    assert torch._inductor.config.joint_custom_pre_pass is None
