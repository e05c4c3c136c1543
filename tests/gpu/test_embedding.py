"""Right in any stream, graph and neighbourhood: nothing is read before what wrote it has finished.

Each test gives the call a slow predecessor and fresh values, so that a kernel that started to read too early would see
the old ones, and compares bits with a run on an idle device.
"""

from __future__ import annotations

import pytest
import torch

import decompose_k as dk
from support import random

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
M, N, K = 16, 256, 7168
# Half a millisecond: several times what the host takes to enqueue a write and a call.
SLOW_CYCLES = 1_000_000
VARIANTS = {
    "pair": (16, {"out_dtype": FP32}),
    "pair_static": (16, {"out_dtype": FP32, "static_b": True}),
    "dot": (1, {"out_dtype": FP32}),
    "dot_static": (1, {"out_dtype": FP32, "static_b": True}),
    "invariant": (16, {"out_dtype": FP32, "batch_invariant": True}),
}
variants = pytest.mark.parametrize(("m", "options"), VARIANTS.values(), ids=VARIANTS)
may_write_b = pytest.mark.parametrize(
    ("m", "options"),
    [value for name, value in VARIANTS.items() if "static" not in name],
    ids=[name for name in VARIANTS if "static" not in name],
)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """No poison here: its fill would stand between the predecessor and our kernel. Values that differ do its work."""


def call(a, b, options):
    return dk.matmul(a, b, backend="triton", **options)


def fresh(m, seed):
    return random((m, K), BF16, "cuda", seed), random((N, K), BF16, "cuda", seed + 1).T


def expected_results(pairs, options):
    results = []
    for a, b in pairs:
        torch.cuda.synchronize()
        results.append(call(a, b, options))
    torch.cuda.synchronize()
    return results


WRITERS = {
    "kernel": lambda target, value: torch.add(value, 0, out=target),
    "memcpy": lambda target, value: target.copy_(value),
    "kernel_after_memset": lambda target, value: target.zero_().add_(value),
}


def check_right_after(write, shared, values, product, expected):
    """Write each value into `shared` and multiply at once, 20 rounds: every product has the bits that are expected."""
    late = 0
    for _ in range(20):
        results = []
        for value in values:
            torch.cuda._sleep(SLOW_CYCLES)
            asleep = torch.cuda.current_stream().record_event()
            write(shared, value)
            results.append(product(shared))
            late += not asleep.query()
        for result, right in zip(results, expected, strict=True):
            assert torch.equal(result, right)
    assert late > 0, "every call was enqueued on an idle device"


@variants
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_right_after_what_writes_a(m, options, write):
    pairs = [fresh(m, seed) for seed in range(0, 20, 2)]
    values, b = [a for a, _ in pairs], pairs[0][1]
    expected = expected_results([(a, b) for a in values], options)
    shared = torch.full_like(values[0], float("nan"))
    check_right_after(write, shared, values, lambda a: call(a, b, options), expected)


@may_write_b
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_right_after_what_writes_b(m, options, write):
    pairs = [fresh(m, seed) for seed in range(0, 20, 2)]
    a, values = pairs[0][0], [b for _, b in pairs]
    expected = expected_results([(a, b) for b in values], options)
    shared = torch.full((N, K), float("nan"), dtype=BF16, device="cuda").T
    check_right_after(write, shared, values, lambda b: call(a, b, options), expected)


@variants
def test_right_after_a_copy_from_the_host_and_a_memset(m, options):
    pairs = [fresh(m, seed) for seed in range(0, 20, 2)]
    b = pairs[0][1]
    expected = expected_results([(a, b) for a, _ in pairs], options)
    host = [a.cpu().pin_memory() for a, _ in pairs]
    shared = torch.full_like(pairs[0][0], float("nan"))
    for pinned, right in zip(host, expected, strict=True):
        torch.cuda._sleep(SLOW_CYCLES)
        shared.copy_(pinned, non_blocking=True)
        assert torch.equal(call(shared, b, options), right)
        torch.cuda._sleep(SLOW_CYCLES)
        shared.zero_()
        assert not call(shared, b, options).any()


