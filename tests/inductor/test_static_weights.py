"""`static_weights=True`: which products of a compiled model load their weight early, and which may not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import decompose_k as dk
from decompose_k.inductor import static
from decompose_k.inductor.graph_pass import DecomposeKPass
from support import random, spy_on_engine

pytestmark = pytest.mark.usefixtures("empty_caches")
BF16 = torch.bfloat16


@pytest.fixture
def promises(monkeypatch):
    """For each product that the operator runs, whether the weight was promised to be static."""
    return spy_on_engine(monkeypatch, lambda _a, _b, options: options.static_b)


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 16, dtype=BF16)
        self.second = torch.nn.Parameter(random((16, 8), BF16))
        self.register_buffer("third", random((8, 4), BF16))

    def forward(self, x):
        return torch.relu(self.first(x)) @ self.second @ self.third


class Writing(torch.nn.Module):
    """Reads a buffer, then writes it for the next call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", random((64, 8), BF16))

    def forward(self, x):
        result = x @ self.state
        self.state.mul_(2.0)
        return result


def run(model, *inputs, static_weights=True, **options):
    with dk.inductor.enable("everywhere", static_weights=static_weights) as enabled:
        result = torch.compile(model, fullgraph=True, **options)(*inputs)
    return result, enabled.report()


def test_parameters_and_buffers_are_static_at_inference(promises):
    model, x = Layers(), random((3, 64), BF16)
    with torch.no_grad():
        result, report = run(model, x)
        assert len(report.rewritten) == 3
        torch.testing.assert_close(result, model(x))
    assert promises[:3] == [True, True, True]


@pytest.mark.parametrize("static_weights", [False, True])
def test_nothing_is_without_the_promise_or_in_training(static_weights, promises):
    model, x = Layers(), random((3, 64), BF16)
    if not static_weights:
        with torch.no_grad():
            run(model, x, static_weights=False)
    else:
        result, _ = run(model, x)
        result.sum().backward()
    assert promises
    assert not any(promises)


def test_inputs_of_the_model_are_not_weights(promises):
    x, w = random((3, 64), BF16), random((8, 64), BF16)
    with torch.no_grad():
        run(lambda x, w: F.linear(x, w), x, w)
    assert promises == [False]


def test_a_buffer_that_the_graph_writes_is_none(promises):
    model, x = Writing(), random((3, 64), BF16)
    expected = x @ model.state
    with torch.no_grad():
        result, report = run(model, x)
    assert len(report.rewritten) == 1
    torch.testing.assert_close(result, expected)
    assert promises == [False]


def test_what_the_graph_computes_of_a_weight_is_none(promises):
    weight = torch.nn.Parameter(random((64, 8), BF16))

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return x @ (self.weight * 2)

    with torch.no_grad():
        run(Scaled(), random((3, 64), BF16))
    assert promises == [False]


def test_weights_are_found_with_a_dynamic_m_too(promises):
    model = Layers()
    with torch.no_grad():
        run(model, random((3, 64), BF16), dynamic=True)
    assert promises[:3] == [True, True, True]


@pytest.mark.parametrize(
    "context",
    [
        None,
        SimpleNamespace(),
        SimpleNamespace(fw_metadata=None),
        SimpleNamespace(fw_metadata=SimpleNamespace(static_input_indices=[0, 1], input_info=[])),
        SimpleNamespace(fw_metadata=SimpleNamespace(input_info=[SimpleNamespace(mutates_data=False)] * 5)),
    ],
    ids=["no_context", "no_metadata", "none", "other_inputs", "no_indices"],
)
def test_a_compiler_that_tells_less_gets_no_static_weight(context, promises, monkeypatch):
    monkeypatch.setattr(static, "TracingContext", SimpleNamespace(try_get=lambda: context))
    with torch.no_grad():
        run(Layers(), random((3, 64), BF16))
    assert promises[:3] == [False, False, False]


def test_the_setting_is_part_of_the_cache_key():
    keys = {DecomposeKPass("wins", static_weights=static).key() for static in (False, True)}
    assert len(keys) == 2


@pytest.mark.parametrize("wrong", [1, None, "yes"])
def test_the_promise_is_a_bool(wrong):
    with pytest.raises(TypeError, match="static_weights must be True or False; got"):
        dk.inductor.enable(static_weights=wrong)
    assert not dk.inductor.is_enabled()
