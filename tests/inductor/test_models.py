"""Whole models with skinny layers: right with the pass, one graph for M = 1 and one for every other M."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from torch._dynamo.utils import counters

import decompose_k as dk
from decompose_k.bench.models import MODELS, SMALL, compile_apart, error_of, main, make_input, make_model, warm_up

pytestmark = [
    pytest.mark.usefixtures("empty_caches"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU"),
]
BF16, CPU = torch.bfloat16, torch.device("cpu")
FUSED = {
    "skinny heads": [("silu",), ("bias",), ("bias", "sigmoid", "to fp32"), ("bias", "tanh", "to fp32")],
    "moe block": [("bias", "sigmoid", "to fp32")],
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_right_and_never_compiled_again(name, calls):
    model = make_model(name, SMALL, BF16, CPU)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        plain = compile_apart(model, "plain")
        warm_up(plain, SMALL, BF16, CPU)
        with dk.inductor.enable("everywhere") as enabled:
            ours = compile_apart(model, "ours")
            warm_up(ours, SMALL, BF16, CPU)
        graphs = counters["stats"]["unique_graphs"]
        products = {}
        for m in (1, 2, 3, 16, 33, 511, 512):
            x = make_input(m, SMALL, BF16, CPU, seed=m)
            truth = exact(x.double())
            calls.clear()
            results = ours(x)
            products[m] = len(calls)
            assert error_of(results, truth) <= 2 * error_of(plain(x), truth)
            for mine, own in zip(results, model(x), strict=True):
                assert (mine.dtype, mine.shape, mine.stride()) == (own.dtype, own.shape, own.stride())
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    assert products[1] + products[2] == len(enabled.report().rewritten)
    assert len({count for m, count in products.items() if m > 1}) == 1
    fused = [decision.fused for decision in enabled.report().rewritten]
    for tail in FUSED[name]:
        # One row and one column are no product to this compiler on a CPU; all else is in both graphs.
        assert fused.count(tail) >= (1 if "tanh" in tail else 2), tail


def test_measuring_writes_rows(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    main(["--device", "cpu", "--output", str(output), "--model", "skinny heads", "--m", "2", "--repetitions", "1"])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["variant"] for row in rows] == ["eager", "compiled", "decompose-k", "decompose-k, static weights"]
    assert all(row["p50_us"] > 0 and row["error"] < 0.02 and row["m"] == 2 for row in rows)
    assert capsys.readouterr().out.count(" us ") == 4


@pytest.mark.parametrize("text", ["0", "513", "one", ""])
def test_a_wrong_m_is_one_error(text, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--output", str(tmp_path / "rows.jsonl"), "--m", text])
    assert exit_.value.code == 2
    assert "--m must be integers from 1 to 512" in capsys.readouterr().err
