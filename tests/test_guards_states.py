"""States in which something besides the engine has to see a call: guards let none of them through."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

import decompose_k as dk
from decompose_k.calls import CALLS
from guards_for_tests import (
    BF16,
    A,
    B,
    needs_guards,
    warm_blindly,
)

pytestmark = pytest.mark.usefixtures("either_way")


@needs_guards
@pytest.mark.parametrize("silent", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("place", [0, 1, 2], ids=["a", "b", "bias"])
def test_gradients_are_recorded_after_calls_that_recorded_none(silent, place):
    tensors = [A.clone(), B.clone(), torch.zeros(24)]
    tensors[place].requires_grad_()
    a, b, bias = tensors
    with silent():
        warm_blindly(a, b, bias=bias)
    result = dk.matmul(a, b, bias=bias)
    assert result.requires_grad
    torch.testing.assert_close(result, a @ b + bias)
    plain = [tensor.detach() for tensor in tensors]
    CALLS.cache_clear()
    warm_blindly(*plain[:2], bias=plain[2])
    assert dk.matmul(a, b, bias=bias).requires_grad


@needs_guards
def test_a_tangent_is_seen():
    warm_blindly(A, B)
    with forward_ad.dual_level():
        result = dk.matmul(forward_ad.make_dual(A, torch.ones_like(A)), B)
        torch.testing.assert_close(forward_ad.unpack_dual(result).tangent, torch.ones_like(A) @ B)


@needs_guards
def test_transforms_are_seen():
    warm_blindly(A, B)
    batch = torch.randn(3, 6, 64)
    torch.testing.assert_close(torch.vmap(dk.matmul, (0, None))(batch, B), batch @ B)
    gradient = torch.func.grad(lambda a: dk.matmul(a, B).sum())(A)
    torch.testing.assert_close(gradient, torch.ones(6, 24) @ B.T)


@needs_guards
def test_autocast_is_seen():
    warm_blindly(A, B)
    with torch.autocast("cpu", dtype=BF16):
        result = dk.matmul(A, B)
        assert result.dtype == BF16
        assert not result.isnan().any()
        with torch.autocast("cpu", enabled=False):
            assert dk.matmul(A, B).isnan().all()


class Listen(TorchDispatchMode):
    """A mode that notes each operation, of the kind that compilers and their guards look through."""

    def __init__(self):
        super().__init__()
        self.heard = []

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.heard.append(str(function))
        return function(*arguments, **(keywords or {}))


class ListenAsOthers(Listen):
    @classmethod
    def ignore_compile_internals(cls):
        return False


@contextlib.contextmanager
def pushed(mode):
    """A mode as torch's own code may enter it, past `__enter__`."""
    _push_mode(mode)
    try:
        yield mode
    finally:
        _pop_mode()


MODES = {
    "ordinary": ListenAsOthers,
    "that_compilers_look_through": Listen,
    "pushed": lambda: pushed(ListenAsOthers()),
}


@needs_guards
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_dispatch_modes_are_seen(mode):
    warm_blindly(A, B)
    with mode() as listening:
        dk.matmul(A, B)
    assert "decompose_k.matmul.default" in listening.heard


@needs_guards
@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_a_traced_graph_has_the_operator_and_no_constant(pre_dispatch, is_warm):
    if is_warm:
        warm_blindly(A, B)
    graph = make_fx(lambda a, b: dk.matmul(a, b), pre_dispatch=pre_dispatch)(A, B)
    assert "decompose_k.matmul.default" in [str(node.target) for node in graph.graph.nodes]
    other = torch.randn_like(A)
    torch.testing.assert_close(graph(other, B), other @ B)


@needs_guards
def test_recordings_are_seen():
    warm_blindly(A, B)
    with dk.record() as problems:
        dk.matmul(A, B)
    assert len(problems) == 1


@needs_guards
@pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_tracers_are_seen():
    warm_blindly(A, B)
    other = torch.randn_like(A)
    traced = torch.jit.trace(lambda a: dk.matmul(a, B), (A,), check_trace=False)
    torch.testing.assert_close(traced(other), other @ B)
    compiled = torch.compile(lambda a: dk.matmul(a, B), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(other), other @ B)
