"""Which choice is taken when several are known, on every kind of device."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

import decompose_k as dk
from decompose_k import cache, store
from decompose_k.heuristics import candidates
from decompose_k.legality import is_legal
from decompose_k.store import Document, Header, file_name
from stub_devices import CPU, DEVICES, entry_of

planning = importlib.import_module("decompose_k.plan")

H200 = DEVICES["H200"]
PROBLEM = dk.Problem.make(16, 256, 7168, out_dtype=torch.float32, b_layout="column")
PAIR = dk.Config("pair", split_k=14, block_k=128, num_stages=4)
OTHER = dk.Config("pair", split_k=28, block_k=256)
MM = dk.Config("mm")


@pytest.fixture(autouse=True)
def with_triton(monkeypatch):
    monkeypatch.setattr(planning.importlib.util, "find_spec", lambda name: object())
    planning.forget_choices()


@pytest.fixture
def ship(monkeypatch, tmp_path):
    """Ship an entry with the package."""
    monkeypatch.setattr(cache, "shipped_folder", lambda: tmp_path)

    def write(entry, device):
        path = tmp_path / file_name(device, store.class_of(entry.problem))
        store.write(path, Document(Header.of(device), {entry.key: entry.to_json()}))
        planning.forget_choices()

    return write


def tune(config, problem=PROBLEM, device=H200, **rest):
    cache.remember([entry_of(problem, config, **rest)], device, save=False)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_tuned_comes_before_shipped_before_the_heuristic(device, ship):
    first = dk.plan(PROBLEM, device)
    assert first.origin == "heuristic"
    ship(entry_of(PROBLEM, OTHER), device)
    assert (dk.plan(PROBLEM, device).config, dk.plan(PROBLEM, device).origin) == (OTHER, "shipped")
    tune(PAIR, device=device)
    chosen = dk.plan(PROBLEM, device)
    assert (chosen.config, chosen.origin) == (PAIR, "tuned")
    assert chosen.reason == "the best of 2 that were measured on 2026-01-02: 2.00 us, torch 7.00 us"
    assert PAIR not in chosen.alternatives
    assert set(chosen.alternatives) | {PAIR} >= {first.config, *first.alternatives}
    cache.clear()
    assert dk.plan(PROBLEM, device).origin == "shipped"


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_torch_may_have_won(device):
    tune(MM, device=device)
    assert dk.plan(PROBLEM, device).config == MM
    assert dk.plan(PROBLEM, device, backend="torch").config == MM
    assert dk.plan(PROBLEM, device, backend="torch").origin == "tuned"
    assert dk.plan(PROBLEM, device, backend="triton").config.backend == "triton"
    assert dk.plan(PROBLEM, device, backend="triton").origin == "heuristic"


ILLEGAL = {
    "a promise that was not made": (H200, replace(PAIR, launch="static_b", split_k=56, num_stages=1)),
    "no dependent launch": (DEVICES["A100"], replace(PAIR, launch="wait_first")),
    "too much shared memory": (DEVICES["L4"], replace(PAIR, block_m=128, block_n=128, num_warps=8)),
    "a precision that is not allowed": (H200, replace(PAIR, input_precision="tf32")),
    "no tf32 there": (DEVICES["MI300X"], replace(PAIR, input_precision="tf32x3")),
    "a kernel for two rows": (H200, dk.Config("dot", block_k=8192)),
    "more chunks than K has": (H200, dk.Config("bmm_sum", split_k=7169)),
}


@pytest.mark.parametrize(("device", "config"), ILLEGAL.values(), ids=ILLEGAL)
def test_what_is_not_legal_for_the_problem_is_ignored(device, config, ship):
    untuned = dk.plan(PROBLEM, device)
    tune(config, device=device)
    assert dk.plan(PROBLEM, device) == untuned
    ship(entry_of(PROBLEM, PAIR), device)
    assert dk.plan(PROBLEM, device).config == PAIR


def test_without_triton_a_remembered_triton_config_is_ignored(monkeypatch):
    tune(PAIR)
    monkeypatch.setattr(planning.importlib.util, "find_spec", lambda name: None)
    planning.forget_choices()
    assert dk.plan(PROBLEM, H200).config == MM
    assert "triton is not installed" in dk.plan(PROBLEM, H200).reason


def test_a_promise_that_would_not_be_used_leaves_the_choice_as_it_is():
    """fp32 pairs wait first also with a static weight, and a measured one is better than an unmeasured one."""
    problem = dk.Problem.make(16, 16, 8192, torch.float32)
    static = replace(problem, static_b=True)
    assert dk.plan(static, H200).config.launch == "wait_first"
    measured, other = candidates(problem, H200)[3:5]
    tune(measured, problem)
    assert dk.plan(problem, H200).config == measured
    chosen = dk.plan(static, H200)
    assert (chosen.config, chosen.origin, chosen.problem) == (measured, "tuned", static)
    tune(other, static)
    assert dk.plan(static, H200).config == other


def test_a_promise_that_is_used_is_not_overruled_by_what_was_measured_without_it():
    static = replace(PROBLEM, static_b=True)
    untuned = dk.plan(static, H200)
    assert untuned.config.launch == "static_b"
    tune(PAIR)
    assert dk.plan(static, H200).config == untuned.config


@pytest.mark.parametrize(
    ("m", "k", "launch"), [(16, 24576, "static_b"), (32, 8192, "static_b"), (32, 24576, "wait_first")], ids=str
)
def test_an_unmeasured_promise_is_used_where_it_is_predicted_to_pay(m, k, launch):
    """Of 32 x 32 x 24576 too little is expected: the prediction is not good to 3 %."""
    problem = dk.Problem.make(m, m, k, torch.bfloat16, activation="relu")
    promised = replace(problem, static_b=True)
    assert dk.plan(promised, H200).config.launch == "static_b"
    measured = next(config for config in candidates(problem, H200) if config.launch == "wait_first")
    tune(measured, problem)
    chosen = dk.plan(promised, H200)
    assert chosen.config.launch == launch
    if launch == "wait_first":
        assert (chosen.config, chosen.origin) == (measured, "tuned")
        assert "without the promise" in chosen.reason


def test_where_torch_was_measured_fastest_a_prediction_does_not_outdo_it():
    problem = dk.Problem.make(16, 16, 24576, torch.bfloat16, activation="relu")
    promised = replace(problem, static_b=True)
    assert dk.plan(promised, H200).config.launch == "static_b"
    tune(MM, problem)
    assert dk.plan(promised, H200).config == MM
    assert dk.plan(promised, H200, backend="triton").config.launch == "static_b"


def test_an_explicit_split_takes_a_remembered_choice_only_if_it_is_that_split():
    tune(PAIR)
    assert dk.plan(PROBLEM, H200, split_k=14).config == PAIR
    assert dk.plan(PROBLEM, H200, split_k=14).origin == "tuned"
    other = dk.plan(PROBLEM, H200, split_k=15)
    assert (other.config.split_k, other.origin) == (15, "asked")
    tune(MM)
    assert dk.plan(PROBLEM, H200, split_k=1).config.kernel != "mm"


def test_the_backend_of_the_environment_is_obeyed(monkeypatch):
    tune(PAIR)
    monkeypatch.setenv("DECOMPOSE_K_BACKEND", "torch")
    assert dk.plan(PROBLEM, H200).config.backend == "torch"


@pytest.mark.parametrize("device", [*DEVICES.values(), CPU], ids=[*DEVICES, "CPU"])
@pytest.mark.parametrize("tuned", [False, True], ids=["untuned", "tuned"])
def test_the_rows_of_a_bucket_share_their_config(device, tuned):
    problem = replace(PROBLEM, m=64, device_type=device.type)
    if tuned:
        tune(dk.Config("bmm_sum", split_k=7) if device is CPU else PAIR, problem, device)
    plans = [dk.plan(replace(problem, m=m), device) for m in range(33, 65)]
    assert len({chosen.config for chosen in plans}) == 1
    assert {chosen.origin for chosen in plans} == {"tuned" if tuned else "heuristic"}
    assert [chosen.problem.m for chosen in plans] == list(range(33, 65))


@pytest.mark.parametrize("device", [*DEVICES.values(), CPU], ids=[*DEVICES, "CPU"])
@pytest.mark.parametrize("n", [1, 24, 256])
def test_a_batch_invariant_choice_serves_every_m(device, n):
    """Whatever is remembered, legal or not, all m must take the same of it: a row's bits may not see how many there
    are."""
    problem = replace(PROBLEM, m=64, n=n, batch_invariant=True, device_type=device.type)
    rows = (1, 2, 3, 16, 17, 64, 65, 512, 5000)
    configs = [
        *candidates(problem, device),
        MM,
        dk.Config("bmm_sum", split_k=7),
        PAIR,
        replace(PAIR, launch="static_b"),
    ]
    for config in [*configs, replace(PAIR, launch="wait_first"), dk.Config("dot", block_k=8192), OTHER]:
        tune(config, problem, device)
        plans = {(dk.plan(replace(problem, m=m), device).config) for m in rows}
        assert len(plans) == 1
        assert plans == {config} or is_legal(config, problem, device) is not None or device.type == "cpu"


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_heuristic_choice_is_legal_for_every_m_of_its_bucket(device):
    for m in (1, 2, 3, 5, 16, 31, 33, 64, 100):
        for static_b in (False, True):
            exact = replace(PROBLEM, m=m, static_b=static_b)
            chosen = dk.plan(exact, device)
            assert [is_legal(config, exact, device) for config in (chosen.config, *chosen.alternatives)] == [None] * (
                1 + len(chosen.alternatives)
            )


def test_planning_for_a_gpu_touches_none(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("a GPU call")

    for name in ("_lazy_init", "current_device", "get_device_properties", "is_available"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    tune(PAIR)
    assert dk.plan(PROBLEM, H200).config == PAIR
    assert dk.explain(PROBLEM, H200).plan.config == PAIR


def test_explain_shows_predictions_and_measurements():
    tune(PAIR, others=[(OTHER, 2.5), (MM, 6.5)])
    explanation = dk.explain(replace(PROBLEM, m=13), H200)
    choice, second, *rest = explanation.candidates
    assert (choice.config, choice.measured_us) == (PAIR, 2.0)
    assert (second.config, second.measured_us) == (OTHER, 2.5)
    assert (rest[-1].config, rest[-1].label, rest[-1].measured_us) == (None, "torch.mm", 7.0)
    untimed = [candidate for candidate in rest if candidate.measured_us is None]
    assert {candidate.config for candidate in untimed} >= set(candidates(PROBLEM, H200)) - {PAIR, OTHER, MM}
    assert all(candidate.predicted_us > 0 for candidate in (choice, second, *rest[:-1]))
    text = str(explanation)
    for part in (
        "chosen for    m = 16",
        "from          tuned",
        "2.00 us",
        "6.50 us",
        "7.00 us",
        "predicted",
        "measured",
    ):
        assert part in text
    values = explanation.to_json()
    assert values["origin"] == "tuned"
    assert values["candidates"][0]["measured_us"] == 2.0


def test_explain_does_not_show_a_prediction_where_there_is_no_model():
    tune(dk.Config("bmm_sum", split_k=7), replace(PROBLEM, device_type="cpu"), CPU)
    shown = dk.explain(replace(PROBLEM, device_type="cpu"), CPU).candidates
    assert [candidate.predicted_us for candidate in shown] == [None] * len(shown)
    empty = dk.explain(dk.Problem.make(0, 4, 0), H200)
    assert (empty.plan.config, empty.candidates[0].predicted_us) == (MM, None)


REFUSED = {
    "mixed kinds": {"dtype": torch.bfloat16, "b_dtype": torch.int8},
    "two integers": {"dtype": torch.int32, "b_dtype": torch.int64},
    "complex and real": {"dtype": torch.complex64, "b_dtype": torch.float32},
    "an integer result": {"dtype": torch.bfloat16, "out_dtype": torch.int32},
    "a result of another integer": {"dtype": torch.int32, "out_dtype": torch.int64, "device_type": "cpu"},
    "a complex bias": {"dtype": torch.bfloat16, "bias_dtype": torch.complex64},
    "an activated integer": {"dtype": torch.int8, "activation": "relu", "device_type": "cpu"},
    "integers on a GPU": {"dtype": torch.int8},
}


@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_a_problem_is_refused_where_matmul_refuses_its_operands(options):
    options = dict(options)
    dtype = options.pop("dtype")
    with pytest.raises(TypeError, match=r"must be .*got"):
        dk.Problem.make(4, 4, 64, dtype, **options)
    if options.get("device_type") == "cpu" or "b_dtype" in options:
        a = torch.ones(4, 64).to(dtype)
        b = torch.ones(64, 4).to(options.get("b_dtype", dtype))
        with pytest.raises(TypeError):
            dk.matmul(a, b, out_dtype=options.get("out_dtype"), activation=options.get("activation"))


@pytest.mark.parametrize(
    "epilogue",
    [{"activation": "sigmoid"}, {"bias_dtype": torch.float32}, {"activation": "relu", "bias_dtype": torch.bfloat16}],
    ids=str,
)
def test_another_epilogue_shares_what_triton_won(epilogue):
    other = replace(PROBLEM, **epilogue)
    tune(PAIR)
    chosen = dk.plan(other, H200)
    assert (chosen.config, chosen.origin) == (PAIR, "tuned")
    assert chosen.reason.endswith("(with another epilogue)")
    tune(OTHER, problem=other)
    assert dk.plan(other, H200).config == OTHER
    assert dk.plan(PROBLEM, H200).config == PAIR


def test_another_epilogue_does_not_share_what_torch_won():
    tune(MM)
    assert dk.plan(replace(PROBLEM, activation="relu"), H200).origin == "heuristic"


@pytest.mark.parametrize("other", [{"m": 32}, {"n": 128}, {"static_b": True}, {"out_dtype": torch.bfloat16}], ids=str)
def test_another_product_shares_nothing(other):
    tune(PAIR)
    assert dk.plan(replace(PROBLEM, activation="relu", **other), H200).origin == "heuristic"