@may_write_b
def test_right_after_a_copy_from_the_host_and_a_memset_of_b(m, options):
    pairs = [fresh(m, seed) for seed in range(0, 20, 2)]
    a = pairs[0][0]
    expected = expected_results([(a, b) for _, b in pairs], options)
    host = [b.T.cpu().pin_memory() for _, b in pairs]
    shared = torch.full((N, K), float("nan"), dtype=BF16, device="cuda")
    for pinned, right in zip(host, expected, strict=True):
        torch.cuda._sleep(SLOW_CYCLES)
        shared.copy_(pinned, non_blocking=True)
        assert torch.equal(call(a, shared.T, options), right)
        torch.cuda._sleep(SLOW_CYCLES)
        shared.zero_()
        assert not call(a, shared.T, options).any()


@variants
def test_right_after_a_large_product_that_writes_a(m, options):
    left = random((m, 8192), BF16, "cuda", 1)
    right_sides = [torch.randn(8192, K, dtype=BF16, device="cuda") / 90 for _ in range(2)]
    b = fresh(m, 0)[1]
    products = [torch.mm(left, right_side) for right_side in right_sides]
    expected = expected_results([(product, b) for product in products], options)
    shared = torch.full_like(products[0], float("nan"))
    for _ in range(50):
        for right_side, right in zip(right_sides, expected, strict=True):
            torch.mm(left, right_side, out=shared)
            assert torch.equal(call(shared, b, options), right)


@variants
def test_right_after_an_event_of_another_stream(m, options):
    pairs = [fresh(m, seed) for seed in range(0, 20, 2)]
    b = pairs[0][1]
    expected = expected_results([(a, b) for a, _ in pairs], options)
    shared = torch.full_like(pairs[0][0], float("nan"))
    side = torch.cuda.Stream()
    for a, right in [(a, right) for (a, _), right in zip(pairs, expected, strict=True)] * 10:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLOW_CYCLES)
            shared.copy_(a)
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(call(shared, b, options), right)


@variants
def test_the_successor_sees_the_result(m, options):
    pairs = [fresh(m, seed) for seed in range(0, 20, 2)]
    b = pairs[0][1]
    doubled = [right * 2 for right in expected_results([(a, b) for a, _ in pairs], options)]
    for _ in range(20):
        # The memory of a result held the one before: a successor that reads too early sees another's.
        for (a, _), right in zip(pairs, doubled, strict=True):
            assert torch.equal(call(a, b, options) * 2, right)


@pytest.mark.parametrize(
    "options", [{}, {"static_b": True}, {"batch_invariant": True}], ids=["auto", "static", "invariant"]
)
def test_chains_of_ten(options):
    square = random((512, 512), BF16, "cuda", 1) / 22
    x = random((16, 512), BF16, "cuda", 2)

    def chain(synchronise):
        y = x
        for _ in range(10):
            y = dk.matmul(y, square, activation="tanh", backend="triton", **options)
            if synchronise:
                torch.cuda.synchronize()
        return y

    right = chain(True)
    for _ in range(50):
        assert torch.equal(chain(False), right)


@variants
def test_four_streams_at_once(m, options):
    pairs = [fresh(m, seed) for seed in range(0, 8, 2)]
    expected = expected_results(pairs, options)
    streams = [torch.cuda.Stream() for _ in pairs]
    results = [[] for _ in pairs]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    rounds = 48
    for turn in range(rounds):
        # Each stream goes through the values in an order of its own, so that no two share them at a time.
        for index, (stream, into) in enumerate(zip(streams, results, strict=True)):
            with torch.cuda.stream(stream):
                into.append(call(*pairs[(index + turn) % len(pairs)], options))
    torch.cuda.synchronize()
    for index, into in enumerate(results):
        assert all(torch.equal(into[turn], expected[(index + turn) % len(pairs)]) for turn in range(rounds))


