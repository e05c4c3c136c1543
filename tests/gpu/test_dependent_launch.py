"""Behind a predecessor that lets its successors start before it has written: the wait alone keeps the result right.

A predecessor without dependent launch holds ours back until it has finished, whatever our kernels do. This one does
not, and the last test shows that it catches a kernel that reads before the wait.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from late_writer import write_late

import decompose_k as dk
from decompose_k.config import Config
from support import random

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
N, K = 256, 7168
PAIR = Config("pair", split_k=28, block_n=32, block_k=256, launch="wait_first", num_warps=2)
DOT = Config("dot", block_n=1, block_k=8192, launch="wait_first", num_warps=16)
WAIT_FIRST = {
    "pair": (16, PAIR),
    "pair_prefetch": (16, Config("pair", split_k=28, block_k=128, num_stages=3, launch="wait_first", prefetch="ab")),
    "pair_reserved": (16, replace(PAIR, reserve_kib=144)),
    "pair_tile_reducer": (16, Config("pair", split_k=56, block_k=128, launch="wait_first", reducer="tile")),
    "dot": (1, DOT),
    "dot_prefetch": (1, Config("dot", block_n=1, block_k=8192, launch="wait_first", num_warps=8, prefetch="b")),
}
STATIC = {
    "pair_static": (16, Config("pair", split_k=28, block_n=32, block_k=256, launch="static_b", prefetch="a")),
    "dot_static": (1, Config("dot", block_n=1, block_k=8192, launch="static_b", num_warps=16)),
}
EVERY = WAIT_FIRST | STATIC
PLACES = ("stream", "graph")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """No poison here: its fill would stand between the predecessor and our kernel."""


def fresh(m, count=6):
    return [
        (random((m, K), BF16, "cuda", seed), random((N, K), BF16, "cuda", seed + 1).T)
        for seed in range(0, 2 * count, 2)
    ]


def call(a, b, config):
    return dk.matmul(a, b, out_dtype=FP32, config=config, static_b=config.launch == "static_b")


def quiet(a, b, config):
    torch.cuda.synchronize()
    result = call(a, b, config)
    torch.cuda.synchronize()
    return result


def step(place, source, shared, compute):
    """A function of a value: write it to `shared` late, and what `compute` gives at once after it."""

    def once():
        write_late(shared, source)
        return compute()

    if place == "stream":
        return lambda value: (source.copy_(value), once())[1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = once()

    def replay(value):
        source.copy_(value)
        graph.replay()
        return result

    return replay


def wrong_results(place, operand, pairs, config):
    """How many of 60 calls right after a late write of `operand` differ from those on an idle device."""
    (a, b), index = pairs[0], "ab".index(operand)
    expected = [quiet(*((x, b) if operand == "a" else (a, y)), config) for x, y in pairs]
    # The writer is compiled before a graph is captured.
    source, shared = pairs[0][index].clone(), torch.full_like(pairs[0][index], float("nan"))
    write_late(shared, source)
    compute = (lambda: call(shared, b, config)) if operand == "a" else (lambda: call(a, shared, config))
    run = step(place, source, shared, compute)
    return sum(
        not torch.equal(run(pair[index]), right) for _ in range(10) for pair, right in zip(pairs, expected, strict=True)
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("m", "config"), EVERY.values(), ids=EVERY)
def test_a_is_read_after_the_wait(m, config, place):
    assert wrong_results(place, "a", fresh(m), config) == 0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("m", "config"), WAIT_FIRST.values(), ids=WAIT_FIRST)
def test_b_is_read_after_the_wait(m, config, place):
    assert wrong_results(place, "b", fresh(m), config) == 0


@pytest.mark.parametrize(("m", "config"), WAIT_FIRST.values(), ids=WAIT_FIRST)
def test_bias_is_read_after_the_wait(m, config):
    (a, b), biases = fresh(m, 1)[0], [random((N,), FP32, "cuda", seed) for seed in range(6)]

    def with_bias(bias):
        return dk.matmul(a, b, bias=bias, out_dtype=FP32, config=config)

    expected = [(torch.cuda.synchronize(), with_bias(bias))[1] for bias in biases]
    shared = torch.full_like(biases[0], float("nan"))
    for _ in range(10):
        for bias, right in zip(biases, expected, strict=True):
            write_late(shared, bias)
            assert torch.equal(with_bias(shared), right)


@pytest.mark.parametrize(("m", "config"), EVERY.values(), ids=EVERY)
def test_a_result_is_not_overwritten_while_the_predecessor_reads_or_writes_it(m, config):
    pairs = fresh(m)
    b = pairs[0][1]
    expected = [quiet(a, b, config) for a, _ in pairs]
    doubled = [a * 2 for a, _ in pairs]
    out, stale = torch.zeros(m, N, device="cuda"), torch.full((m, N), float("nan"), device="cuda")
    static = config.launch == "static_b"
    for _ in range(10):
        for (a, _), twice, right in zip(pairs, doubled, expected, strict=True):
            kept = torch.zeros_like(out)
            write_late(out, stale)
            dk.matmul(a, b, out=out, out_dtype=FP32, config=config, static_b=static)
            assert torch.equal(out, right)
            write_late(kept, out)
            dk.matmul(twice, b, out=out, out_dtype=FP32, config=config, static_b=static)
            assert torch.equal(kept, right)


@pytest.mark.parametrize(("m", "config"), STATIC.values(), ids=STATIC)
def test_the_writer_catches_a_read_before_the_wait(m, config):
    """In one of many tries: where other processes share the GPU, a program may start only after the writer's end."""
    assert any(wrong_results("graph", "b", fresh(m), config) > 0 for _ in range(30))
