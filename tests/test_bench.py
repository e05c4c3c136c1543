"""Cases, variants and measuring: that what is timed is right, and that what is wrong is not timed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from decompose_k.bench import measure, run
from decompose_k.bench.cases import (
    Case,
    affordable,
    custom_case,
    demo_cases,
    demo_checks,
    with_dtype,
    with_rows,
)
from decompose_k.bench.check import check_case, make_inputs
from decompose_k.bench.columns import COLUMNS
from decompose_k.bench.machine import Ceilings, Machine, commit_of, measure_ceilings
from decompose_k.bench.measure import Bench
from decompose_k.bench.rows import JSONL_NAME, Row, read_jsonl
from decompose_k.bench.run import Settings, open_folder, run_cases
from decompose_k.bench.suites import suite_cases
from decompose_k.bench.variant import (
    AUTO,
    COMPILED_MAX,
    DEFAULT_VARIANTS,
    FLOOR_STATIC,
    FLOORS,
    GENERATION_1,
    GENERATION_1_UNFUSED,
    GENERATION_2,
    GENERATION_2_UNFUSED,
    GENERATION_3,
    OURS,
    SPLIT,
    STATIC,
    TORCH,
    TORCH_CAST,
    UNFUSED,
    VARIANTS,
    Variant,
)
from decompose_k.bench.variants import variants_of
from decompose_k.device import Device

CPU = torch.device("cpu")
SMALL = custom_case((4, 3, 512), torch.bfloat16, activation="relu")
CEILINGS = Ceilings(1e10, dict.fromkeys((torch.bfloat16, torch.float16, torch.float32, torch.float64), 1e11))


QUICK = Settings(repetitions=1, variants=(TORCH, AUTO), columns=())


def small_bench(**changes):
    return Bench(CPU, Machine.of(CPU), CEILINGS, repetitions=2, **changes)


def gram(size=(4, 4, 256)):
    return Case(replace(custom_case(size, torch.float32, layout="TN").shape, suite="gram"))


def test_the_seed_suite_is_measured_with_its_relu_and_others_without():
    assert {case.activation for case in suite_cases(["seed"])} == {"relu"}
    assert {case.activation for case in suite_cases(["router", "gram"])} == {None}


def test_a_suite_named_twice_is_measured_once():
    assert suite_cases(["gate", "all", "gate"]).count(suite_cases(["gate"])[0]) == 1


def test_other_values_of_m_replace_a_batch_and_choose_where_m_is_none():
    router = [case for case in suite_cases(["router"]) if case.shape.name == "OLMoE"]
    assert [case.shape.m for case in with_rows(router, (3, 48))] == [3, 48]
    assert {case.shape.m for case in with_rows(suite_cases(["seed"]), (16, 48, 7))} == {16, 48}
    assert with_rows([SMALL], (3,)) == (SMALL,)


def test_the_demonstration_has_the_whole_seed_grid_and_real_shapes():
    suites = [case.shape.suite for case in demo_cases()]
    assert suites.count("seed") == 28
    assert set(suites) == {"seed", "router", "lora", "mhc", "gram"}
    assert len(demo_checks()) == 12
    assert {case.shape.suite for case in demo_checks()} == {"seed", "router", "lora", "mhc"}


def test_another_dtype_changes_the_result_only_where_it_followed_the_operands():
    seed = with_dtype(suite_cases(["seed"])[0], torch.float16).shape
    router = with_dtype(suite_cases(["router"])[0], torch.float16).shape
    assert (seed.a_dtype, seed.b_dtype, seed.out_dtype) == (torch.float16,) * 3
    assert (router.a_dtype, router.out_dtype) == (torch.float16, torch.float32)


def test_a_gram_matrix_moves_its_one_operand_once():
    case = gram((4, 4, 256))
    a, b = make_inputs(case, CPU, torch.Generator().manual_seed(0))
    assert a.data_ptr() == b.data_ptr()
    assert torch.equal(a, b.T)
    assert case.bytes == (4 * 256 + 4 * 4) * 4


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_operands_have_the_layout_that_was_asked_for(layout):
    a, b = make_inputs(custom_case((3, 5, 7), torch.float32, layout=layout), CPU, torch.Generator().manual_seed(0))
    assert (tuple(a.shape), tuple(b.shape)) == ((3, 7), (7, 5))
    assert a.is_contiguous() == (layout[0] == "N")
    assert b.is_contiguous() == (layout[1] == "N")


def test_the_limits_leave_out_with_a_reason():
    cases = [SMALL, custom_case((64, 64, 1 << 20), torch.float32)]
    kept, left_out = affordable(cases, max_bytes=1 << 20, max_flops=1e12)
    assert kept == [SMALL]
    assert [left.case for left in left_out] == cases[1:]
    assert "0.5 GB" in left_out[0].reason
    assert "9 Gflop" in affordable(cases, max_bytes=1 << 40, max_flops=1e9)[1][0].reason


DTYPE_CASES = {
    "bf16": custom_case((4, 3, 512), torch.bfloat16, activation="relu"),
    "fp16-to-fp32": custom_case((4, 3, 512), torch.float16, out_dtype=torch.float32, layout="NT"),
    "bf16-x-fp32": custom_case((4, 3, 512), torch.bfloat16, b_dtype=torch.float32, layout="NT"),
    "fp32": custom_case((4, 3, 8192), torch.float32),
    "fp64-tn": custom_case((4, 3, 512), torch.float64, layout="TN", activation="gelu"),
    "gram": gram(),
}


@pytest.mark.parametrize("case", DTYPE_CASES.values(), ids=DTYPE_CASES)
def test_every_variant_of_every_kind_of_dtype_is_right(case):
    checks = check_case(case, CPU)
    assert checks[0].variant.name == TORCH
    assert any(checked.variant.ours for checked in checks)
    for checked in checks:
        assert checked.passed, str(checked)


@pytest.mark.parametrize("seed", range(20))
def test_the_luck_of_a_single_output_makes_nothing_wrong(seed):
    for checked in check_case(custom_case((1, 1, 1028), torch.float32), CPU, seed=seed):
        assert checked.passed, str(checked)


def test_the_variants_of_a_half_product_on_a_cpu():
    names = [variant.name for variant in variants_of(SMALL, CPU, VARIANTS)]
    assert names[:2] == [TORCH, TORCH_CAST]
    assert {AUTO, UNFUSED} <= set(names)
    assert not {STATIC, COMPILED_MAX, GENERATION_1, *FLOORS} & set(names)


H200 = Device("NVIDIA H200", "cuda", "nvidia", (9, 0), 132, 232448, 60 << 20, 4.8e12)


def test_the_variants_on_a_gpu_without_one():
    seed = {variant.name: variant for variant in variants_of(suite_cases(["epilogue-bf16"])[0], H200, VARIANTS)}
    assert set(seed) == set(VARIANTS) - {TORCH_CAST}
    assert next(iter(seed)) == TORCH
    assert seed[TORCH].label == "relu(torch.mm)"
    assert seed[GENERATION_3].config.launch == "wait_first"
    for name, reducer in ((GENERATION_2, "flat"), (GENERATION_1, "tile")):
        assert (seed[name].config.launch, seed[name].config.reducer) == ("plain", reducer)
    for name, reducer in ((GENERATION_2_UNFUSED, "flat"), (GENERATION_1_UNFUSED, "tile")):
        assert (seed[name].config.launch, seed[name].config.reducer, seed[name].fused) == ("plain", reducer, False)
    assert seed[STATIC].static_b
    assert seed[FLOOR_STATIC].static_b
    assert seed[SPLIT].config.kernel == "bmm_sum"
    assert [name for name, variant in seed.items() if not variant.capturable] == [COMPILED_MAX]


def test_the_tile_reducer_has_threads_for_its_tile_and_few_splits():
    """One warp for 64 x 32 outputs, or a hundred splits one after the other, would make a straw man of it."""
    for case in suite_cases(["epilogue-bf16", "matmul-fp32"]):
        seed = {variant.name: variant for variant in variants_of(case, H200, (GENERATION_1, GENERATION_2))}
        first, second = seed[GENERATION_1].config, seed[GENERATION_2].config
        assert first.split_k <= 64
        assert first.split_k <= second.split_k
        assert 256 * first.reduce_warps >= min(2048, first.block_m * first.block_n)


def test_the_variants_without_an_activation_have_no_unfused_forms():
    names = {variant.name for variant in variants_of(suite_cases(["matmul-fp16"])[0], H200, VARIANTS)}
    assert not {UNFUSED, GENERATION_1_UNFUSED, GENERATION_2_UNFUSED, "custom-op-mm-relu"} & names


def test_a_device_without_dependent_launch_has_the_generations_before_it():
    a100 = replace(H200, name="A100", capability=(8, 0), multiprocessors=108)
    names = {variant.name for variant in variants_of(suite_cases(["epilogue-bf16"])[0], a100, (*OURS, *FLOORS))}
    assert {GENERATION_1, GENERATION_2, "floor-plain"} <= names
    assert not {GENERATION_3, "floor-wait-first", FLOOR_STATIC} & names


def test_a_static_weight_is_promised_for_inference_weights_alone():
    router = next(case for case in suite_cases(["router"]) if case.shape.m == 16)
    variants = {variant.name: variant for variant in variants_of(router, H200)}
    assert variants[TORCH].label == "torch.mm(out_dtype=fp32)"
    assert variants[STATIC].static_b
    assert not variants[AUTO].static_b
    assert STATIC not in {variant.name for variant in variants_of(suite_cases(["wgrad"])[0], H200)}


def test_torch_is_measured_even_if_not_asked_for_and_a_repeated_config_is_not():
    fp32 = custom_case((16, 16, 8192), torch.float32)
    assert [variant.name for variant in variants_of(fp32, CPU, [SPLIT])] == [TORCH, SPLIT]
    variants = variants_of(SMALL, CPU, [AUTO, SPLIT])
    configs = [variant.config for variant in variants if variant.config is not None]
    assert len(configs) == len(set(configs))


def test_an_unknown_variant_is_refused():
    with pytest.raises(ValueError, match=r"variant must be one of torch, .*; got 'fastest'"):
        variants_of(SMALL, CPU, ["fastest"])


def test_measuring_gives_a_row_for_each_variant():
    found = small_bench(variants=DEFAULT_VARIANTS).measure(SMALL)
    assert (found.failures, found.missing) == ([], [])
    rows = found.rows
    assert [row.variant for row in rows][:1] == [TORCH]
    assert {row.ours for row in rows} == {True, False}
    for row in rows:
        assert (row.m, row.n, row.k, row.activation, row.repetitions) == (4, 3, 512, "relu", 2)
        assert 0 < row.p20_us <= row.p50_us <= row.p80_us
        assert row.torch_error == rows[0].error > 0
        assert Row.from_json(row.to_json()) == row
        assert (row.config is None) == (not row.ours)
        assert row.warm_us > 0
        assert row.weight_cold_us > 0
        assert (row.event_us, row.host_us) == (None, None)
        assert row.noise == rows[0].noise >= 0


def test_columns_are_measured_where_they_are_asked_for():
    (row,) = small_bench(variants=(TORCH,), columns=()).measure(SMALL).rows
    assert (row.warm_us, row.weight_cold_us) == (None, None)
    (row,) = small_bench(variants=(TORCH,), columns=COLUMNS).measure(gram()).rows
    assert row.warm_us > 0
    # One matrix is both operands: neither can be warm alone.
    assert row.weight_cold_us is None


def test_a_variant_that_raises_is_said_and_the_others_are_measured(monkeypatch):
    def raising(a, b):
        raise RuntimeError("no compiler here\nand more")

    def with_a_broken_one(*arguments):
        return (*variants_of(*arguments), Variant("compiled", "compiled", raising, "torch"))

    monkeypatch.setattr(measure, "variants_of", with_a_broken_one)
    found = small_bench(variants=(TORCH, AUTO)).measure(SMALL)
    assert {row.variant for row in found.rows} == {TORCH, AUTO}
    assert [broken.endswith("compiled: RuntimeError: no compiler here") for broken in found.missing] == [True]
    assert found.failures == []


def test_a_wrong_variant_is_reported_and_not_timed(monkeypatch):
    def off_by_a_percent(a, b):
        return (torch.relu(a.float() @ b.float()) * 1.02).to(a.dtype)

    def with_a_wrong_one(*arguments):
        return (*variants_of(*arguments), Variant("wrong", "a wrong one", off_by_a_percent, "torch"))

    monkeypatch.setattr(measure, "variants_of", with_a_wrong_one)
    found = small_bench(variants=DEFAULT_VARIANTS).measure(SMALL)
    assert found.failures == []
    assert "wrong" not in {row.variant for row in found.rows}
    (wrong,) = found.missing
    assert "a wrong one: error 2." in wrong


def test_a_variant_that_gives_nan_is_wrong(monkeypatch):
    def with_nan(*arguments):
        nan = Variant("nan", "nan", lambda a, b: torch.full((4, 3), torch.nan), "torch")
        return (*variants_of(*arguments), nan)

    monkeypatch.setattr(measure, "variants_of", with_nan)
    (wrong,) = small_bench(variants=(TORCH,)).measure(SMALL).missing
    assert "nan: error nan" in wrong


def test_what_is_wrong_of_ours_is_a_failure(monkeypatch):
    def with_nan(*arguments):
        return (*variants_of(*arguments), Variant(AUTO, "ours", lambda a, b: torch.full((4, 3), torch.nan), "torch"))

    monkeypatch.setattr(measure, "variants_of", with_nan)
    found = small_bench(variants=(TORCH,)).measure(SMALL)
    assert found.missing == []
    (wrong,) = found.failures
    assert "ours: error nan" in wrong


@pytest.fixture
def quick_ceilings(monkeypatch):
    monkeypatch.setattr(run, "measure_ceilings", lambda device, dtypes: CEILINGS)


def test_rows_are_written_as_they_come_and_resumed(tmp_path, quick_ceilings):
    cases = [SMALL, custom_case((2, 2, 256), torch.float32)]
    heard = []
    open_folder(tmp_path / "out")
    first = run_cases(
        cases[:1],
        CPU,
        tmp_path / "out",
        QUICK,
        announce=heard.append,
    )
    done = open_folder(tmp_path / "out", resume=True)
    assert done == first.rows
    second = run_cases(
        cases,
        CPU,
        tmp_path / "out",
        QUICK,
        announce=heard.append,
        done=done,
    )
    assert second.rows[: len(done)] == done
    assert read_jsonl(tmp_path / "out" / JSONL_NAME) == tuple(second.rows)
    assert heard == ["measuring the ceilings", str(cases[0]), "measuring the ceilings", str(cases[1])]


@pytest.mark.parametrize("cut", [5, 400], ids=["a-few-characters", "most-of-a-line"])
def test_an_interrupted_run_continues_where_its_last_whole_case_ended(tmp_path, quick_ceilings, cut):
    cases = [SMALL, custom_case((2, 2, 256), torch.float32)]
    open_folder(tmp_path, overwrite=True)
    run_cases(cases, CPU, tmp_path, QUICK, announce=str)
    path = tmp_path / JSONL_NAME
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[:-cut], encoding="utf-8")
    done = open_folder(tmp_path, resume=True)
    assert {row.k for row in done} == {SMALL.shape.k}
    outcome = run_cases(cases, CPU, tmp_path, QUICK, announce=str, done=done)
    assert [(row.k, row.variant) for row in outcome.rows] == [
        (row["k"], row["variant"]) for row in map(json.loads, whole.splitlines())
    ]
    assert read_jsonl(path) == tuple(outcome.rows)


def test_a_run_that_was_interrupted_before_its_first_row_continues(tmp_path):
    open_folder(tmp_path)
    assert open_folder(tmp_path, resume=True) == []


def test_rows_are_not_overwritten_without_being_told_to(tmp_path):
    open_folder(tmp_path)
    with pytest.raises(FileExistsError, match="resume it .--resume., overwrite it"):
        open_folder(tmp_path)
    assert open_folder(tmp_path, overwrite=True) == []


def test_the_budget_ends_the_run_and_says_what_was_left_out(tmp_path, quick_ceilings):
    open_folder(tmp_path, overwrite=True)
    ticks = iter((0.0, 1.0, 100.0, 200.0))
    cases = [custom_case((2, 2, k), torch.float32) for k in (64, 128, 256)]
    settings = Settings(repetitions=1, budget=50.0, variants=(TORCH,), columns=())
    outcome = run_cases(cases, CPU, tmp_path, settings, announce=str, clock=lambda: next(ticks))
    assert {row.k for row in outcome.rows} == {64}
    assert [left.case for left in outcome.left_out] == cases[1:]
    assert all("budget" in note for note in outcome.notes)


def test_ceilings_are_measured_and_halves_may_be_computed_as_fp32_on_a_cpu(monkeypatch):
    monkeypatch.setattr("decompose_k.bench.machine._PROBE_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr("decompose_k.bench.machine._PROBE_SIZE", {"cpu": 64})
    ceilings = measure_ceilings(CPU, {torch.bfloat16, torch.float32})
    assert ceilings.bandwidth > 0
    assert ceilings.rate(torch.bfloat16, torch.bfloat16) >= ceilings.rate(torch.float32, torch.float32) > 0
    assert ceilings.rate(torch.bfloat16, torch.float32) == ceilings.rate(torch.float32, torch.float32)


def test_outside_of_a_checkout_there_is_no_commit(tmp_path):
    assert commit_of(tmp_path) is None
