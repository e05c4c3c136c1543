"""torch.compile on a GPU: whole models, launches, recompilations, CUDA graphs, autotuning, generated code."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

import decompose_k as dk
from decompose_k import execute
from decompose_k.bench.models import FULL, MODELS, compile_apart, error_of, make_input, make_model, warm_up
from support import assert_as_good_as_torch, random, spy_on_engine

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
# Products of each model that win at M <= 64, and what is fused into them.
ELIGIBLE = {
    "skinny heads": {("silu",), ("bias",), ("bias", "sigmoid", "to fp32"), ("bias", "tanh", "to fp32")},
    "moe block": {("bias", "sigmoid", "to fp32")},
}


@pytest.fixture(autouse=True)
def nothing_compiled(tmp_path):
    """Every test starts with nothing compiled or cached, and leaves the pass off."""
    torch.compiler.reset()
    counters.clear()
    with fresh_cache(dir=str(tmp_path)), torch.no_grad():
        yield
    dk.inductor.disable()
    torch.compiler.reset()


@pytest.fixture
def calls(monkeypatch):
    return spy_on_engine(monkeypatch, lambda a, b, _options: (tuple(a.shape), tuple(b.shape)))


def both(name, device, **options):
    """A model, its fp64 form, itself compiled plainly and with the pass, and the pass's report."""
    model = make_model(name, FULL, BF16, device)
    exact = copy.deepcopy(model).double()
    plain = compile_apart(model, "plain", **options)
    warm_up(plain, FULL, BF16, device)
    with dk.inductor.enable() as enabled:
        ours = compile_apart(model, "ours", **options)
        warm_up(ours, FULL, BF16, device)
    return model, exact, plain, ours, enabled.report()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_right_at_every_m_and_compiled_once(name, device):
    model, exact, plain, ours, report = both(name, device)
    assert {decision.fused for decision in report.rewritten} >= ELIGIBLE[name], str(report)
    before = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in range(1, 513):
            ours(make_input(m, FULL, BF16, device))
    for m in (1, 2, 7, 16, 64, 200, 512):
        x = make_input(m, FULL, BF16, device, seed=m)
        truth = exact(x.double())
        results = ours(x)
        assert error_of(results, truth) <= 2 * error_of(plain(x), truth), m
        for mine, own in zip(results, model(x), strict=True):
            assert (mine.dtype, mine.shape, mine.stride()) == (own.dtype, own.shape, own.stride())
    assert counters["stats"]["unique_graphs"] == before
    assert not counters["graph_break"]


