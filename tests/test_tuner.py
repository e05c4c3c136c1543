"""Tuning: what is measured, what is kept, and that a budget, a failure or a wrong candidate loses no more than itself.

On stub devices the kernels are stood in for by torch's and the timer by a table; on the CPU all is real.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

import decompose_k as dk
from decompose_k import accuracy, cache, tuner
from decompose_k.compiling import NO_TIME, code_of
from decompose_k.legality import is_legal, k_blocks
from decompose_k.timing import CPU_ROTATING
from decompose_k.tuner import LEFT_OUT, MEASURED, REMEMBERED, candidates_of, work_of
from stub_devices import DEVICES, entry_of, timing

planning = importlib.import_module("decompose_k.plan")

BF16, FP32 = torch.bfloat16, torch.float32
MM = dk.Config("mm")
ROUTER = dk.Problem.make(16, 256, 7168, BF16, out_dtype=FP32, b_layout="column")
SMALL = dk.Problem.make(3, 4, 4096, BF16, device_type="cpu", activation="relu")


@pytest.fixture
def timer(monkeypatch):
    """A timer that takes each config for as fast as `timer.speed` says, and notes what it timed."""

    class Timer:
        def __init__(self):
            self.speed = lambda config: 100.0 if config is None else 10.0 + config.split_k
            self.configs, self.seconds, self.now = [], [], 0.0
            self.takes = 0.0

    found = Timer()
    configs = {}
    build = accuracy.own_product

    def own_product(problem, config=None):
        call = build(problem, config)
        configs[call] = config
        return call

    def time_variants(calls, input_sets, device, **options):
        found.now += found.takes
        found.seconds.append(options["seconds"])
        found.configs += [configs.get(call) for call in calls.values()]
        return {name: timing(found.speed(configs.get(call)), CPU_ROTATING) for name, call in calls.items()}

    monkeypatch.setattr(tuner, "own_product", own_product)
    monkeypatch.setattr(tuner, "time_variants", time_variants)
    return found


@pytest.fixture
def gpu(monkeypatch, timer):
    """Tuning for a stub GPU: its kernels run as torch's on the CPU, and nothing is compiled."""
    monkeypatch.setattr(planning.importlib.util, "find_spec", lambda name: object())
    compiled, failures = [], {}

    def compile_ahead(work, device, jobs, seconds=None):
        compiled.extend(work)
        return failures

    execute = accuracy.execute
    monkeypatch.setattr(
        accuracy, "execute", lambda a, b, bias, options, keep: execute(a, b, bias, options._replace(config=MM))
    )
    monkeypatch.setattr(accuracy, "_mm_to_fp32", accuracy.mm_of_copies(FP32, FP32))
    monkeypatch.setattr(tuner, "compile_ahead", compile_ahead)

    def run(problems, device, **changes):
        options = {
            "jobs": 2,
            "repetitions": 3,
            "most_candidates": 30,
            "progress": lambda text: None,
            "save": True,
            "deadline": None,
        }
        force = changes.pop("force", False)
        return tuner._Run(torch.device("cpu"), device, **{**options, **changes}).tune(problems, force)

    run.compiled, run.failures = compiled, failures
    return run


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("static_b", [False, True], ids=["default", "static_b"])
def test_the_candidates_are_legal_and_include_the_real_alternatives(device, static_b):
    problem = replace(ROUTER, static_b=static_b)
    found = candidates_of(problem, device)
    assert len(found) == len(set(found))
    assert [is_legal(config, problem, device) for config in found] == [None] * len(found)
    kernels = {config.kernel for config in found}
    assert kernels >= {"mm", "bmm_sum", "pair"}
    pairs = [config for config in found if config.kernel == "pair"]
    assert {config.reducer for config in pairs} == {"flat", "tile"}
    launches = {config.launch for config in pairs}
    dependent = {"wait_first", *(("static_b",) if static_b else ())} if device.has_dependent_launch else set()
    assert launches == {"plain"} | dependent


def test_what_is_remembered_is_measured_first_also_with_another_epilogue(folder):
    device = DEVICES["H200"]
    own, kin = (dk.Config("pair", split_k=split, launch="wait_first") for split in (11, 13))
    problem, activated = ROUTER.bucketed(), replace(ROUTER, activation="relu").bucketed()
    cache.remember([entry_of(problem, own), entry_of(activated, kin)], device)
    assert candidates_of(problem, device, 2)[:2] == (own, kin)
    assert candidates_of(activated, device, 2)[:2] == (kin, own)


