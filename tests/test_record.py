"""Recording sees every product whose config is chosen, however it is reached, and nothing else."""

from __future__ import annotations

import json
import threading

import pytest
import torch

import decompose_k as dk

A, B = torch.randn(5, 96), torch.randn(96, 3)
PROBLEM = dk.Problem.make(8, 3, 96, torch.float32, device_type="cpu")


def sizes(problems):
    return [(problem.m, problem.n, problem.k) for problem in problems]


def by_thread():
    thread = threading.Thread(target=dk.matmul, args=(A, B))
    thread.start()
    thread.join()


WAYS = {
    "matmul": lambda: dk.matmul(A, B),
    "into out": lambda: dk.matmul(A, B, out=torch.empty(5, 3)),
    "batched": lambda: dk.matmul(A.reshape(5, 1, 96), B),
    "linear": lambda: dk.linear(A, B.t()),
    "operator": lambda: torch.ops.decompose_k.matmul(A, B),
    "vmap": lambda: torch.func.vmap(dk.matmul, in_dims=(0, None))(A.reshape(5, 1, 96), B),
    "inference": lambda: torch.inference_mode()(dk.matmul)(A, B),
    "another thread": by_thread,
}


@pytest.mark.parametrize("call", WAYS.values(), ids=WAYS)
def test_every_way_to_a_product_is_seen(call):
    with dk.record() as problems:
        call()
    assert sizes(problems) == [(8, 3, 96)]


def test_the_products_of_the_gradients_are_seen():
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    with dk.record() as problems:
        dk.matmul(a, b).sum().backward()
    # grad @ b.T, then a.T @ grad, or the other way round.
    assert sizes(problems)[0] == (8, 3, 96)
    assert sorted(sizes(problems)[1:]) == [(8, 96, 3), (128, 3, 5)]


def test_options_are_part_of_what_is_recorded():
    with dk.record() as problems:
        dk.matmul(A.bfloat16(), B.bfloat16(), activation="relu", out_dtype=torch.float32, static_b=True)
        dk.matmul(A, B, bias=torch.zeros(3), precision="ieee", batch_invariant=True)
    first, second = problems
    assert (first.a_dtype, first.out_dtype, first.activation, first.static_b) == (
        torch.bfloat16,
        torch.float32,
        "relu",
        True,
    )
    assert (second.m, second.bias_dtype, second.precision, second.batch_invariant) == (64, torch.float32, "ieee", True)


def test_each_bucket_is_kept_once_in_the_order_of_first_meeting():
    with dk.record() as problems:
        for m in (5, 1, 8, 2, 6, 1):
            dk.matmul(A[:1].expand(m, 96).contiguous(), B)
    assert sizes(problems) == [(8, 3, 96), (1, 3, 96), (2, 3, 96)]
    assert problems[0] == PROBLEM
    assert list(problems[1:]) == list(problems)[1:]
    assert len(problems) == 3


def test_nothing_is_seen_outside_and_where_nothing_is_chosen():
    dk.matmul(A, B)
    with dk.record() as problems:
        dk.matmul(A, B, config=dk.Config("mm"))
        dk.matmul(A[:0], B)
        dk.matmul(A[:, :0], B[:0])
    dk.matmul(A, B)
    assert list(problems) == []


def test_recordings_nest_and_end_with_an_error():
    def inner_fails(inner):
        with dk.record() as inner[0]:
            dk.matmul(A[:1], B)
            raise RuntimeError("stop")

    inner = [None]
    with dk.record() as outer:
        dk.matmul(A, B)
        with pytest.raises(RuntimeError, match="stop"):
            inner_fails(inner)
        dk.matmul(A[:2], B)
    assert sizes(outer) == [(8, 3, 96), (1, 3, 96), (2, 3, 96)]
    assert sizes(inner[0]) == [(1, 3, 96)]


def test_a_recording_survives_its_file(tmp_path):
    with dk.record() as problems:
        dk.matmul(A, B)
        dk.matmul(A.half(), B.half(), activation="gelu")
    problems.save(tmp_path / "problems.json")
    assert list(dk.Recording.load(tmp_path / "problems.json")) == list(problems)
    assert len(problems) == 2


BROKEN = {
    "text": "hello",
    "empty": "",
    "list": "[]",
    "format": '{"format": 2, "problems": []}',
    "problem": json.dumps({"format": 1, "problems": [{**PROBLEM.to_json(), "a_dtype": "fp4"}]}),
    "fields": '{"format": 1, "problems": [{"m": 1}]}',
    "sizes": json.dumps({"format": 1, "problems": [{**PROBLEM.to_json(), "m": -1}]}),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_another_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "problems.json").write_text(text)
    with pytest.raises(ValueError, match=r"problems.json must hold problems as a recording saves them; \w+Error"):
        dk.Recording.load(tmp_path / "problems.json")