def launched(call):
    """Names of the kernels that a call launches, in order."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("m", [1, 16, 64])
@pytest.mark.parametrize("name", MODELS)
def test_each_rewritten_product_is_one_launch_pair(name, m, device, calls, monkeypatch):
    *_, ours, _report = both(name, device)
    x = make_input(m, FULL, BF16, device)
    calls.clear()
    ours(x)
    assert calls
    by_torch = []
    run = execute.torch_matmul
    monkeypatch.setattr(execute, "torch_matmul", lambda *a, **kw: by_torch.append(1) or run(*a, **kw))
    ours(x)
    products, products_of_torch = len(calls) // 2, len(by_torch)
    kernels = launched(lambda: ours(x))
    partials = sum("partial_kernel" in kernel for kernel in kernels)
    reducers = sum("flat_reduce_kernel" in kernel for kernel in kernels)
    dots = sum("dot_kernel" in kernel for kernel in kernels)
    assert partials == reducers
    # M is dynamic: at this one the plan may prefer torch's own kernel for a product.
    assert partials + dots == products - products_of_torch > 0, kernels
    assert not [kernel for kernel in kernels if "sigmoid" in kernel or "tanh" in kernel], kernels


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("is_enabled", [False, True], ids=["plain", "enabled"])
def test_cuda_graphs(mode, is_enabled, device):
    model = make_model("skinny heads", FULL, BF16, device)
    x = make_input(16, FULL, BF16, device)
    other = make_input(16, FULL, BF16, device, seed=1)
    truths = [copy.deepcopy(model).double()(tokens.double()) for tokens in (x, other)]
    own = [error_of(model(tokens), truth) for tokens, truth in zip((x, other), truths, strict=True)]
    if is_enabled:
        dk.inductor.enable()
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    runs = []
    for _ in range(4):
        for tokens in (x, other):
            torch.compiler.cudagraph_mark_step_begin()
            runs.append([result.clone() for result in compiled(tokens)])
    for index, results in enumerate(runs):
        assert error_of(results, truths[index % 2]) <= 2 * own[index % 2]
        for first, result in zip(runs[2 + index % 2], results, strict=True):
            assert index < 2 or torch.equal(first, result)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert dk.inductor.is_enabled() == is_enabled
    assert not is_enabled or dk.inductor.report().rewritten


def test_max_autotune_with_one_row_is_seen_as_a_product(device):
    layer = torch.nn.Linear(7168, 256, bias=False, dtype=BF16, device=device)
    x = random((1, 7168), BF16, device)
    with dk.inductor.enable("everywhere") as enabled:
        result = torch.compile(lambda x: torch.sigmoid(layer(x)).float(), mode="max-autotune")(x)
    assert_as_good_as_torch(result, x, layer.weight.detach().T, activation="sigmoid", out_dtype=torch.float32)
    (decision,) = enabled.report().rewritten
    assert decision.fused[-2:] == ("sigmoid", "to fp32")


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu", "sigmoid", "tanh"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_training(activation, dtype, device):
    from decompose_k.epilogue import apply_activation

    def model(x, w, b):
        return apply_activation(F.linear(x, w, b), activation)

    x, w = random((16, 7168), dtype, device) / 8, random((64, 7168), dtype, device, 1) / 8
    values = x, w, random((64,), dtype, device, 2)
    grad = random((16, 64), dtype, device, 3)
    results = []
    with torch.enable_grad(), dk.inductor.enable("everywhere") as enabled:
        compiled = torch.compile(model, fullgraph=True)
        for call, kind in ((compiled, dtype), (model, dtype), (model, torch.float64)):
            leaves = [value.to(kind).requires_grad_() for value in values]
            result = call(*leaves)
            results.append((result.detach(), *torch.autograd.grad(result, leaves, grad.to(kind))))
    assert len(enabled.report().rewritten) == 3
    for ours, own, truth in zip(*results, strict=True):
        last_place = torch.finfo(dtype).eps * truth.abs().max()
        assert (ours.double() - truth).abs().max() <= 2 * (own.double() - truth).abs().max() + last_place


def relu_product(a, b):
    return torch.relu(a @ b)


def test_inspection_reads_the_code_for_a_gpu(device):
    plain = dk.inductor.inspect_product(16, 16, 8192, activation="relu", layout="NN", device=device)
    assert plain.plain.kind == "extern, then pointwise"
    assert plain.enabled.kind == "operator"
    # With the compiler's own GEMM templates alone and a K this long, its decompose-k is the only candidate.
    with inductor_config.patch(max_autotune_gemm_backends="TRITON"):
        tuned = dk.inductor.inspect_product(
            16, 16, 8192, activation="relu", layout="NN", mode="max-autotune-no-cudagraphs", device=device
        )
    assert tuned.plain.kind == "decompose-k, then pointwise", str(tuned)
    assert tuned.plain.split_k in (2, 4, 8, 16, 32, 64, 128, 256)


@pytest.mark.parametrize("boundary", ["mm", "mm_relu"])
def test_autotuning_exact_sizes(boundary, device):
    a, b = random((16, 8192), BF16, device), random((8192, 16), BF16, device, 1)
    activation = "relu" if boundary == "mm_relu" else None
    with dk.inductor.autotune(boundary) as installed:
        result = torch.compile(relu_product if activation else torch.mm)(a, b)
    assert len(installed.report().rewritten) == 1
    assert_as_good_as_torch(result, a, b, activation=activation)


def test_autotuning_ranges_of_m(device):
    tuned = dk.inductor.autotune("mm_relu", dispatch="range")
    compiled = torch.compile(lambda a, b: tuned(a, b), fullgraph=True)
    b = random((7168, 64), BF16, device, 1)
    graphs = set()
    for m in (16, 2, 8, 9, 32, 33, 128, 129, 512, 513, 700, 1):
        a = random((m, 7168), BF16, device)
        if m == 16:
            torch._dynamo.mark_dynamic(a, 0)
        assert_as_good_as_torch(compiled(a, b), a, b, activation="relu")
        graphs.add(counters["stats"]["unique_graphs"] if m > 1 else None)
    # One graph for every M above 1.
    assert len(graphs - {None}) == 1
