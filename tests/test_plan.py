"""What is chosen, in which order, and what `explain` says about it; no GPU is needed to plan for one."""

from __future__ import annotations

import importlib
import json
import types
from dataclasses import replace

import pytest
import torch

import decompose_k as dk
from decompose_k.device import half_instructions
from decompose_k.dtypes import FLOATS, HALVES, dtype_name

# The package's attribute of this name is the function.
planning = importlib.import_module("decompose_k.plan")

H200 = dk.Device(
    "stub H200", capability=(9, 0), multiprocessors=132, shared_bytes=232448, l2_bytes=60 << 20, bandwidth=4.8e12
)
CPU = dk.Device("cpu", type="cpu", vendor="cpu", multiprocessors=2)
PAIR = dk.Config("pair", split_k=16, block_k=128)
OTHER_PAIR = dk.Config("pair", split_k=32, block_k=64)


def on_cpu(m, n, k, dtype=torch.bfloat16, **rest):
    return dk.Problem.make(m, n, k, dtype, device_type="cpu", **rest)


@pytest.fixture
def heuristics(monkeypatch):
    """A stand-in for the ranked candidates, so that the order of decisions is seen alone."""
    stub = types.SimpleNamespace(found=(PAIR, OTHER_PAIR, dk.Config("mm")))
    monkeypatch.setattr(planning, "candidates", lambda problem, device: stub.found)
    monkeypatch.setattr(planning.importlib.util, "find_spec", lambda name: object())
    planning.forget_choices()
    yield stub
    planning.forget_choices()


@pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
def test_on_a_cpu_half_operands_take_the_split_form(dtype):
    chosen = dk.plan(on_cpu(16, 16, 16384, dtype), CPU)
    assert chosen.config == dk.Config("bmm_sum", split_k=4)
    assert chosen.alternatives == (dk.Config("mm"),)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((16, 16, 64), {}),
        ((1, 1, 8192), {}),
        ((1, 256, 7168), {"b_layout": "column"}),
        ((16, 16, 8192), {"b_layout": "column", "activation": "relu"}),
        ((4, 4, 0), {}),
    ],
    ids=str,
)
def test_on_a_cpu_torch_keeps_the_half_products_that_it_is_faster_at(sizes, options):
    assert dk.plan(on_cpu(*sizes, **options), CPU).config == dk.Config("mm")
    for fused in ({"activation": "silu"}, {"bias_dtype": torch.bfloat16}, {"out_dtype": torch.float32}):
        # Small enough for whole widened copies, which is what torch's kernel then works on.
        assert dk.plan(on_cpu(*sizes, **{**options, **fused}), CPU).config == dk.Config("mm")
        large = (*sizes[:2], 1 << 23)
        assert dk.plan(on_cpu(*large, **{**options, **fused}), CPU).config.kernel == "bmm_sum"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.complex64], ids=dtype_name)
def test_on_a_cpu_other_operands_take_torch_mm(dtype):
    assert dk.plan(on_cpu(16, 16, 16384, dtype), CPU).config == dk.Config("mm")


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_name)
@pytest.mark.parametrize("k", [0, 1, 4095, 4096, 1 << 20])
def test_a_batch_invariant_plan_does_not_see_m(dtype, k):
    configs = {dk.plan(on_cpu(m, 24, k, dtype, batch_invariant=True), CPU).config for m in (0, 1, 16, 17, 512)}
    assert len(configs) == 1


@pytest.mark.parametrize(
    "device", [CPU, "cpu", torch.device("cpu"), None], ids=["Device", "name", "torch.device", "none"]
)
def test_a_device_comes_in_every_form(device):
    assert dk.plan(on_cpu(1, 1, 8), device).device.type == "cpu"


def test_an_explicit_split_forces_the_split_form():
    chosen = dk.plan(on_cpu(4, 4, 64, torch.float32), CPU, split_k=3)
    assert chosen.config == dk.Config("bmm_sum", split_k=3)
    assert "split_k=3" in chosen.reason


@pytest.mark.usefixtures("plain_cpu")
def test_plan_and_run_agree(monkeypatch):
    from decompose_k import execute, reference

    seen = []

    def record(config, *arguments, **options):
        seen.append(config)
        return reference.torch_matmul(config, *arguments, **options)

    monkeypatch.setattr(execute, "torch_matmul", record)
    a, b = torch.ones(9, 9000, dtype=torch.bfloat16), torch.ones(9000, 5, dtype=torch.bfloat16)
    dk.matmul(a, b)
    dk.matmul(a, b, split_k=7)
    dk.matmul(a, b, config=dk.Config("bmm_sum", split_k=5))
    dk.matmul(a.float(), b.float())
    expected = dk.plan(on_cpu(9, 5, 9000)).config
    assert expected.kernel == "bmm_sum"
    assert seen == [expected, *(dk.Config("bmm_sum", split_k=s) for s in (7, 5)), dk.Config("mm")]