def test_what_is_found_of_one_problem_is_no_candidate_of_the_next(folder, gpu, timer):
    """It would not have been compiled ahead, and be all that is measured where there was no time to compile."""
    device, activated = DEVICES["H200"], replace(ROUTER, activation="relu")
    for problem, config in work_of({activated: candidates_of(activated, device)}, device):
        gpu.failures[code_of(problem, config)] = NO_TIME
    first, second = gpu([ROUTER, activated], device)
    assert (first.status, second.status) == (MEASURED, LEFT_OUT)


def test_neighbours_are_legal_and_fetch_fewer_blocks_than_there_are():
    config = next(config for config in candidates_of(ROUTER, DEVICES["H200"]) if config.launch == "wait_first")
    near = tuner._neighbours(replace(config, prefetch="b", prefetch_blocks=0), ROUTER, DEVICES["H200"])
    assert near
    assert all(is_legal(other, ROUTER, DEVICES["H200"]) is None for other in near)
    assert {other.prefetch_blocks for other in near} == {
        blocks for blocks in (0, 1, 2, 4) if blocks < k_blocks(config, ROUTER)
    }


def test_a_problem_that_triton_cannot_do_is_tuned_over_torch_alone():
    wide = dk.Problem.make(16, 16, 8192, torch.float64)
    assert {config.backend for config in candidates_of(wide, DEVICES["B200"])} == {"torch"}
    assert work_of({wide: candidates_of(wide, DEVICES["B200"])}, DEVICES["B200"]) == []


def test_what_is_compiled_ahead_is_what_will_be_measured_the_best_guesses_first():
    problems = [ROUTER, replace(ROUTER, m=64)]
    work = work_of({problem: candidates_of(problem, DEVICES["H200"]) for problem in problems}, DEVICES["H200"])
    assert [problem for problem, _ in work[:2]] == problems
    for problem in problems:
        configs = [config for config in candidates_of(problem, DEVICES["H200"]) if config.backend == "triton"]
        assert {config for other, config in work if other == problem} >= set(configs)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_the_fastest_candidate_is_remembered_and_planned(folder, gpu, timer, device):
    slow = planning.plan(ROUTER, device).config
    wanted = next(config for config in reversed(candidates_of(ROUTER, device)) if config.kernel == "pair")
    timer.speed = lambda config: 100.0 if config is None else 1.0 if config == wanted else 50.0
    (result,) = gpu([ROUTER], device)
    assert (result.status, result.config, result.notes) == (MEASURED, wanted, ())
    assert wanted != slow
    for m in (9, 16):
        chosen = planning.plan(replace(ROUTER, m=m), device)
        assert (chosen.config, chosen.origin) == (wanted, "tuned")
    assert {one.config for one in result.timings} >= {None, *candidates_of(ROUTER, device)}
    assert (result.entry.chosen_us, result.entry.torch_us) == (1.0, 100.0)
    assert cache.user_entries(device) == (result.entry,)


def test_torch_may_win(folder, gpu, timer):
    timer.speed = lambda config: 1.0 if config == MM else 5.0
    (result,) = gpu([ROUTER], DEVICES["H200"])
    assert result.config == MM
    assert planning.plan(ROUTER, DEVICES["H200"]).config == MM


def test_a_candidate_that_failed_to_compile_is_dropped_with_a_note(folder, gpu, timer):
    device = DEVICES["H200"]
    first = candidates_of(ROUTER, device)[0]
    gpu.failures[code_of(ROUTER, first)] = "the compiler died"
    (result,) = gpu([ROUTER], device)
    assert code_of(ROUTER, first) not in {code_of(ROUTER, config) for config in timer.configs if config is not None}
    assert f"{first}: the compiler died" in result.notes
    assert result.status == MEASURED


def test_without_time_to_compile_nothing_is_decided(folder, gpu, timer):
    for problem, config in work_of({ROUTER: candidates_of(ROUTER, DEVICES["H200"])}, DEVICES["H200"]):
        gpu.failures[code_of(problem, config)] = NO_TIME
    (result,) = gpu([ROUTER], DEVICES["H200"])
    assert (result.status, result.config, timer.configs) == (LEFT_OUT, None, [])
    assert "compiled" in result.notes[0]


