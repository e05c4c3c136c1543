"""Operands as asked for, torch's product as one would write it, and that the judge lets no wrong result by."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import decompose_k as dk
from decompose_k import accuracy
from decompose_k.accuracy import (
    Judge,
    allowed_error,
    make_operands,
    own_product,
    relative_error,
    torch_product,
    truth,
)
from decompose_k.problem import layout_of

CPU = torch.device("cpu")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def problem_of(m=4, n=3, k=512, dtype=BF16, **rest):
    return dk.Problem.make(m, n, k, dtype, device_type="cpu", **rest)


def draw(problem, count=1):
    generator = torch.Generator().manual_seed(0)
    return [make_operands(problem, CPU, generator) for _ in range(count)]


@pytest.mark.parametrize("a_layout", ["row", "column", "strided"])
@pytest.mark.parametrize("b_layout", ["row", "column", "strided"])
def test_operands_have_the_sizes_dtypes_and_layouts_of_the_problem(a_layout, b_layout):
    problem = problem_of(5, 7, 64, BF16, b_dtype=FP32, a_layout=a_layout, b_layout=b_layout, bias_dtype=FP16)
    a, b, bias = draw(problem)[0]
    assert (a.shape, b.shape, bias.shape) == ((5, 64), (64, 7), (7,))
    assert (a.dtype, b.dtype, bias.dtype) == (BF16, FP32, FP16)
    assert (layout_of(a), layout_of(b)) == (a_layout, b_layout)
    assert a.float().std() == pytest.approx(1.0, abs=0.3)


def test_the_truth_is_summed_in_pieces_without_changing(monkeypatch):
    problem = problem_of(3, 2, 1000, FP64, activation="relu", bias_dtype=FP64)
    a, b, bias = draw(problem)[0]
    monkeypatch.setattr(accuracy, "_TRUTH_CHUNK", 7)
    expected = torch.relu(a @ b + bias)
    torch.testing.assert_close(truth(a, b, bias, activation="relu"), expected, rtol=1e-12, atol=1e-12)


def test_the_error_is_relative_and_defined_for_zero():
    ones = torch.ones(2, 2, dtype=torch.float64)
    assert relative_error(ones * 1.5, ones) == pytest.approx(0.5)
    assert relative_error(ones, ones * 0) == pytest.approx(2.0)


def test_one_rounding_is_always_allowed():
    assert allowed_error(0.0, BF16, 4096) == 2**-8
    assert allowed_error(1e-2, BF16, 4096) == 2e-2
    assert allowed_error(1e-2, BF16, 4096, 1.0) == 1e-2
    assert allowed_error(0.0, FP64, 4096) == 64 * 2**-53


PROBLEMS = {
    "bf16": (problem_of(), "torch.mm"),
    "bias": (problem_of(bias_dtype=BF16), "torch.addmm"),
    "fp32 bias": (problem_of(bias_dtype=FP32), "torch.mm + bias"),
    "activation": (problem_of(activation="relu"), "relu(torch.mm)"),
    "everything": (problem_of(bias_dtype=BF16, activation="gelu"), "gelu(torch.addmm)"),
    "fp32 result": (problem_of(out_dtype=FP32, bias_dtype=FP32), "torch.mm of fp32 copies + bias"),
    "mixed": (problem_of(b_dtype=FP32), "torch.mm of fp32 copies"),
    "fp32": (problem_of(dtype=FP32), "torch.mm"),
    "fp64": (problem_of(dtype=FP64, bias_dtype=FP64, activation="silu"), "silu(torch.addmm)"),
    "strided": (problem_of(a_layout="strided", b_layout="strided"), "torch.mm"),
    "batch-invariant": (problem_of(batch_invariant=True), "torch.mm"),
    "few": (problem_of(1, 1, 4096, FP32), "torch.mm"),
}


@pytest.mark.parametrize(("problem", "label"), PROBLEMS.values(), ids=PROBLEMS)
def test_torch_by_hand_and_ours_agree_with_the_truth(problem, label):
    input_sets = draw(problem, 8)
    said, by_hand = torch_product(problem)
    assert said == label
    result = by_hand(*input_sets[0])
    assert (result.dtype, result.shape) == (problem.out_dtype, (problem.m, problem.n))
    judge = Judge.of(problem, input_sets)
    assert judge.objection(by_hand) is None
    # Short chains of the split form round no worse than torch's long one.
    assert judge.objection(own_product(problem, dk.Config("bmm_sum", split_k=8))) is None
    assert own_product(problem)(*input_sets[0]).dtype == problem.out_dtype


def test_on_a_gpu_torch_has_a_product_of_halves_into_fp32():
    assert torch_product(dk.Problem.make(4, 4, 64, out_dtype=FP32))[0] == "torch.mm(out_dtype=fp32)"


def wrong_results(by_hand):
    def late_nan(*operands):
        result = by_hand(*operands)
        result[-1, -1] = float("nan")
        return result

    def fails(*operands):
        raise RuntimeError("out of registers\nand more")

    return {
        "off by two percent": (lambda *operands: by_hand(*operands) * 1.02, "error 2"),
        "one NaN": (late_nan, "error nan"),
        "zeros": (lambda *operands: by_hand(*operands) * 0, "error 1.0e+00"),
        "another shape": (lambda *operands: by_hand(*operands)[:1, :2], "RuntimeError"),
        "an exception": (fails, "RuntimeError: out of registers"),
    }


@pytest.mark.parametrize("name", wrong_results(None))
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_what_is_wrong_is_objected_to(name, dtype):
    problem = problem_of(dtype=dtype, k=4096)
    judge = Judge.of(problem, draw(problem, 8))
    call, reason = wrong_results(torch_product(problem)[1])[name]
    objection = judge.objection(call)
    assert objection is not None
    assert objection.startswith(reason)
    assert "\n" not in objection


def test_fp32_may_not_be_worse_than_torch_where_halves_may():
    """Sums rounded to fp32 with noise of 1.5 times torch's own error."""
    for dtype, is_right in ((FP32, False), (BF16, True)):
        problem = problem_of(16, 16, 2048, dtype)
        input_sets = draw(problem, 4)
        by_hand = torch_product(problem)[1]
        judge = Judge.of(problem, input_sets)
        own = judge.error(by_hand)

        def noisy(*operands, own=own):
            exact = truth(*operands)
            noise = torch.randn(exact.shape, dtype=FP64, generator=torch.Generator().manual_seed(1))
            return exact + 1.5 * own * noise * exact.square().mean().sqrt()

        assert judge.error(noisy) == pytest.approx(1.5 * own, rel=0.1)
        assert (judge.objection(noisy) is None) == is_right
        if dtype == FP32:
            tf32 = Judge.of(replace(problem, precision="tf32"), input_sets)
            assert tf32.objection(noisy) is None
