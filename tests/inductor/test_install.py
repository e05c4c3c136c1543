"""`enable` shares torch's config slot: others' passes run, come back, and cached graphs are never taken for others."""

from __future__ import annotations

import pickle
import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import decompose_k as dk
from decompose_k import cache
from decompose_k.inductor import graph_pass, slots
from decompose_k.inductor.graph_pass import DecomposeKPass
from stub_devices import DEVICES, entry_of
from support import random


def needs_compiler(test):
    """Run a test with an empty cache, since a graph from a cache is not decided anew; not where nothing can compile."""
    test = pytest.mark.usefixtures("empty_caches")(test)
    return pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")(test)


def traced_product():
    return torch.fx.experimental.proxy_tensor.make_fx(torch.mm, tracing_mode="fake")(torch.ones(2, 3), torch.ones(3, 2))


class Foreign(CustomGraphPass):
    """Another library's pass: counts its runs."""

    def __init__(self, name="foreign"):
        self.name = name
        self.runs = 0

    def __call__(self, graph):
        self.runs += 1

    def uuid(self):
        return self.name


def slot():
    return config.joint_custom_pre_pass


def test_enable_and_disable():
    assert not dk.inductor.is_enabled()
    enabled = dk.inductor.enable()
    assert dk.inductor.is_enabled()
    enabled.disable()
    assert not dk.inductor.is_enabled()
    assert slot() is None
    dk.inductor.enable("everywhere")
    dk.inductor.disable()
    assert slot() is None
    dk.inductor.disable()
    assert slot() is None


def test_a_context_disables_also_after_an_error():
    with pytest.raises(KeyError), dk.inductor.enable():
        raise KeyError("x")
    assert slot() is None


def test_a_wrong_where_is_clear():
    with pytest.raises(ValueError, match=r"^where must be one of wins, everywhere; got 'always'"):
        dk.inductor.enable(where="always")
    assert slot() is None


def test_contexts_nest():
    with dk.inductor.enable("everywhere"):
        outer = slot()
        with dk.inductor.enable("wins"):
            assert slot().where == "wins"
            assert slot().previous == ()
        assert slot() is outer
        assert outer.is_active
    assert slot() is None


def test_contexts_that_end_in_another_order():
    first, second = dk.inductor.enable("everywhere"), dk.inductor.enable("wins")
    first.disable()
    assert slot().where == "wins"
    second.disable()
    assert slot() is None


def test_another_pass_runs_first_and_comes_back():
    foreign = Foreign()
    config.joint_custom_pre_pass = foreign
    with dk.inductor.enable("everywhere") as enabled:
        module = traced_product()
        slot()(module.graph)
        assert foreign.runs == 1
        assert len(enabled.report().rewritten) == 1
    assert slot() is foreign
    dk.inductor.enable()
    dk.inductor.enable()
    dk.inductor.disable()
    assert slot() is foreign


def test_a_plain_function_in_the_slot_still_runs():
    seen = []
    config.joint_custom_pre_pass = seen.append
    with dk.inductor.enable():
        graph = torch.fx.Graph()
        slot()(graph)
        assert slot().uuid() is None
    assert seen == [graph]
    assert slot() == seen.append


def test_several_passes_in_the_slot():
    first, second, third = Foreign("1"), Foreign("2"), Foreign("3")
    config.joint_custom_pre_pass = [first, second]
    enabled = dk.inductor.enable()
    ours = slot()
    assert ours.previous == (first, second)
    # Another library that joins a sequence rather than replacing it.
    config.joint_custom_pre_pass = [ours, third]
    enabled.disable()
    assert slot() == [first, second, third]
    config.joint_custom_pre_pass = [third]
    dk.inductor.enable()
    dk.inductor.disable()
    assert slot() == [third] or slot() is third


class Wrapper(Foreign):
    """A pass that took ours from the slot and runs it itself."""

    def __init__(self, inner):
        super().__init__("wrapper")
        self.inner = inner

    def __call__(self, graph):
        super().__call__(graph)
        self.inner(graph)


def test_a_pass_that_wraps_ours_keeps_its_place_and_ours_does_nothing():
    enabled = dk.inductor.enable("everywhere")
    wrapper = Wrapper(slot())
    config.joint_custom_pre_pass = wrapper
    enabled.disable()
    assert slot() is wrapper
    module = traced_product()
    wrapper(module.graph)
    assert enabled.report().decisions == ()
    assert wrapper.runs == 1


def test_uuid_is_stable_and_tells_settings_apart(monkeypatch):
    def uuid(where="wins", previous=None):
        made = DecomposeKPass(where)
        made.previous = slots.passes_in(previous)
        return made.uuid()

    base = uuid()
    assert base == uuid()
    assert pickle.loads(pickle.dumps(base)) == base
    others = [uuid("everywhere"), uuid(previous=Foreign("1")), uuid(previous=(Foreign("1"), Foreign("2")))]
    monkeypatch.setenv("DECOMPOSE_K_BACKEND", "torch")
    others.append(uuid())
    monkeypatch.delenv("DECOMPOSE_K_BACKEND")
    monkeypatch.setattr(graph_pass, "__version__", "99.0")
    others.append(uuid())
    monkeypatch.undo()
    monkeypatch.setattr(graph_pass, "fingerprint", lambda: "other code")
    others.append(uuid())
    monkeypatch.undo()
    off = DecomposeKPass("wins")
    off.is_active = False
    others.append(off.uuid())
    assert all(others)
    assert len({base, *others}) == 1 + len(others)


