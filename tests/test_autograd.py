"""First and second derivatives for a, b and bias through every activation, in the accumulate dtype."""

from __future__ import annotations

import pytest
import torch

import decompose_k as dk
from decompose_k.dtypes import HALVES, dtype_name
from decompose_k.epilogue import apply_activation
from support import ACTIVATION_NAMES, last_place, random

pytestmark = pytest.mark.contract

SMOOTH = [activation for activation in ACTIVATION_NAMES if activation != "relu"]
BIASES = {"none": None, "row": (4,), "matrix": (3, 4), "column": (3, 1), "scalar": (), "one": (1,)}


def leaves(device, bias_shape, dtype=torch.float64, k=7):
    a, b = random((3, k), dtype, device), random((k, 4), dtype, device, 1)
    bias = None if bias_shape is None else random(bias_shape, dtype, device, 2).requires_grad_()
    return a.requires_grad_(), b.requires_grad_(), bias


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_first_derivative(activation, bias, device, backend):
    inputs = leaves(device, BIASES[bias])

    def call(a, b, bias):
        return dk.matmul(a, b, bias=bias, alpha=0.7, beta=-1.5, activation=activation, split_k=3, backend=backend)

    assert torch.autograd.gradcheck(call, inputs, atol=1e-7)


@pytest.mark.parametrize("bias", ["none", "row", "column"])
@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_second_derivative(activation, bias, device):
    inputs = leaves(device, BIASES[bias])

    def call(a, b, bias):
        return dk.matmul(a, b, bias=bias, alpha=0.7, beta=-1.5, activation=activation)

    assert torch.autograd.gradgradcheck(call, inputs, atol=1e-7)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_linear_and_leading_dimensions(has_bias, device):
    x = random((2, 3, 5), torch.float64, device).requires_grad_()
    weight = random((4, 5), torch.float64, device, 1).requires_grad_()
    bias = random((4,), torch.float64, device, 2).requires_grad_() if has_bias else None
    for activation in ("silu", None):

        def call(x, weight, bias, activation=activation):
            return dk.linear(x, weight, bias, activation=activation)

        assert torch.autograd.gradcheck(call, (x, weight, bias))
        assert torch.autograd.gradgradcheck(call, (x, weight, bias))


def test_complex_gradients(device):
    a = random((3, 6), torch.complex128, device).requires_grad_()
    b = random((6, 2), torch.complex128, device, 1).requires_grad_()
    bias = random((2,), torch.complex128, device, 2).requires_grad_()

    def call(a, b, bias):
        return dk.matmul(a, b, bias=bias, alpha=0.5 + 1j, beta=2 - 1j)

    assert torch.autograd.gradcheck(call, (a, b, bias))
    assert torch.autograd.gradgradcheck(call, (a, b, bias))


@pytest.mark.parametrize("shape", [(0, 5, 4), (3, 0, 4), (3, 5, 0)], ids=["M0", "K0", "N0"])
def test_empty_gradients(shape, device):
    m, k, n = shape
    a, b = torch.ones(m, k, device=device, requires_grad=True), torch.ones(k, n, device=device, requires_grad=True)
    bias = torch.ones(n, device=device, requires_grad=True)
    dk.matmul(a, b, bias=bias, activation="gelu").sum().backward()
    assert (a.grad.shape, b.grad.shape, bias.grad.shape) == (a.shape, b.shape, bias.shape)
    reference = torch.nn.functional.gelu(torch.ones(m, n, device=device, dtype=torch.float64).requires_grad_())
    if k == 0:
        z = torch.ones(m, n, dtype=torch.float64, device=device, requires_grad=True)
        torch.nn.functional.gelu(z).sum().backward()
        torch.testing.assert_close(bias.grad.double(), z.grad.sum(0))
    assert reference.shape == (m, n)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=dtype_name)
def test_gradients_are_as_good_as_torch(dtype, activation, device, backend):
    m, n, k = 9, 6, 1030
    values = [random((m, k), dtype, device), random((k, n), dtype, device, 1) / 16, random((n,), dtype, device, 2)]
    grad = random((m, n), dtype, device, 3)

    def gradients(call, dtype, shift=0):
        a, b, bias = (value.to(dtype, copy=True).requires_grad_() for value in values)
        call(a.roll(shift, 1), b.roll(shift, 0), bias).backward(grad.to(dtype))
        return [a.grad, b.grad, bias.grad]

    def ours(a, b, bias):
        return dk.matmul(a, b, bias=bias, activation=activation, backend=backend)

    def by_torch(a, b, bias):
        return apply_activation(torch.addmm(bias, a, b), activation)

    # Rotations of K change torch's rounding and nothing else: they show how large its own error is.
    own = [gradients(by_torch, dtype, shift) for shift in (0, 1, 3, k // 2)]
    expected = gradients(by_torch, torch.float64)
    for index, (mine, true) in enumerate(zip(gradients(ours, dtype), expected, strict=True)):
        assert mine.dtype == dtype
        allowed = 2 * max(float((grads[index].double() - true).abs().max()) for grads in own)
        assert bool(((mine.double() - true).abs() <= allowed + last_place(true, dtype)).all())


def test_each_gradient_has_the_dtype_of_its_input(device):
    a = random((3, 40), torch.bfloat16, device).requires_grad_()
    b = random((40, 4), torch.float32, device, 1).requires_grad_()
    bias = random((4,), torch.float64, device, 2).requires_grad_()
    dk.matmul(a, b, bias=bias, activation="silu", out_dtype=torch.float16).sum().backward()
    assert (a.grad.dtype, b.grad.dtype, bias.grad.dtype) == (a.dtype, b.dtype, bias.dtype)


@pytest.mark.parametrize("wanted", range(3), ids=["a", "b", "bias"])
def test_only_what_is_asked_for(wanted, device):
    inputs = [random(shape, torch.float32, device) for shape in ((3, 8), (8, 4), (4,))]
    inputs[wanted].requires_grad_()
    a, b, bias = inputs
    dk.matmul(a, b, bias=bias, activation="tanh").sum().backward()
    assert [tensor.grad is not None for tensor in inputs] == [index == wanted for index in range(3)]


def test_no_graph_without_need(device):
    a = random((3, 8), torch.float32, device).requires_grad_()
    b = random((8, 4), torch.float32, device)
    with torch.no_grad():
        assert not dk.matmul(a, b).requires_grad
    assert not dk.matmul(a.detach(), b).requires_grad
    assert dk.matmul(a, b).requires_grad


def test_an_input_changed_in_place_is_noticed(device):
    a = random((3, 8), torch.float32, device).requires_grad_()
    b = random((8, 4), torch.float32, device)
    result = dk.matmul(a, b)
    b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_a_batch_of_output_gradients(device):
    a, b, _ = leaves(device, None)
    result = dk.matmul(a, b, activation="tanh")
    grads = random((5, 3, 4), torch.float64, device, 9)
    (batched,) = torch.autograd.grad(result, a, grads, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(result, a, grad, retain_graph=True)[0] for grad in grads]
    torch.testing.assert_close(batched, torch.stack(single))


def test_forward_mode_goes_through_torchs_own_operations(device):
    a, b, _ = leaves(device, None)
    a, b = a.detach(), b.detach()
    tangent = random((3, 7), torch.float64, device, 4)
    value, derivative = torch.func.jvp(lambda x: dk.matmul(x, b, activation="silu"), (a,), (tangent,))
    expected = torch.func.jvp(lambda x: torch.nn.functional.silu(x @ b), (a,), (tangent,))
    torch.testing.assert_close((value, derivative), expected)
