"""What Decompose-K is measured against: it is right, it is compiled where it says so, and it tells what it chose."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decompose_k.accuracy import allowed_error, relative_error, torch_product, truth
from decompose_k.bench import compiled as bench_compiled
from decompose_k.bench import ours
from decompose_k.bench.baselines import BASELINE_MAKERS, compiled, compiled_split, custom_op, custom_op_fused
from decompose_k.bench.cases import custom_case
from decompose_k.bench.check import make_inputs
from decompose_k.bench.compiled import Compiled, Round, forget_compiled
from decompose_k.bench.custom_op import SPLITS, plain_product, split_product, splits_of
from decompose_k.bench.variant import BASELINES, TORCH
from decompose_k.cache import SHIPPED, TUNED
from decompose_k.config import Config
from decompose_k.device import Device
from decompose_k.dtypes import dtype_name
from decompose_k.plan import HEURISTIC, Plan
from stub_devices import DEVICES

CPU = Device.of("cpu")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Two splits divide this K: each is compiled.
SEED = custom_case((4, 8, 1028), BF16, activation="relu")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    forget_compiled()
    yield
    forget_compiled()


def operands(case):
    return make_inputs(case, torch.device("cpu"), torch.Generator().manual_seed(0))


def assert_right(product, case, a, b):
    expected = truth(a, b, activation=case.activation)
    result = product(a, b)
    assert result.dtype == case.shape.out_dtype
    torch_error = relative_error(torch_product(case.problem("cpu"))[1](a, b), expected)
    assert relative_error(result, expected) <= allowed_error(torch_error, case.shape.out_dtype, case.shape.k)


def test_every_baseline_but_eager_has_a_maker():
    assert {TORCH, *BASELINE_MAKERS} == set(BASELINES)


@pytest.mark.parametrize("k", [1, 7, 12, 3000, 32768])
def test_splits_divide_k(k):
    assert splits_of(k) == tuple(split for split in SPLITS if k % split == 0)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"], ids=str)
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, FP32), (FP64, FP64)],
    ids=dtype_name,
)
def test_the_decomposition_is_the_product(dtype, out_dtype, activation):
    case = custom_case((4, 8, 1024), dtype, out_dtype=out_dtype, activation=activation, layout="NT")
    a, b = operands(case)
    for split in (1, 2, 256):
        assert_right(lambda a, b, split=split: split_product(a, b, split, out_dtype, activation), case, a, b)
    assert_right(lambda a, b: plain_product(a, b, out_dtype, activation), case, a, b)


def test_compiled_baselines_are_right_and_the_custom_ops_say_what_they_chose():
    a, b = operands(SEED)
    for make in (compiled, compiled_split, custom_op, custom_op_fused):
        variant = make(SEED, CPU)
        assert_right(variant.call, SEED, a, b)
        if make in (custom_op, custom_op_fused):
            chosen = variant.chosen()
            assert any(name in chosen for name in ("plain", "decomposed", "fallback"))
            # Both splits, torch.mm, and the operator itself unless this torch leaves it out.
            assert "(of 3)" in chosen or "(of 4)" in chosen


def test_a_sweep_over_exact_shapes_compiles_each_anew():
    def product(a, b):
        return torch.relu(a @ b)

    counters = torch._dynamo.utils.counters
    with torch._dynamo.config.patch(recompile_limit=2):
        for k in (64, 72, 80, 88):
            forget_compiled()
            counters.clear()
            a, b = torch.randn(2, k), torch.randn(k, 3)
            assert torch.allclose(Compiled(product)(a, b), product(a, b), atol=1e-4)
            assert counters["stats"]["unique_graphs"] == 1


def test_a_limit_that_is_reached_is_an_error_and_not_eager_code():
    def product(a, b):
        return torch.relu(a @ b)

    with torch._dynamo.config.patch(recompile_limit=1):
        Compiled(product)(torch.randn(2, 8), torch.randn(8, 3))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            Compiled(product)(torch.randn(2, 16), torch.randn(16, 3))


def test_a_round_names_its_winner_and_how_many_were_decompose_k():
    one = Round("mm", (("mm", 0.02), ("decompose_k_mm_64_split", 0.01), ("triton_mm_3", 0.03)))
    assert str(one) == "decompose_k_mm_64_split (of 3, 1 of them decompose-K)"
    call = Compiled(torch.mm, rounds=[Round("bmm", (("bmm", 1.0),)), one])
    assert call.chosen() == str(one)
    assert Compiled(torch.mm).chosen() is None


@pytest.mark.parametrize("k", [1001, 7])
def test_a_k_that_no_split_divides_has_no_fixed_split(k):
    assert compiled_split(custom_case((4, 4, k), BF16), CPU) is None


def test_mixed_operands_have_no_custom_op():
    assert custom_op(custom_case((4, 4, 64), BF16, b_dtype=FP32), CPU) is None
    assert custom_op_fused(custom_case((4, 4, 64), BF16, activation="gelu"), CPU) is None


@pytest.mark.parametrize("origin", [TUNED, SHIPPED, HEURISTIC])
@pytest.mark.parametrize("make", [ours.auto, ours.static, ours.unfused], ids=lambda make: make.__name__)
def test_a_search_leaves_what_was_measured_already(make, origin, monkeypatch):
    case = replace(SEED, static_weight=True)
    pair, other = Config("pair", split_k=4), Config("pair", split_k=8)

    def plan(problem, device):
        return Plan(problem, device, pair, "", (other,), origin)

    monkeypatch.setattr(ours, "plan", plan)
    variant = make(case, DEVICES["H200"])
    assert variant.config == pair
    assert set(variant.choices) - {pair} == ({other} if origin == HEURISTIC else set())


@pytest.fixture
def timed(monkeypatch):
    """One entry for each time that candidates were timed."""
    from torch._inductor import select_algorithm

    entries = []
    run = select_algorithm.AlgorithmSelectorCache.autotune

    def spy(*args, **options):
        entries.append(1)
        return run(*args, **options)

    monkeypatch.setattr(select_algorithm.AlgorithmSelectorCache, "autotune", spy)
    return entries


def forget_in_memory():
    """As another process, which lacks what this one keeps in memory."""
    from torch._inductor import select_algorithm

    forget_compiled()
    select_algorithm.get_algorithm_selector_cache().cache_clear()


def test_candidates_are_timed_again_where_an_earlier_process_left_timings(tmp_path, timed):
    """Another process may have timed them on a busy machine: its timings lie in the compiler's cache."""
    from torch._inductor.utils import fresh_cache

    a, b = operands(SEED)
    with fresh_cache(dir=str(tmp_path)):
        for _ in range(2):
            forget_in_memory()
            before = len(timed)
            custom_op(SEED, CPU).call(a, b)
            assert len(timed) > before