def test_what_is_remembered_is_part_of_the_uuid(tmp_path, monkeypatch):
    monkeypatch.setenv("DECOMPOSE_K_CACHE_DIR", str(tmp_path))
    cache.forget()
    device, problem = DEVICES["H200"], dk.Problem.make(16, 256, 7168)
    uuids = [DecomposeKPass("wins").uuid()]
    try:
        for split in (8, 16):
            cache.remember([entry_of(problem, dk.Config("pair", split_k=split))], device)
            uuids.append(DecomposeKPass("wins").uuid())
        cache.remember([entry_of(problem, dk.Config("pair", split_k=32))], device, save=False)
        uuids.append(DecomposeKPass("wins").uuid())
        assert len(set(uuids)) == 4
        cache.clear()
        assert DecomposeKPass("wins").uuid() == uuids[0]
    finally:
        cache.clear()


def test_an_earlier_pass_without_a_uuid_turns_caches_off():
    for earlier in ((Foreign(""),), (Foreign("1"), lambda graph: None)):
        made = DecomposeKPass("wins")
        made.previous = earlier
        assert made.uuid() is None


def test_the_fingerprint_is_of_the_code(tmp_path):
    assert graph_pass.fingerprint() == graph_pass.fingerprint()
    assert len(graph_pass.fingerprint()) == 16


def test_reports_outlive_their_pass():
    dk.inductor.disable()
    with dk.inductor.enable("everywhere"):
        module = traced_product()
        slot()(module.graph)
    assert len(dk.inductor.report().rewritten) == 1
    text = str(dk.inductor.report())
    assert text.startswith("1 of 1 products rewritten\nrewritten mm [2, 3] fp32 @ [3, 2] fp32")
    assert "because it was asked for everywhere; not further: it is a result of the graph" in text
    with dk.inductor.enable():
        assert dk.inductor.report().decisions == ()
    assert len(slots._passes) == 1


class Mlp(torch.nn.Module):
    """Two linear layers with what usually follows them."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = torch.nn.Linear(256, 24, dtype=dtype)
        self.head = torch.nn.Linear(24, 5, bias=False, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)

    def forward(self, x):
        return torch.sigmoid(self.head(torch.relu(self.up(x)))).float()


@needs_compiler
def test_inference_and_training_with_inductor(calls):
    model, x = Mlp(), random((3, 4, 256), torch.float32)
    own = model(x)
    own.square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with dk.inductor.enable("everywhere") as enabled:
        result = torch.compile(model, fullgraph=True)(x)
        result.square().sum().backward()
        torch.testing.assert_close(result, own)
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, grad)
        # Two products forward, and backward two weight gradients and the gradient between the layers.
        assert len(enabled.report().rewritten) == 5
        assert len(calls) == 5
        assert [decision.fused for decision in enabled.report().rewritten[:2]] == [("bias", "relu"), ("sigmoid",)]
        assert enabled.report().rewritten[0].place.startswith("test_install.py:")
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), own)
        assert len(calls) == 7


@needs_compiler
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_other_modes(mode, calls):
    model, x = Mlp(torch.bfloat16), random((3, 256), torch.bfloat16)
    with torch.no_grad(), dk.inductor.enable("everywhere"):
        result = torch.compile(model, mode=mode, fullgraph=True)(x)
        torch.testing.assert_close(result, model(x), rtol=0.02, atol=0.02)
    assert calls == [((3, 256), (256, 24)), ((3, 24), (24, 5))]


@needs_compiler
def test_a_cached_graph_is_not_taken_for_one_with_other_settings(calls):
    model, x = Mlp(), random((3, 256), torch.float32)

    def run():
        torch.compiler.reset()
        counters.clear()
        calls.clear()
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(model)(x), model(x))
        hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        return len(calls), hits > 0

    assert run() == (0, False)
    assert run() == (0, True)
    with dk.inductor.enable("everywhere"):
        assert run() == (2, False)
    assert run() == (0, True)
    with dk.inductor.enable("wins"):
        assert run() == (0, False)
    with dk.inductor.enable("everywhere") as enabled:
        assert run() == (2, True)
        assert enabled.report().decisions == ()


@needs_compiler
def test_autocast_of_the_caller_does_not_reach_the_operator(calls):
    layer, x = torch.nn.Linear(256, 5), random((3, 256), torch.float32)

    def model(x):
        with torch.autocast("cpu", enabled=False):
            wide = torch.relu(layer(x))
        return wide, layer(x)

    with torch.no_grad(), dk.inductor.enable("everywhere"), torch.autocast("cpu", dtype=torch.bfloat16):
        wide, narrow = torch.compile(model, fullgraph=True)(x)
        assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
        torch.testing.assert_close(wide, model(x)[0])
        torch.testing.assert_close(narrow, model(x)[1], rtol=0.02, atol=0.02)


@needs_compiler
def test_an_aot_package_of_a_plain_model_has_the_operator(calls, tmp_path):
    model, x = Mlp(), random((3, 256), torch.float32)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("m", min=2, max=512)}})
    with dk.inductor.enable("everywhere") as enabled:
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "mlp.pt2"))
    assert len(enabled.report().rewritten) == 2
    loaded = torch._inductor.aoti_load_package(package)
    for m in (2, 3, 65):
        calls.clear()
        x = random((m, 256), torch.float32)
        torch.testing.assert_close(loaded(x), model(x))
        assert len(calls) == 2
