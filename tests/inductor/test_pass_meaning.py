"""What the pass rewrites means the same: products with every tail, 2-D and 3-D, static and dynamic, trained and not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from decompose_k.dtypes import dtype_name
from decompose_k.epilogue import ACTIVATIONS, apply_activation
from rewriting import OPERATOR, Rewriter, assert_no_worse
from support import random

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PRODUCTS = {
    "mm": lambda x, w, b: x.reshape(-1, x.shape[-1]) @ w.t(),
    "addmm": lambda x, w, b: torch.addmm(b, x.reshape(-1, x.shape[-1]), w.t()),
    "linear": lambda x, w, b: F.linear(x, w),
    "linear with bias": lambda x, w, b: F.linear(x, w, b),
    "matmul then bias": lambda x, w, b: x @ w.t() + b,
    "bias first": lambda x, w, b: b + x @ w.t(),
    "subtracted": lambda x, w, b: x @ w.t() - b,
    "subtracted from": lambda x, w, b: b - x @ w.t(),
    "scaled addition": lambda x, w, b: torch.add(x @ w.t(), b, alpha=3),
    "alpha and beta": lambda x, w, b: torch.addmm(b, x.reshape(-1, x.shape[-1]), w.t(), alpha=0.5, beta=-2.0),
    "scaled": lambda x, w, b: (x @ w.t()) * 0.125,
    "scaled after bias": lambda x, w, b: F.linear(x, w, b) * 0.3,
    "divided": lambda x, w, b: F.linear(x, w, b) / 3.0,
    "negated": lambda x, w, b: -(x @ w.t()),
}


CASES = [
    *((product, activation, torch.bfloat16) for product in PRODUCTS for activation in (None, *ACTIVATIONS)),
    *((product, None, torch.float32) for product in PRODUCTS),
    *(("linear with bias", activation, dtype) for activation in ACTIVATIONS for dtype in DTYPES[:1] + DTYPES[2:]),
]
TRAINED = [
    *(("linear with bias", activation, torch.bfloat16) for activation in (None, *ACTIVATIONS)),
    *(
        (product, activation, torch.float32)
        for product in ("linear", "scaled after bias")
        for activation in ACTIVATIONS
    ),
]


def inputs(dtype, *, rows=(2, 7), n=6, k=300):
    return random((*rows, k), dtype) / 4, random((n, k), dtype, seed=1) / 4, random((n,), dtype, seed=2)


def truths(function, tensors):
    return function(*(tensor.detach().double() for tensor in tensors))


@pytest.mark.parametrize(("product", "activation", "dtype"), CASES, ids=lambda case: str(case).removeprefix("torch."))
def test_inference(product, activation, dtype):
    def model(x, w, b):
        return apply_activation(PRODUCTS[product](x, w, b), activation)

    tensors = inputs(dtype)
    rewriter = Rewriter()
    result = rewriter.compile(model)(*tensors)
    assert_no_worse(result, model(*tensors), truths(model, tensors))
    (decision,) = rewriter.rewritten
    assert rewriter.left == []
    assert rewriter.targets.count(OPERATOR) == 1
    if activation is not None:
        assert decision.fused[-1] == activation
    # Views may surround the operator; nothing is computed beside it.
    shapes = {aten.view.default, aten.permute.default, aten._unsafe_view.default, aten.reshape.default}
    assert set(rewriter.targets) <= {OPERATOR, *shapes}


@pytest.mark.parametrize(("product", "activation", "dtype"), TRAINED, ids=lambda case: str(case).removeprefix("torch."))
def test_training(product, activation, dtype):
    def model(x, w, b):
        return apply_activation(PRODUCTS[product](x, w, b), activation)

    grads = []
    grad = random((2, 7, 6), torch.float64, seed=3)
    tensors = inputs(dtype)
    rewriter = Rewriter()
    for call, kind in ((rewriter.compile(model), dtype), (model, dtype), (model, torch.float64)):
        leaves = [tensor.detach().to(kind).requires_grad_() for tensor in tensors]
        result = call(*leaves)
        used = [leaf for leaf in leaves if product != "linear" or leaf is not leaves[2]]
        grads.append((result.detach(), *torch.autograd.grad(result, used, grad.to(kind))))
    for name, ours, own, true in zip(("out", "x", "w", "b"), *grads, strict=False):
        assert_no_worse(ours, own, true, name)
    # The product and the two of its backward.
    assert len(rewriter.rewritten) == 3
    fused = rewriter.rewritten[0].fused
    # These have a derivative that needs their result alone; of the others the value before them is used twice.
    assert (activation in fused) == (activation in ("relu", "sigmoid", "tanh"))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_one_graph_serves_every_m(activation):
    def model(x, w, b):
        return apply_activation(F.linear(x, w, b), activation)

    rewriter = Rewriter()
    compiled = rewriter.compile(model, dynamic=True)
    for rows in ((3, 7), (2, 5), (64, 9), (2, 2)):
        tensors = inputs(torch.bfloat16, rows=rows)
        assert_no_worse(compiled(*tensors), model(*tensors), truths(model, tensors))
    assert rewriter.frames == 1
    assert len(rewriter.rewritten) == 1


def test_autocast_conversions_are_part_of_it():
    layer = torch.nn.Linear(300, 6)
    gate = torch.nn.Linear(6, 4)

    def model(x):
        return torch.sigmoid(gate(torch.relu(layer(x)))).float()

    x = random((2, 7, 300), torch.float32)
    rewriter = Rewriter()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled = rewriter.compile(model)
        result = compiled(x)
        own = model(x)
    assert result.dtype == own.dtype == torch.float32
    true = torch.sigmoid(
        F.linear(
            torch.relu(F.linear(x.double(), layer.weight.double(), layer.bias.double())),
            gate.weight.double(),
            gate.bias.double(),
        )
    )
    assert_no_worse(result, own, true)
    result.sum().backward()
    ours = [parameter.grad.clone() for parameter in (*layer.parameters(), *gate.parameters())]
    layer.zero_grad()
    gate.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own = model(x)
    own.sum().backward()
    for mine, parameter in zip(ours, (*layer.parameters(), *gate.parameters()), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, parameter.grad, rtol=0.05, atol=0.02)
    assert [decision.fused for decision in rewriter.rewritten[:2]] == [("bias", "relu"), ("bias", "sigmoid")]


def test_the_weight_gradient_is_converted_by_the_operator():
    layer = torch.nn.Linear(300, 6)
    rewriter = Rewriter()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = rewriter.compile(lambda x: layer(x))(random((5, 300), torch.float32))
    result.float().sum().backward()
    assert rewriter.rewritten[-1].fused == ("to fp32",)


def test_a_residual_is_a_bias():
    def model(x, w, residual):
        return torch.relu(F.linear(x, w) + residual)

    x, w, _ = inputs(torch.bfloat16)
    for residual in (random((2, 7, 6), torch.bfloat16, seed=5), random((1, 1, 6), torch.bfloat16, seed=5)):
        rewriter = Rewriter()
        result = rewriter.compile(model)(x, w, residual)
        assert_no_worse(result, model(x, w, residual), truths(model, (x, w, residual)))
        assert rewriter.rewritten[0].fused == ("bias", "relu")


def test_a_bias_of_higher_precision_is_kept():
    def model(x, w, bias):
        return torch.relu(F.linear(x, w) + bias)

    x, w, bias = inputs(torch.bfloat16)
    bias = random((6,), torch.float32, seed=9)
    rewriter = Rewriter()
    result = rewriter.compile(model)(x, w, bias)
    assert result.dtype == torch.float32
    assert_no_worse(result, model(x, w, bias), truths(model, (x, w, bias)))
    assert rewriter.rewritten[0].fused == ("bias", "relu")


@pytest.mark.parametrize("is_weight_wide", [False, True], ids=["both widened", "bf16 x fp32"])
def test_an_operand_is_taken_before_it_is_widened(is_weight_wide):
    def model(x, w):
        return torch.sigmoid(x.float() @ w.float().t())

    x, w, _ = inputs(torch.bfloat16)
    w = w.float() if is_weight_wide else w
    rewriter = Rewriter()
    result = rewriter.compile(model)(x, w)
    assert_no_worse(result, model(x, w), truths(model, (x, w)))
    (decision,) = rewriter.rewritten
    # One operand stays wide, so that the product is still one of fp32.
    assert decision.operands == "[14, 300] bf16 @ [300, 6] fp32"


def test_a_sum_of_products_as_the_compiler_writes_it_for_one_row():
    def model(x, w, b):
        product = (x.float().unsqueeze(2) * w.float().unsqueeze(0)).sum(dim=1).to(torch.bfloat16)
        return torch.relu(product + b)

    x, w, b = inputs(torch.bfloat16, rows=(1,))
    w = w.t().contiguous()
    rewriter = Rewriter()
    result = rewriter.compile(model)(x, w, b)
    true = torch.relu(x.double() @ w.double() + b.double())
    assert_no_worse(result, torch.relu(x @ w + b), true)
    (decision,) = rewriter.rewritten
    assert (decision.operator, decision.operands) == ("mm", "[1, 300] bf16 @ [300, 6] bf16")
    assert decision.fused == ("to bf16", "bias", "relu")


SPELLED = {
    "relu": lambda x: x.clamp(min=0),
    "silu": lambda x: x * torch.sigmoid(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("activation", SPELLED)
def test_activations_spelled_out(activation, dtype):
    def model(x, w, b):
        return SPELLED[activation](F.linear(x, w, b))

    tensors = inputs(dtype)
    rewriter = Rewriter()
    result = rewriter.compile(model)(*tensors)
    assert_no_worse(result, model(*tensors), truths(model, tensors))
    assert rewriter.rewritten[0].fused == ("bias", activation)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values_pass_through(activation, value):
    def model(x, w, b):
        return apply_activation(F.linear(x, w, b), activation)

    x, w, b = inputs(torch.float32)
    x[0, 0, 3] = value
    result = Rewriter().compile(model)(x, w, b)
    # In fp64: on some processors torch's gelu of an infinite fp32 number is NaN.
    own = model(x.double(), w.double(), b.double())
    assert torch.equal(result.isnan(), own.isnan())
    assert torch.equal(torch.nan_to_num(result[0, 0]).sign().double(), torch.nan_to_num(own[0, 0]).sign())


@pytest.mark.parametrize("shape", [(0, 6, 300), (7, 0, 300), (7, 6, 0)], ids=["M0", "N0", "K0"])
def test_empty_sizes(shape):
    m, n, k = shape

    def model(x, w, b):
        return torch.relu(F.linear(x, w, b))

    tensors = inputs(torch.float32, rows=(m,), n=n, k=k)
    assert torch.equal(Rewriter().compile(model)(*tensors), model(*tensors))
    compiled = Rewriter().compile(model, dynamic=True)
    assert torch.equal(compiled(*tensors), model(*tensors))


def test_checkpointed_training():
    layer = torch.nn.Linear(300, 6)

    def model(x):
        return torch.utils.checkpoint.checkpoint(lambda x: torch.relu(layer(x)), x, use_reentrant=False)

    x = random((5, 300), torch.float32).requires_grad_()
    results = []
    for call in (Rewriter().compile(model), model):
        result = call(x)
        results.append((result.detach(), *torch.autograd.grad(result.sum(), (x, *layer.parameters()))))
    for ours, own in zip(*results, strict=True):
        torch.testing.assert_close(ours, own)