def test_a_batch_invariant_problem_is_tuned_once_for_every_m(folder, gpu, timer):
    device = DEVICES["H200"]
    problems = {replace(ROUTER, m=m, batch_invariant=True).bucketed() for m in (1, 16, 500)}
    (result,) = gpu(list(problems), device)
    plans = {planning.plan(replace(ROUTER, m=m, batch_invariant=True), device).config for m in (1, 16, 500)}
    assert plans == {result.config}


def test_tuned_problems_are_skipped_unless_forced(folder, timer):
    (first,) = dk.tune(SMALL)
    timer.configs.clear()
    # The same bucket.
    (second,) = dk.tune([replace(SMALL, m=4), SMALL])
    assert (first.status, second.status, timer.configs) == (MEASURED, REMEMBERED, [])
    assert second.entry == first.entry
    (third,) = dk.tune(SMALL, force=True)
    assert third.status == MEASURED
    assert timer.configs


def test_what_other_versions_tuned_is_tuned_again(folder, timer, monkeypatch):
    dk.tune(SMALL)
    monkeypatch.setattr("decompose_k.store.KERNEL_VERSION", "next")
    cache.forget()
    assert dk.tune(SMALL)[0].status == MEASURED


def test_what_is_shipped_is_not_taken_for_tuned(folder, timer, monkeypatch, tmp_path):
    dk.tune(SMALL)
    cache.export(tmp_path / "shipped", dk.Device.of("cpu"))
    monkeypatch.setattr(cache, "shipped_folder", lambda: tmp_path / "shipped")
    cache.clear()
    assert dk.plan(SMALL).origin == "shipped"
    assert dk.tune(SMALL)[0].status == MEASURED


def test_the_budget_ends_between_problems_and_keeps_what_is_done(folder, gpu, timer):
    timer.takes = 4.0
    problems = [replace(SMALL, m=4, n=n) for n in (2, 3, 4, 5)]
    results = gpu(problems, dk.Device.of("cpu"), deadline=10.0, clock=lambda: timer.now)
    # Two rounds of four seconds a problem.
    assert [result.status for result in results] == [MEASURED, MEASURED, LEFT_OUT, LEFT_OUT]
    assert results[2].notes == ("the time budget was used up",)
    assert [result.problem for result in results] == problems
    assert {entry.problem for entry in cache.user_entries(dk.Device.of("cpu"))} == set(problems[:2])
    assert timer.seconds[0] == pytest.approx(10.0 / 4 / 3)


def test_each_problem_is_saved_when_it_is_done(folder, timer):
    seen = []
    problems = [replace(SMALL, m=4, n=n) for n in (2, 3)]
    dk.tune(problems, progress=lambda text: seen.append(len(cache.user_entries(dk.Device.of("cpu")))))
    assert seen == [0, 1]


def test_without_saving_a_choice_lasts_as_long_as_the_process(folder, timer):
    (result,) = dk.tune(SMALL, save=False)
    assert not folder.exists()
    assert (dk.plan(SMALL).config, dk.plan(SMALL).origin) == (result.config, "tuned")


def test_a_wrong_candidate_is_neither_timed_nor_chosen(folder, timer, monkeypatch):
    build = tuner.own_product

    def with_a_wrong_one(problem, config):
        call = build(problem, config)
        return (lambda *operands: call(*operands) * 1.5) if config == MM else call

    monkeypatch.setattr(tuner, "own_product", with_a_wrong_one)
    (result,) = dk.tune(SMALL)
    assert result.config.kernel == "bmm_sum"
    assert MM not in timer.configs
    assert any(note.startswith("torch.mm: error 5.0e-01, allowed") for note in result.notes)


def test_where_every_candidate_is_wrong_nothing_is_remembered(folder, timer, monkeypatch):
    monkeypatch.setattr(tuner, "own_product", lambda problem, config: lambda *operands: torch.zeros(4, 4))
    (result,) = dk.tune(SMALL)
    assert (result.status, result.entry) == (LEFT_OUT, None)
    assert dk.plan(SMALL).origin == "heuristic"


def test_a_device_that_fails_loses_its_problem_alone(folder, timer, monkeypatch):
    judge = tuner.Judge.of

    def fails_once(problem, input_sets):
        if problem.n == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nand more")
        return judge(problem, input_sets)

    monkeypatch.setattr(tuner.Judge, "of", fails_once)
    first, second = dk.tune([replace(SMALL, n=2), SMALL])
    assert (first.status, second.status) == (LEFT_OUT, MEASURED)
    assert first.notes == ("OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB",)


def test_what_does_not_fit_in_memory_is_left_out(folder, timer):
    (result,) = dk.tune(dk.Problem.make(1, 1 << 20, 1 << 20, device_type="cpu"))
    assert result.status == LEFT_OUT
    assert "memory" in result.notes[0]


