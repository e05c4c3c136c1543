"""The operator that compilers see keeps each of its promises: shapes, strides, choice at run time, export, packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import decompose_k as dk
from decompose_k import execute
from decompose_k.dtypes import HALVES, dtype_name
from support import random, spy_on_engine, with_layout

OPERATOR = torch.ops.decompose_k.matmul
SOURCE = Path(dk.__file__).parents[1]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")


def operands(m=4, n=5, k=33, dtype=torch.float64, device="cpu"):
    return random((m, k), dtype, device), random((k, n), dtype, device, 1), random((n,), dtype, device, 2)


def test_symbolic_sizes_stay_symbolic_and_guard_nothing(device):
    a, b, bias = operands(m=6, k=40, device=device)
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment) as mode:
        fakes = [
            mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * tensor.dim()))
            for tensor in (a, b, bias)
        ]
        before = len(environment.guards)
        result = OPERATOR(*fakes, 1.0, 1.0, "gelu", "fp32")
    assert isinstance(result.shape[0], torch.SymInt)
    assert result.shape[0].node.expr == fakes[0].shape[0].node.expr
    assert result.shape[1].node.expr == fakes[1].shape[1].node.expr
    assert result.stride(0).node.expr == fakes[1].shape[1].node.expr
    assert result.dtype == torch.float32
    assert len(environment.guards) == before


def test_second_derivatives_through_the_operator(device):
    inputs = tuple(tensor.requires_grad_() for tensor in operands(k=7, device=device))

    def call(a, b, bias):
        return OPERATOR(a, b, bias, 0.5, 2.0, "tanh")

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("in_dims", [(0, None), (None, 1), (0, 0)], ids=["a", "b", "both"])
def test_vmap_of_the_operator(in_dims, device):
    shapes = [(3, 4, 33) if in_dims[0] == 0 else (4, 33)]
    shapes.append({None: (33, 5), 0: (3, 33, 5), 1: (33, 3, 5)}[in_dims[1]])
    a, b = (random(shape, torch.float64, device, seed) for seed, shape in enumerate(shapes))
    result = torch.func.vmap(lambda a, b: OPERATOR(a, b, None, 1.0, 1.0, "relu"), in_dims)(a, b)
    expected = torch.func.vmap(lambda a, b: torch.relu(a @ b), in_dims)(a, b)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float64], ids=dtype_name)
@pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
def test_out_dtype_has_gradients_a_cpu_kernel_and_vmap(dtype, out_dtype, device):
    a, b, _ = operands(m=3, k=300, dtype=dtype, device=device)

    def call(a, b):
        return OPERATOR(a, b, None, 1.0, 1.0, None, dtype_name(out_dtype))

    result = call(a, b)
    assert result.dtype == out_dtype
    torch.testing.assert_close(result.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)
    x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
    grad = torch.linspace(-1, 1, result.numel(), dtype=out_dtype, device=device).view_as(result)
    ours = torch.autograd.grad(call(x, y), (x, y), grad)
    assert [g.dtype for g in ours] == [dtype, dtype]
    torch.testing.assert_close(ours[0], (grad.double() @ b.double().T).to(dtype), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(ours[1], (a.double().T @ grad.double()).to(dtype), rtol=1e-2, atol=1e-2)
    batched = torch.func.vmap(lambda row: call(row[None], b)[0])(a)
    assert batched.dtype == out_dtype
    torch.testing.assert_close(batched, result, rtol=1e-5, atol=1e-4)


def test_the_layout_tag_is_there():
    assert torch.Tag.needs_exact_strides in OPERATOR.default.tags
    assert torch.Tag.pt2_compliant_tag in OPERATOR.default.tags


@pytest.fixture
def calls(monkeypatch):
    """What reaches the engine from inside the operator, in order: shapes and strides of a and b."""
    return spy_on_engine(monkeypatch, lambda a, b, _options: (tuple(a.shape), a.stride(), b.stride()))


@needs_compiler
@pytest.mark.parametrize("layout", ["column", "padded", "strided"])
def test_a_compiled_call_sees_the_strides_of_the_eager_one(layout, calls, device):
    a, b, _ = operands(dtype=torch.float32, k=40, device=device)
    a, b = with_layout(a, layout), with_layout(b, layout)

    def call(a, b):
        return OPERATOR(a, b)

    expected = call(a, b)
    assert torch.equal(torch.compile(call)(a, b), expected)
    assert calls[0] == calls[-1]
    assert len(calls) == 2


@pytest.mark.usefixtures("plain_cpu")
def test_the_config_is_chosen_when_the_operator_runs(monkeypatch):
    kernels = []
    run = execute.torch_matmul
    monkeypatch.setattr(
        execute, "torch_matmul", lambda config, *rest, **kw: kernels.append(config) or run(config, *rest, **kw)
    )
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda a, b: OPERATOR(a, b), dynamic=True, fullgraph=True, backend=counter)
    b = random((48, 8192), torch.bfloat16).T
    for m in (64, 2, 65, 3):
        a = random((m, 8192), torch.bfloat16)
        assert torch.equal(compiled(a, b), dk.matmul(a, b))
    assert counter.frame_count == 1
    # A CPU widens chunks where there are enough rows to pay for it, and else takes torch's own kernel.
    assert [config.kernel for config in kernels[::2]] == ["bmm_sum", "mm", "bmm_sum", "mm"]
    assert kernels[::2] == kernels[1::2]


PACKAGE = """
import sys, torch
import decompose_k as dk
model = torch._inductor.aoti_load_package(sys.argv[1])
for m, k in ((2, 64), (5, 96), (33, 2048)):
    generator = torch.Generator().manual_seed(m)
    a, b, bias = (torch.randn(shape, generator=generator) for shape in ((m, k), (k, 6), (6,)))
    expected = dk.matmul(a, b, bias=bias, alpha=0.5, activation="silu", out_dtype=torch.float64) + 1
    assert torch.equal(model(a, b, bias), expected), (m, k)
print("equal")
"""


class Gate(torch.nn.Module):
    """A fused product and something after it for the compiler to generate."""

    def forward(self, a, b, bias):
        return dk.matmul(a, b, bias=bias, alpha=0.5, activation="silu", out_dtype=torch.float64) + 1


@needs_compiler
def test_an_aot_package_with_dynamic_m_and_k_loads_in_a_fresh_process(tmp_path):
    m, k = torch.export.Dim("m", min=2, max=4096), torch.export.Dim("k", min=2, max=1 << 20)
    shapes = {"a": {0: m, 1: k}, "b": {0: k}, "bias": None}
    inputs = tuple(tensor.float() for tensor in operands(m=3, n=6, k=64))
    program = torch.export.export(Gate(), inputs, dynamic_shapes=shapes)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "gate.pt2"))
    command = [sys.executable, "-c", PACKAGE, package]
    run = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "equal"


def test_inference_mode_and_no_grad(device):
    a, b, bias = operands(dtype=torch.float32, device=device)
    compiled = torch.compile(lambda a, b, c: OPERATOR(a, b, c, 1.0, 1.0, "relu"), backend="aot_eager", fullgraph=True)
    expected = dk.matmul(a, b, bias=bias, activation="relu")
    with torch.inference_mode():
        assert torch.equal(compiled(a, b, bias), expected)
    with torch.no_grad():
        assert torch.equal(compiled(a.requires_grad_(), b, bias), expected)
