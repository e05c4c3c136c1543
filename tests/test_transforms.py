"""The product inside torch's machinery: compile, export, vmap, func.grad, autocast, fake tensors, subclasses."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import decompose_k as dk
from decompose_k import ops
from support import random

OPERATOR = torch.ops.decompose_k.matmul


def operands(dtype=torch.float32, m=4, n=5, k=33, device="cpu"):
    return random((m, k), dtype, device), random((k, n), dtype, device, 1), random((n,), dtype, device, 2)


SAMPLES = {
    "plain": lambda a, b, c: (a, b),
    "bias": lambda a, b, c: (a, b, c),
    "epilogue": lambda a, b, c: (a, b, c, 0.5, 2.0, "silu"),
    "out_dtype": lambda a, b, c: (a, b, c, 1.0, 1.0, "relu", "fp64"),
    "split_k": lambda a, b, c: (a, b, None, 1.0, 1.0, None, None, None, False, False, 3),
    "invariant": lambda a, b, c: (a, b, c, 1.0, 1.0, "gelu", None, "ieee", True),
    "config": lambda a, b, c: (a, b, c, 1.0, 1.0, None, None, None, False, False, None, "auto", CONFIG_TEXT),
    "empty": lambda a, b, c: (a[:, :0], b[:0], c),
    "strided": lambda a, b, c: (a.t().contiguous().t(), b.t().contiguous().t(), c),
}
CONFIG_TEXT = ops._config_text(dk.Config("bmm_sum", split_k=4))


@pytest.mark.parametrize("requires_grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_opcheck(sample, requires_grad, device):
    a, b, bias = operands(device=device)
    if requires_grad:
        for tensor in (a, b, bias):
            tensor.requires_grad_()
    results = torch.library.opcheck(OPERATOR, SAMPLES[sample](a, b, bias))
    assert set(results.values()) == {"SUCCESS"}


def test_the_operator_has_the_bits_of_the_direct_call(device):
    a, b, bias = operands(torch.bfloat16, k=5000, device=device)
    direct = dk.matmul(a, b, bias=bias, activation="gelu")
    assert torch.equal(OPERATOR(a, b, bias, 1.0, 1.0, "gelu"), direct)


def test_a_config_survives_the_operator_as_text():
    config = dk.Config("bmm_sum", split_k=7, block_m=64, reducer="tile", input_precision="tf32x3")
    assert ops._config_from_text(ops._config_text(config)) == config
    with pytest.raises(ValueError, match=r"^config must hold"):
        ops._config_from_text("mm 1")


def test_plain_tensors_do_not_cross_the_operator_boundary(device):
    a, b, bias = operands(device=device)
    assert not ops.needs_operator(a, b, bias)
    assert not ops.needs_operator(a, torch.nn.Parameter(b), None)
    assert ops.needs_operator(a.to("meta"), b, None)
    with FakeTensorMode():
        assert ops.needs_operator(a, b, None)
    torch.func.vmap(lambda x: [None, _require(ops.needs_operator(x, b, None))][0] or x)(a[None])


def _require(condition):
    assert condition


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(dynamic, device):
    def call(a, b, bias):
        rows = dk.linear(a, b.t(), bias, activation="gelu", split_k=2)
        return dk.matmul(a * 2, b, bias=bias, config=dk.Config("bmm_sum", split_k=3)) + rows

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for m, k in ((4, 33), (6, 40)):
        a, b, bias = (tensor.requires_grad_() for tensor in operands(m=m, k=k, device=device))
        expected = call(a, b, bias)
        result = compiled(a, b, bias)
        assert torch.equal(result, expected)
        grad = torch.ones_like(result)
        ours = torch.autograd.grad(result, (a, b, bias), grad)
        for mine, eager in zip(ours, torch.autograd.grad(expected, (a, b, bias), grad), strict=True):
            torch.testing.assert_close(mine, eager)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_compile_with_inductor(device):
    def call(a, b, bias):
        return torch.sin(dk.matmul(a, b, bias=bias, activation="relu", out_dtype=torch.float32)) + 1

    a, b, bias = operands(torch.bfloat16, device=device)
    result = torch.compile(call, fullgraph=True)(a, b, bias)
    torch.testing.assert_close(result, call(a, b, bias))


def test_compile_with_out_and_a_batch(device):
    def call(a, b, out):
        dk.matmul(a, b, out=out, activation="tanh")
        return out * 2

    a, b = random((2, 3, 40), torch.float32, device), random((40, 5), torch.float32, device, 1)
    out = torch.zeros(2, 3, 5, device=device)
    result = torch.compile(call, fullgraph=True, backend="aot_eager")(a, b, out)
    expected = dk.matmul(a, b, activation="tanh")
    assert torch.equal(out, expected)
    assert torch.equal(result, expected * 2)


def test_a_wrong_argument_is_clear_while_compiling():
    compiled = torch.compile(lambda a, b: dk.matmul(a, b), backend="aot_eager")
    with pytest.raises(Exception, match="b must have K = 3"):
        compiled(torch.ones(2, 3), torch.ones(4, 5))


@pytest.mark.parametrize("strict", [False, True], ids=["draft", "strict"])
def test_export_with_dynamic_m_and_k(strict, device):
    class Gate(torch.nn.Module):
        def forward(self, a, b, bias):
            return dk.matmul(a, b, bias=bias, activation="sigmoid")

    m, k = torch.export.Dim("m", min=2, max=4096), torch.export.Dim("k", min=2, max=1 << 20)
    shapes = {"a": {0: m, 1: k}, "b": {0: k}, "bias": None}
    program = torch.export.export(Gate(), operands(device=device), dynamic_shapes=shapes, strict=strict)
    assert any(node.target is OPERATOR.default for node in program.graph.nodes)
    for rows, depth in ((2, 7), (9, 8192)):
        a, b, bias = operands(m=rows, k=depth, device=device)
        assert torch.equal(program.module()(a, b, bias), dk.matmul(a, b, bias=bias, activation="sigmoid"))


VMAPS = {
    "a": (0, None, None),
    "a last": (2, None, None),
    "b": (None, 0, None),
    "b last": (None, 2, None),
    "bias": (None, None, 0),
    "a and b": (0, 1, None),
    "all": (1, 0, 1),
    "a and bias": (0, None, 0),
}


@pytest.mark.parametrize("bias_shape", [(5,), (4, 5), (4, 1), ()], ids=str)
@pytest.mark.parametrize("in_dims", VMAPS.values(), ids=VMAPS)
def test_vmap(in_dims, bias_shape, device):
    shapes = [(4, 33), (33, 5), bias_shape]
    in_dims = tuple(None if dim is None else min(dim, len(shape)) for dim, shape in zip(in_dims, shapes, strict=True))
    tensors = []
    for index, (shape, dim) in enumerate(zip(shapes, in_dims, strict=True)):
        batched = shape if dim is None else (*shape[:dim], 3, *shape[dim:])
        tensors.append(random(batched, torch.float64, device, index))

    def call(a, b, bias):
        return dk.matmul(a, b, bias=bias, activation="silu", alpha=0.5)

    def by_torch(a, b, bias):
        return torch.nn.functional.silu(0.5 * (a @ b) + bias)

    result = torch.func.vmap(call, in_dims)(*tensors)
    torch.testing.assert_close(result, torch.func.vmap(by_torch, in_dims)(*tensors))


def test_vmap_of_empty_and_nested(device):
    a, b, _ = operands(device=device)
    assert torch.func.vmap(lambda x: dk.matmul(x, b[:0]))(a.new_zeros(3, 4, 0)).shape == (3, 4, 5)
    assert torch.func.vmap(lambda x: dk.matmul(x, b))(a.new_zeros(3, 0, 33)).shape == (3, 0, 5)
    x = random((2, 3, 4, 33), torch.float32, device)
    nested = torch.func.vmap(torch.func.vmap(lambda x: dk.matmul(x, b)))(x)
    torch.testing.assert_close(nested, x @ b)


def test_func_grad_and_hessian(device):
    a, b, bias = operands(torch.float64, k=6, device=device)

    def call(a):
        return dk.matmul(a, b, bias=bias, activation="tanh").square().sum()

    def by_torch(a):
        return torch.tanh(a @ b + bias).square().sum()

    torch.testing.assert_close(torch.func.grad(call)(a), torch.func.grad(by_torch)(a))
    per_example = torch.func.vmap(torch.func.grad(lambda row: call(row[None])))
    torch.testing.assert_close(per_example(a), torch.func.vmap(torch.func.grad(lambda row: by_torch(row[None])))(a))
    twice = torch.func.grad(lambda a: torch.func.grad(call)(a).sum())(a)
    torch.testing.assert_close(twice, torch.func.grad(lambda a: torch.func.grad(by_torch)(a).sum())(a))


@pytest.mark.parametrize("b_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("route", ["direct", "operator", "composite"])
def test_autocast_is_that_of_torch_mm(route, b_dtype, device):
    a, b, _bias = operands(k=300, device=device)
    b = b.to(b_dtype)
    call = {
        "direct": dk.matmul,
        "operator": OPERATOR,
        "composite": lambda a, b: dk.matmul(a.as_subclass(Loud), b).as_subclass(torch.Tensor),
    }[route]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        result = call(a, b)
        assert result.dtype == torch.mm(a, b).dtype == torch.bfloat16
        assert dk.matmul(a, b, out_dtype=torch.float32).dtype == torch.float32
        assert dk.matmul(a.double(), b.double()).dtype == torch.float64
        out = torch.zeros(4, 5, dtype=torch.bfloat16, device=device)
        assert torch.equal(dk.matmul(a, b, out=out), dk.matmul(a, b))
    torch.testing.assert_close(result, dk.matmul(a.bfloat16(), b.bfloat16()), rtol=0, atol=0)


def test_gradients_through_autocast(device):
    a, b, bias = (tensor.requires_grad_() for tensor in operands(k=300, device=device))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        result = dk.matmul(a, b, bias=bias, activation="silu")
        result.float().sum().backward()
    assert a.grad.dtype == b.grad.dtype == torch.float32
    x, y = a.detach().bfloat16().requires_grad_(), b.detach().bfloat16().requires_grad_()
    dk.matmul(x, y, bias=bias.detach(), activation="silu").float().sum().backward()
    assert torch.equal(a.grad, x.grad.float())
    assert torch.equal(b.grad, y.grad.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fake_and_meta_tensors_have_the_shape_strides_and_dtype_of_real_ones(dtype, device):
    a, b, bias = operands(dtype, device=device)
    calls = {
        "matmul": lambda a, b, c: dk.matmul(a, b, bias=c, out_dtype=torch.float32),
        "transposed": lambda a, b, c: dk.matmul(a.t(), a),
        "linear": lambda a, b, c: dk.linear(a[None, :, :], b.t(), c),
        "empty": lambda a, b, c: dk.matmul(a[:, :0], b[:0], bias=c),
    }
    for name, call in calls.items():
        real = call(a, b, bias)
        meta = call(a.to("meta"), b.to("meta"), bias.to("meta"))
        with FakeTensorMode() as mode:
            fake = call(*(mode.from_tensor(tensor) for tensor in (a, b, bias)))
        assert meta.device.type == "meta"
        assert fake.device == real.device
        for other in (fake, meta):
            assert (other.shape, other.stride(), other.dtype) == (real.shape, real.stride(), real.dtype), name


class Quiet(torch.Tensor):
    """A subclass without a meaning of its own."""


class Loud(torch.Tensor):
    """A subclass that watches torch's functions and knows no other."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert "decompose_k" not in str(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("kind", [Quiet, Loud])
def test_tensor_subclasses(kind, device):
    a, b, bias = operands(k=400, device=device)
    result = dk.matmul(a.as_subclass(kind), b, bias=bias, activation="relu", alpha=0.5, beta=2.0)
    assert type(result) is kind
    expected = dk.matmul(a, b, bias=bias, activation="relu", alpha=0.5, beta=2.0)
    torch.testing.assert_close(result.as_subclass(torch.Tensor), expected)


def test_a_dispatch_mode_sees_the_operator(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    a, b, _ = operands(device=device)
    with Recorder() as recorder:
        dk.matmul(a, b)
    assert OPERATOR.default in recorder.seen


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_jit_tracer_records_the_product_and_not_its_value():
    a, b = torch.randn(3, 64), torch.randn(64, 5)
    traced = torch.jit.trace(lambda x, y: dk.matmul(x, y, activation="relu"), (a, b))
    assert "decompose_k::matmul" in str(traced.graph)
    assert torch.equal(traced(a + 1, b), dk.matmul(a + 1, b, activation="relu"))