def test_on_a_gpu_the_first_candidate_is_taken(heuristics):
    chosen = dk.plan(dk.Problem.make(16, 16, 8192), H200)
    assert (chosen.config, chosen.alternatives) == (PAIR, (OTHER_PAIR, dk.Config("mm")))


def test_auto_may_find_torch_best(heuristics):
    heuristics.found = (dk.Config("mm"), PAIR)
    assert dk.plan(dk.Problem.make(16, 16, 8192), H200).config == dk.Config("mm")
    assert dk.plan(dk.Problem.make(16, 16, 8192), H200, backend="triton").config == PAIR
    assert dk.plan(dk.Problem.make(16, 16, 8192), H200, backend="torch").config == dk.Config("mm")


def test_an_explicit_split_on_a_gpu_keeps_the_candidates_tiles(heuristics):
    chosen = dk.plan(dk.Problem.make(16, 16, 8192), H200, split_k=32)
    assert chosen.config == dk.Config("pair", split_k=32, block_k=128)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=dtype_name)
def test_what_triton_cannot_do_falls_back_and_says_so(dtype, heuristics):
    problem = dk.Problem.make(16, 16, 8192, dtype)
    chosen = dk.plan(problem, H200)
    assert chosen.config == dk.Config("mm")
    assert "fp16, bf16, fp32 and fp64 only" in chosen.reason
    with pytest.raises(
        ValueError, match=r"^backend must be auto or torch for .*fp16, bf16, fp32 and fp64 only.*got 'triton'"
    ):
        dk.plan(problem, H200, backend="triton")


def test_without_triton_auto_falls_back_and_says_so(heuristics, monkeypatch):
    monkeypatch.setattr(planning.importlib.util, "find_spec", lambda name: None)
    problem = dk.Problem.make(16, 16, 8192)
    assert "triton is not installed" in dk.plan(problem, H200).reason
    with pytest.raises(ValueError, match="triton is not installed"):
        dk.plan(problem, H200, backend="triton")


def test_no_legal_candidate_is_a_fallback_too(heuristics):
    heuristics.found = ()
    problem = dk.Problem.make(16, 16, 8192)
    assert dk.plan(problem, H200).config == dk.Config("mm")
    with pytest.raises(ValueError, match="no Triton kernel is legal"):
        dk.plan(problem, H200, backend="triton")


def test_the_environment_may_name_the_backend(heuristics, monkeypatch):
    monkeypatch.setenv("DECOMPOSE_K_BACKEND", "torch")
    assert dk.plan(dk.Problem.make(16, 16, 8192), H200).config.backend == "torch"
    assert dk.plan(dk.Problem.make(16, 16, 8192), H200, backend="triton").config == PAIR


def test_explain_on_a_gpu(heuristics):
    problem = dk.Problem.make(64, 64, 16384)
    explanation = dk.explain(problem, H200)
    assert explanation.bytes == 2 * (64 * 16384 * 2) + 64 * 64 * 2
    assert explanation.flops == 2 * 64 * 64 * 16384
    assert explanation.roofline_seconds == pytest.approx(explanation.bytes / 4.8e12)
    assert explanation.waves == pytest.approx(4 * 4 * 16 / 132)
    assert explanation.workspace_bytes == 16 * 64 * 64 * 4
    text = str(explanation)
    for part in (
        "[64, 16384] bf16",
        "stub H200",
        "0.88 us",
        str(PAIR),
        "first candidate",
        str(OTHER_PAIR),
        "262144 bytes",
    ):
        assert part in text
    assert json.loads(json.dumps(explanation.to_json()))["config"] == PAIR.to_json()


def test_explain_on_a_cpu():
    explanation = dk.explain(on_cpu(16, 16, 16384), CPU)
    assert explanation.roofline_seconds is None
    assert explanation.waves == 2.0
    assert explanation.workspace_bytes == 4 * 16 * 16 * 4
    assert "unknown bandwidth" in str(explanation)
    whole = dk.explain(on_cpu(16, 16, 16384, torch.float64), CPU)
    assert (whole.waves, whole.workspace_bytes) == (None, 0)
    assert "left to torch" in str(whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_cpu_that_multiplies_halves_in_hardware_leaves_them_to_torch(dtype):
    quick = replace(CPU, half_instructions=("bf16",))
    problem = dk.Problem.make(64, 64, 65536, dtype, device_type="cpu")
    assert dk.plan(problem, CPU).config.kernel == "bmm_sum"
    assert dk.plan(problem, quick).config.kernel == ("mm" if dtype == torch.bfloat16 else "bmm_sum")
    # What torch would have to round first is still widened.
    assert dk.plan(replace(problem, out_dtype=torch.float32), quick).config.kernel == "bmm_sum"


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("fpu avx2 f16c", ()),
        ("avx512f avx512_bf16", ("bf16",)),
        ("avx512_fp16 amx_bf16", ("bf16", "fp16")),
        ("fp asimd asimdhp", ("fp16",)),
        ("", ()),
    ],
    ids=str,
)
def test_halves_in_hardware_are_read_from_the_flags(flags, found):
    assert half_instructions(flags) == found