def test_within_a_run_on_a_gpu_candidates_are_timed_once_and_what_was_chosen_is_told_twice(timed, monkeypatch):
    as_on_a_gpu = bench_compiled._without_caches
    monkeypatch.setattr(bench_compiled, "_without_caches", lambda **_: as_on_a_gpu(keeps_timings=True))
    a, b = operands(SEED)
    for _ in range(2):
        with bench_compiled.fresh_timings():
            chosen = []
            before = len(timed)
            for _ in range(2):
                forget_in_memory()
                variant = custom_op(SEED, CPU)
                variant.call(a, b)
                # Names end in a count of the process.
                chosen.append(variant.chosen().partition(" ")[0].rpartition("_")[0])
            assert len(timed) == before + 1
            assert chosen[0] == chosen[1] != ""


@pytest.mark.parametrize("before", [None, "/somewhere"])
def test_fresh_timings_leave_the_environment_as_it_was(before, monkeypatch):
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    for name in names:
        monkeypatch.setenv(name, before or "")
        if before is None:
            monkeypatch.delenv(name)
    with bench_compiled.fresh_timings():
        folder, kernels = map(os.environ.get, names)
        assert folder not in (None, before)
        assert kernels == (before or str(Path.home() / ".triton" / "cache"))
        assert list(Path(folder).iterdir()) == []
        # What others set meanwhile is not theirs to take back.
        monkeypatch.setenv("OF_OTHERS", "1")
    assert os.environ["OF_OTHERS"] == "1"
    assert [os.environ.get(name) for name in names] == [before, before]
    assert not Path(folder).exists()
