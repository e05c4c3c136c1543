"""Compiling ahead: which M are run, and what is refused."""

from __future__ import annotations

import pytest
import torch

import decompose_k as dk
from decompose_k import warm

PROBLEM = dk.Problem.make(3, 24, 512, torch.bfloat16, device_type="cpu")


@pytest.fixture
def ran(monkeypatch):
    """The shapes that were computed."""
    shapes = []
    own_product = warm.own_product

    def spied(problem):
        call = own_product(problem)

        def run(*operands):
            result = call(*operands)
            shapes.append((tuple(operands[0].shape), result.shape[1], len(operands), result.dtype))
            return result

        return run

    monkeypatch.setattr(warm, "own_product", spied)
    return shapes


def test_each_bucket_is_run_once_at_its_largest_m(ran):
    plans = dk.warmup(PROBLEM, m_values=range(1, 40))
    assert [shape[0][0] for shape in ran] == [1, 2, 4, 8, 16, 32, 39]
    assert [plan.problem.m for plan in plans] == [1, 2, 4, 8, 16, 32, 39]


def test_the_problem_itself_by_default(ran):
    (plan,) = dk.warmup(dk.Problem.make(3, 24, 512, device_type="cpu", bias_dtype=torch.float32))
    assert plan.problem.m == 3
    assert ran == [((3, 512), 24, 3, torch.bfloat16)]


def test_columns_of_a_are_compiled_for_each_kind_of_stride(ran):
    dk.warmup(dk.Problem.make(1, 8, 64, device_type="cpu", a_layout="column"), m_values=[1, 17, 20, 31, 32])
    assert [shape[0][0] for shape in ran] == [1, 31, 32]


def test_nothing_to_multiply_is_no_error(ran):
    dk.warmup(PROBLEM, m_values=[0, 5])
    assert [shape[0][0] for shape in ran] == [0, 5]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"problem": "16x16"}, TypeError, "^problem must be"),
        ({"m_values": 5}, TypeError, "^m_values must be None or several"),
        ({"m_values": [1, 2.0]}, TypeError, "^m_values must hold integers"),
        ({"m_values": [True]}, TypeError, "^m_values must hold integers"),
        ({"m_values": [-1]}, ValueError, "^m_values must be >= 0"),
        ({"m_values": []}, ValueError, "^m_values must hold at least one"),
        ({"device": 0}, TypeError, "^device must be a torch.device"),
        ({"device": "cuda:99"}, ValueError, "^device must"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_arguments(options, error, message):
    options = {"problem": PROBLEM, **options}
    with pytest.raises(error, match=message):
        dk.warmup(options.pop("problem"), **options)
