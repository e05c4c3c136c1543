"""Every public argument has its bad cases; each raises ValueError or TypeError that names the argument."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import decompose_k as dk
from decompose_k.overlap import has_internal_overlap, share_memory

F32, BF16, F64, I32 = torch.float32, torch.bfloat16, torch.float64, torch.int32
A, B = torch.ones(3, 8), torch.ones(8, 4)
MM, SPLIT, PAIR = dk.Config("mm"), dk.Config("bmm_sum", split_k=9), dk.Config("pair")


def sparse(rows, columns):
    return torch.ones(rows, columns).to_sparse()


def quantised(rows, columns):
    return torch.quantize_per_tensor(torch.ones(rows, columns), 0.1, 0, torch.qint8)


def bad_out_overlapping_a():
    buffer = torch.zeros(64)
    return {"a": buffer[:24].view(3, 8), "out": buffer[20:32].view(3, 4)}


def bad_out_overlapping_b():
    buffer = torch.zeros(64)
    return {"b": buffer[:32].view(8, 4), "out": buffer[31:43].view(3, 4)}


def bad_out_overlapping_bias():
    buffer = torch.zeros(16)
    return {"bias": buffer[:4], "out": buffer[3:15].view(3, 4)}


MATMUL_CASES = {
    "a": [
        (TypeError, {"a": [[1.0] * 8]}),
        (TypeError, {"a": None}),
        (TypeError, {"a": sparse(3, 8)}),
        (TypeError, {"a": quantised(3, 8)}),
        (TypeError, {"a": A > 0, "b": B > 0}),
        (TypeError, {"a": A.to(torch.float8_e4m3fn)}),
        (ValueError, {"a": torch.ones(8)}),
        (ValueError, {"a": torch.tensor(1.0)}),
    ],
    "b": [
        (TypeError, {"b": 3}),
        (TypeError, {"b": sparse(8, 4)}),
        (TypeError, {"b": quantised(8, 4)}),
        (TypeError, {"b": B.to(I32)}),
        (TypeError, {"a": A.to(I32), "b": B.to(torch.int64)}),
        (TypeError, {"a": A.to(torch.complex64)}),
        (TypeError, {"b": B.to(torch.float8_e5m2)}),
        (ValueError, {"b": torch.ones(7, 4)}),
        (ValueError, {"b": torch.ones(8)}),
        (ValueError, {"b": torch.ones(2, 8, 4)}),
        (ValueError, {"b": torch.ones(8, 4, device="meta")}),
    ],
    "bias": [
        (TypeError, {"bias": 1.0}),
        (TypeError, {"bias": torch.ones(4).to_sparse()}),
        (TypeError, {"bias": torch.ones(4, dtype=I32)}),
        (TypeError, {"bias": torch.ones(4, dtype=torch.complex64)}),
        (TypeError, {"a": A.to(I32), "b": B.to(I32), "bias": torch.ones(4)}),
        (ValueError, {"bias": torch.ones(3)}),
        (ValueError, {"bias": torch.ones(0)}),
        (ValueError, {"bias": torch.ones(4, 3)}),
        (ValueError, {"bias": torch.ones(1, 3, 4)}),
        (ValueError, {"bias": torch.ones(4, device="meta")}),
    ],
    "alpha": [
        (TypeError, {"alpha": "1"}),
        (TypeError, {"alpha": None}),
        (TypeError, {"alpha": True}),
        (TypeError, {"alpha": torch.tensor(2.0)}),
        (TypeError, {"alpha": 1j}),
        (ValueError, {"a": A.to(I32), "b": B.to(I32), "alpha": 0.5}),
    ],
    "beta": [
        (TypeError, {"beta": "1"}),
        (TypeError, {"beta": False}),
        (TypeError, {"beta": 2j}),
        (ValueError, {"a": A.to(I32), "b": B.to(I32), "beta": 1.5}),
    ],
    "activation": [
        (ValueError, {"activation": "swish"}),
        (ValueError, {"activation": "RELU"}),
        (ValueError, {"activation": torch.relu}),
        (ValueError, {"activation": ""}),
        (TypeError, {"a": A.to(I32), "b": B.to(I32), "activation": "relu"}),
        (TypeError, {"a": A.to(torch.complex64), "b": B.to(torch.complex64), "activation": "relu"}),
    ],
    "out_dtype": [
        (TypeError, {"out_dtype": "float32"}),
        (TypeError, {"out_dtype": I32}),
        (TypeError, {"out_dtype": torch.complex64}),
        (TypeError, {"out_dtype": torch.float8_e4m3fn}),
        (TypeError, {"a": A.to(I32), "b": B.to(I32), "out_dtype": F32}),
    ],
    "out": [
        (TypeError, {"out": 1}),
        (TypeError, {"out": torch.zeros(3, 4, dtype=BF16)}),
        (TypeError, {"out": torch.zeros(3, 4), "out_dtype": F64}),
        (TypeError, {"out": torch.zeros(3, 4).to_sparse()}),
        (ValueError, {"out": torch.zeros(4, 3)}),
        (ValueError, {"out": torch.zeros(12)}),
        (ValueError, {"out": torch.zeros(1, 3, 4)}),
        (ValueError, {"out": torch.zeros(3, 4, device="meta")}),
        (ValueError, {"out": torch.zeros(4).expand(3, 4)}),
        (ValueError, {"out": torch.zeros(6).as_strided((3, 4), (1, 1))}),
        (ValueError, {"out": torch.zeros(3, 4, requires_grad=True)}),
        (ValueError, {"out": torch.zeros(3, 4), "a": A.clone().requires_grad_()}),
        (ValueError, {"out": torch.zeros(3, 4), "bias": torch.ones(4, requires_grad=True)}),
        (ValueError, bad_out_overlapping_a()),
        (ValueError, bad_out_overlapping_b()),
        (ValueError, bad_out_overlapping_bias()),
    ],
    "precision": [
        (ValueError, {"precision": "fp32"}),
        (ValueError, {"precision": "highest"}),
        (ValueError, {"precision": 32}),
        (ValueError, {"a": A.to(BF16), "b": B.to(BF16), "precision": "ieee"}),
        (ValueError, {"a": A.to(F64), "b": B, "precision": "tf32"}),
        (ValueError, {"a": A.to(I32), "b": B.to(I32), "precision": "ieee"}),
    ],
    "batch_invariant": [(TypeError, {"batch_invariant": 1}), (TypeError, {"batch_invariant": None})],
    "static_b": [(TypeError, {"static_b": 0}), (TypeError, {"static_b": "yes"})],
    "split_k": [
        (ValueError, {"split_k": 0}),
        (ValueError, {"split_k": -1}),
        (ValueError, {"split_k": 9}),
        (ValueError, {"a": A[:, :0], "b": B[:0], "split_k": 2}),
        (TypeError, {"split_k": 2.0}),
        (TypeError, {"split_k": True}),
        (TypeError, {"split_k": "4"}),
        (ValueError, {"split_k": 2, "config": MM}),
    ],
    "backend": [
        (ValueError, {"backend": "cuda"}),
        (ValueError, {"backend": None}),
        (ValueError, {"backend": "triton"}),
        (ValueError, {"backend": ["auto"]}),
    ],
    "config": [
        (TypeError, {"config": "mm"}),
        (TypeError, {"config": {"kernel": "mm"}}),
        (ValueError, {"config": SPLIT}),
        (ValueError, {"config": PAIR}),
        (ValueError, {"config": PAIR, "backend": "torch"}),
        (ValueError, {"config": MM, "backend": "triton"}),
    ],
}


def flat(cases):
    return [
        pytest.param(name, error, arguments, id=f"{name}-{index}")
        for name, list_of_cases in cases.items()
        for index, (error, arguments) in enumerate(list_of_cases)
    ]


def assert_clear(caught, name):
    message = str(caught.value)
    assert message.startswith(f"{name} must "), message
    assert "got " in message, message


@pytest.mark.parametrize(("name", "error", "arguments"), flat(MATMUL_CASES))
def test_matmul(name, error, arguments):
    arguments = {"a": A, "b": B, **arguments}
    with pytest.raises(error) as caught:
        dk.matmul(arguments.pop("a"), arguments.pop("b"), **arguments)
    assert_clear(caught, name)


def linear_cases():
    """The same cases with matmul's arguments by linear's names; what linear lacks falls away."""
    renamed = {"a": "x", "b": "weight", "static_b": "static_weight"}
    cases = {}
    for name, list_of_cases in MATMUL_CASES.items():
        if name in ("alpha", "beta"):
            continue
        kept = []
        for error, arguments in list_of_cases:
            arguments = dict(arguments)
            if torch.is_tensor(arguments.get("b")) and arguments["b"].dim() == 2 and not arguments["b"].is_quantized:
                arguments["b"] = arguments["b"].t()
            kept.append((error, {renamed.get(key, key): value for key, value in arguments.items()}))
        cases[renamed.get(name, name)] = kept
    # A vector is a good x of linear.
    cases["x"] = [(error, case) for error, case in cases["x"] if getattr(case["x"], "shape", None) != (8,)]
    return cases


@pytest.mark.parametrize(("name", "error", "arguments"), flat(linear_cases()))
def test_linear(name, error, arguments):
    arguments = {"x": A, "weight": B.t(), **arguments}
    with pytest.raises(error) as caught:
        dk.linear(arguments.pop("x"), arguments.pop("weight"), **arguments)
    assert_clear(caught, name)


@pytest.mark.parametrize(
    ("function", "cases"), [(dk.matmul, MATMUL_CASES), (dk.linear, linear_cases())], ids=["matmul", "linear"]
)
def test_every_argument_has_bad_cases(function, cases):
    assert set(inspect.signature(function).parameters) == set(cases)


PLAN_CASES = [
    ("problem", TypeError, (None,), {}),
    ("problem", TypeError, ((16, 16, 4096),), {}),
    ("device", TypeError, (dk.Problem.make(1, 1, 8, device_type="cpu"), 3), {}),
    ("device", ValueError, (dk.Problem.make(1, 1, 8, device_type="cpu"), "warp"), {}),
    ("device", ValueError, (dk.Problem.make(1, 1, 8, device_type="cuda"), "cpu"), {}),
    ("backend", ValueError, (dk.Problem.make(1, 1, 8, device_type="cpu"),), {"backend": "numpy"}),
    ("backend", ValueError, (dk.Problem.make(1, 1, 8, device_type="cpu"),), {"backend": "triton"}),
    ("split_k", ValueError, (dk.Problem.make(1, 1, 8, device_type="cpu"),), {"split_k": 9}),
    ("split_k", TypeError, (dk.Problem.make(1, 1, 8, device_type="cpu"),), {"split_k": 1.5}),
]


@pytest.mark.parametrize(("name", "error", "arguments", "options"), PLAN_CASES)
def test_plan_and_explain(name, error, arguments, options):
    with pytest.raises(error) as caught:
        dk.plan(*arguments, **options)
    assert_clear(caught, name)
    if not options:
        with pytest.raises(error):
            dk.explain(*arguments)


@pytest.mark.parametrize(
    ("name", "error", "arguments", "options"),
    [
        ("device", TypeError, (3,), {}),
        ("device", ValueError, ("warp",), {}),
        ("quick", TypeError, (), {"quick": 1}),
        ("progress", TypeError, (), {"progress": "bar"}),
    ],
)
def test_verify(name, error, arguments, options):
    with pytest.raises(error) as caught:
        dk.verify(*arguments, **options)
    assert_clear(caught, name)


def test_a_message_names_shapes_and_what_is_allowed():
    with pytest.raises(
        ValueError, match=r"^b must have K = 8 in dimension 0.*got a of shape \(3, 8\) and b of shape \(7, 4\)"
    ):
        dk.matmul(A, torch.ones(7, 4))
    with pytest.raises(ValueError, match=r"^weight must have K = 8 in dimension 1.*weight of shape \(4, 7\)"):
        dk.linear(A, torch.ones(4, 7))


def test_an_unknown_backend_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("DECOMPOSE_K_BACKEND", "numpy")
    with pytest.raises(ValueError, match=r"^DECOMPOSE_K_BACKEND must be one of auto, torch, triton; got 'numpy'"):
        dk.matmul(A, B)


def test_slices_of_one_buffer_that_share_no_element_are_good_outputs():
    buffer = torch.zeros(8, 12)
    buffer[:, 4:8] = 1.0
    a = torch.ones(8, 8)
    for out in (buffer[:, :4], buffer[:, 8:], torch.zeros(8, 4)):
        assert dk.matmul(a, buffer[:, 4:8], out=out) is out
        assert torch.equal(out, torch.full((8, 4), 8.0))
    assert torch.equal(buffer[:, 4:8], torch.ones(8, 4))


def test_out_without_gradients_may_belong_to_a_leaf():
    out = torch.zeros(3, 4, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(dk.matmul(A, B, out=out), torch.full((3, 4), 8.0))


@st.composite
def strided(draw):
    """(shape, strides, offset) inside a storage of 64 elements."""
    rank = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 4)) for _ in range(rank)]
    strides = [draw(st.integers(0, 7)) for _ in range(rank)]
    return shape, strides, draw(st.integers(0, 12))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(strided(), strided())
def test_shared_memory_is_decided_by_elements(x, y):
    storage = torch.zeros(128)
    x, y = (storage.as_strided(*layout) for layout in (x, y))
    index = torch.arange(128)
    sets = [set(index.as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist()) for t in (x, y)]
    overlapping = bool(sets[0] & sets[1])
    found = share_memory(x, y)
    assert found == share_memory(y, x)
    assert found or not overlapping, "a shared element was missed"
    addresses = index.as_strided(x.shape, x.stride(), x.storage_offset()).flatten().tolist()
    assert has_internal_overlap(x) == (len(addresses) != len(set(addresses)))
    if len(sets[0]) == x.numel() and all(s > 0 for s in x.stride()) and x.dim() == 1:
        assert found == overlapping


def test_shared_memory_of_views_of_unlike_element_size():
    storage = torch.zeros(16)
    halves = storage.view(torch.bfloat16)
    assert share_memory(storage[:4], halves[7:9])
    assert not share_memory(storage[:4], halves[8:])
    assert share_memory(storage[3:5], halves[1::2])
    assert not share_memory(storage[::2], halves.view(8, 4)[:, 2:])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.ones(8), torch.ones(7)])
    with pytest.raises(TypeError, match="^a must be a dense .strided. tensor; got a nested tensor"):
        dk.matmul(nested, B)
    with pytest.raises(TypeError, match="^b must be a dense .strided. tensor; got a nested tensor"):
        dk.matmul(A, nested)
