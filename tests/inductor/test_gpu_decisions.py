"""What the pass decides for a GPU, on graphs of fake GPU tensors and a stub H200: nothing here needs one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import decompose_k as dk
from decompose_k.inductor import decide
from decompose_k.inductor.graph_pass import rewrite
from rewriting import OPERATOR

BF16 = torch.bfloat16
H200 = dk.Device(
    "stub H200", capability=(9, 0), multiprocessors=132, shared_bytes=232448, l2_bytes=60 << 20, bandwidth=4.8e12
)


@pytest.fixture(autouse=True)
def stub_h200(monkeypatch):
    monkeypatch.setattr(decide.Device, "of", classmethod(lambda cls, device: H200))


def rewritten(model, *shapes, dtype=BF16, dynamic=False):
    """Decisions about a model of fake GPU tensors, and the graph; with `dynamic`, M may be any number."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        fakes = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
    if dynamic:
        meta = torch.empty(shapes[0], dtype=dtype, device="meta")
        sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (len(shapes[0]) - 1)]
        symbolic = mode.from_tensor(meta, symbolic_context=StatelessSymbolicContext(sizes))
        with mode:
            fakes[0] = torch.empty_strided(symbolic.shape, symbolic.stride(), dtype=dtype, device="cuda")
    from torch._inductor.decomposition import select_decomp_table

    with mode:
        module = make_fx(model, decomposition_table=select_decomp_table(), tracing_mode="real")(*fakes)
    decisions = rewrite(module.graph, "wins")
    module.graph.lint()
    return decisions, module.graph


def router(x, w, b):
    return torch.sigmoid(F.linear(x, w, b)).float()


@pytest.mark.parametrize("m", [1, 2, 16, 64])
def test_a_router_is_rewritten_whole(m):
    (decision,), graph = rewritten(router, (m, 7168), (256, 7168), (256,))
    assert decision.rewritten
    assert decision.fused == ("bias", "sigmoid", "to fp32")
    (node,) = (node for node in graph.nodes if node.target is OPERATOR)
    assert node.args[3:] == (1.0, 1.0, "sigmoid", "fp32")
    assert node.meta["val"].device.type == "cuda"


def test_a_large_output_is_left_to_torch():
    (decision,), graph = rewritten(router, (8192, 4096), (4096, 4096), (4096,))
    assert not decision.rewritten
    assert decision.reason == "the heuristic expects torch's own kernel to be the fastest here"
    assert OPERATOR not in {node.target for node in graph.nodes}


def test_a_dynamic_m_compiled_for_few_rows_takes_the_whole_tail():
    (decision,), _ = rewritten(router, (16, 7168), (256, 7168), (256,), dynamic=True)
    assert decision.fused == ("bias", "sigmoid", "to fp32")


def test_a_dynamic_m_compiled_for_many_rows_takes_what_torch_takes_along():
    (decision,), graph = rewritten(router, (4096, 7168), (256, 7168), (256,), dynamic=True)
    assert decision.rewritten
    assert decision.fused == ("bias",)
    assert decision.reason.startswith("M is dynamic, and Decompose-K is expected to win for M up to ")
    assert torch.ops.aten.sigmoid.default in {node.target for node in graph.nodes}


def test_fp32_follows_the_precision_that_torch_allows():
    def model(x, w):
        return x @ w

    for dtype in (torch.float32, torch.float64):
        (decision,), _ = rewritten(model, (16, 8192), (8192, 16), dtype=dtype)
        assert decision.rewritten, dtype


def test_a_widened_activation_is_taken_before_it_is_widened():
    def model(x, w):
        return x.float() @ w.float().t()

    (decision,), _ = rewritten(model, (16, 28672), (24, 28672))
    assert decision.operands == "[16, 28672] bf16 @ [28672, 24] fp32"


def test_a_weight_gradient_over_many_tokens():
    def model(grad, x):
        return (grad.t() @ x).float()

    (decision,), _ = rewritten(model, (32768, 16), (32768, 32))
    assert decision.rewritten
    assert decision.fused == ("to fp32",)


def test_a_sum_of_products_in_fp32_stays_exact():
    def model(x, w):
        return (x.unsqueeze(2) * w.unsqueeze(0)).sum(dim=1)

    (decision,), graph = rewritten(model, (1, 7168), (7168, 256), dtype=torch.float32)
    assert decision.rewritten
    (node,) = (node for node in graph.nodes if node.target is OPERATOR)
    assert node.args[6:] == ("fp32", "ieee")