@variants
def test_memory_freed_and_reused_right_after_the_call(m, options):
    pairs = [fresh(m, seed) for seed in range(0, 8, 2)]
    expected = expected_results(pairs, options)
    reuses = 0
    for _ in range(25):
        for (a, b), right in zip(pairs, expected, strict=True):
            # The weight stays, as static_b promises; what the caller frees is the activation.
            x = a.clone()
            freed = x.data_ptr()
            result = call(x, b, options)
            del x
            overwritten = torch.full((m, K), float("nan"), dtype=BF16, device="cuda")
            reuses += overwritten.data_ptr() == freed
            assert torch.equal(result, right)
    assert reuses > 0, "the freed memory was never taken again"


@variants
def test_graph_replay_with_new_values(m, options):
    pairs = [fresh(m, seed) for seed in range(0, 20, 2)]
    b = pairs[0][1]
    expected = expected_results([(a, b) for a, _ in pairs], options)
    source, shared = torch.empty_like(pairs[0][0]), torch.empty_like(pairs[0][0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        shared.copy_(source)
        results = [call(shared, b, options) for _ in range(3)]
    for _ in range(10):
        for (a, _), right in zip(pairs, expected, strict=True):
            source.copy_(a)
            graph.replay()
            assert all(torch.equal(result, right) for result in results)


@variants
def test_a_capture_that_forks_before_and_joins_after(m, options):
    pairs = [fresh(m, seed) for seed in range(0, 20, 2)]
    b = pairs[0][1]
    expected = expected_results([(a, b) for a, _ in pairs], options)
    source = torch.empty_like(pairs[0][0])
    left, right_side = torch.empty_like(source), torch.empty_like(source)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLOW_CYCLES)
            right_side.copy_(source)
        left.copy_(source)
        before_join = call(left, b, options)
        current.wait_stream(side)
        after_join = call(right_side, b, options)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            in_branch = call(left, b, options)
            copied = after_join + 0
        current.wait_stream(side)
        after_all = call(right_side, b, options)
    for _ in range(10):
        for (a, _), right in zip(pairs, expected, strict=True):
            source.copy_(a)
            graph.replay()
            for result in (before_join, after_join, in_branch, copied, after_all):
                assert torch.equal(result, right)


@variants
def test_no_call_waits_for_the_device(m, options):
    a, b = fresh(m, 0)
    call(a, b, options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(a, b, options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_device_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    a, b = fresh(16, 0)
    right = dk.matmul(a, b, backend="triton")
    other = dk.matmul(a.to("cuda:1"), b.to("cuda:1"), backend="triton")
    assert other.device == torch.device("cuda:1")
    assert torch.equal(other.to("cuda:0"), right)


def test_autograd_autocast_and_inference_mode():
    a, b = fresh(16, 0)
    a, b = a.float().requires_grad_(), b.float().requires_grad_()
    dk.matmul(a, b, activation="silu", backend="triton").square().sum().backward()
    x, w = (tensor.detach().double().requires_grad_() for tensor in (a, b))
    torch.nn.functional.silu(x @ w).square().sum().backward()
    for ours, right in ((a.grad, x.grad), (b.grad, w.grad)):
        assert float((ours - right).norm() / right.norm()) < 1e-5
    with torch.inference_mode(), torch.autocast("cuda", BF16):
        assert dk.matmul(a, b, backend="triton").dtype == BF16


def test_compiled():
    a, b = fresh(16, 0)
    compiled = torch.compile(lambda a, b: dk.matmul(a, b, activation="relu", out_dtype=FP32), fullgraph=True)
    assert torch.equal(compiled(a, b), dk.matmul(a, b, activation="relu", out_dtype=FP32))