def test_integers_are_left_out(folder, timer):
    (result,) = dk.tune(dk.Problem.make(4, 4, 64, torch.int64, device_type="cpu"))
    assert "only real floating dtypes" in result.notes[0]


def test_nothing_to_tune_is_nothing_done():
    assert dk.tune([]) == ()


REAL = {
    "bf16 relu": SMALL,
    "fp16 to fp32, bias": dk.Problem.make(
        1, 16, 2048, torch.float16, out_dtype=FP32, bias_dtype=FP32, b_layout="column", device_type="cpu"
    ),
    "fp32": dk.Problem.make(4, 4, 8192, FP32, device_type="cpu"),
    "fp64": dk.Problem.make(4, 4, 1000, torch.float64, device_type="cpu"),
    "mixed, batch-invariant": dk.Problem.make(3, 8, 2048, BF16, b_dtype=FP32, batch_invariant=True, device_type="cpu"),
    "short K": dk.Problem.make(2, 2, 3, FP32, device_type="cpu", a_layout="strided"),
}


@pytest.mark.parametrize("problem", REAL.values(), ids=REAL)
def test_tuning_on_this_cpu(folder, problem):
    heard = []
    (result,) = dk.tune(problem, repetitions=2, progress=heard.append)
    assert (result.status, result.problem) == (MEASURED, problem.bucketed())
    assert heard == [planning.describe(problem.bucketed())]
    assert result.entry.method == CPU_ROTATING
    assert MM in {one.config for one in result.timings}
    chosen = dk.plan(problem)
    assert (chosen.config, chosen.origin) == (result.config, "tuned")
    a, b, *bias = accuracy.make_operands(problem, torch.device("cpu"), torch.Generator().manual_seed(1))
    precision = None if problem.precision == "highest" else problem.precision
    out = dk.matmul(
        a,
        b,
        bias=bias[0] if bias else None,
        activation=problem.activation,
        out_dtype=problem.out_dtype,
        precision=precision,
        batch_invariant=problem.batch_invariant,
    )
    expected = accuracy.truth(a, b, *bias, activation=problem.activation)
    assert accuracy.relative_error(out, expected) < 1e-2


def test_what_a_program_meets_can_be_tuned(folder):
    a, b = torch.randn(5, 2048), torch.randn(2048, 3)
    with dk.record() as problems:
        dk.matmul(a, b)
    (result,) = dk.tune(problems, repetitions=2)
    with dk.record() as problems:
        dk.matmul(a, b)
    assert dk.plan(problems[0]).config == result.config


WRONG = {
    "problems": (TypeError, [3], {}),
    "several kinds": (TypeError, [[SMALL, "16x16x64"]], {}),
    "empty": (ValueError, [dk.Problem.make(0, 4, 4, device_type="cpu")], {}),
    "two devices": (ValueError, [[SMALL, ROUTER]], {}),
    "device type": (ValueError, [SMALL], {"device": "meta"}),
    "no device": (ValueError, [SMALL], {"device": "warp:9"}),
    "device": (TypeError, [SMALL], {"device": 3}),
    "budget": (ValueError, [SMALL], {"budget": 0}),
    "nan budget": (ValueError, [SMALL], {"budget": float("nan")}),
    "budget text": (TypeError, [SMALL], {"budget": "90s"}),
    "jobs": (ValueError, [SMALL], {"jobs": 0}),
    "jobs text": (TypeError, [SMALL], {"jobs": "4"}),
    "repetitions": (ValueError, [SMALL], {"repetitions": 0}),
    "progress": (TypeError, [SMALL], {"progress": "bar"}),
    "save": (TypeError, [SMALL], {"save": "yes"}),
    "force": (TypeError, [SMALL], {"force": 1}),
    "group": (ValueError, [SMALL], {"group": object()}),
}


@pytest.mark.parametrize(("error", "arguments", "options"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(error, arguments, options):
    with pytest.raises(error, match=rf"^({'|'.join((*options, 'problems', 'device'))}) must .*got"):
        dk.tune(*arguments, **options)


def test_an_entry_of_the_files_is_what_was_measured(folder, timer):
    (result,) = dk.tune(SMALL)
    cache.forget()
    (found,) = cache.remembered(SMALL, dk.Device.of("cpu"))
    assert found.entry == result.entry
    assert found.entry != entry_of(SMALL, MM)
