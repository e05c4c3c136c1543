"""The frozen values: Problem, Config, Device, dtype names and settings."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

import decompose_k as dk
from decompose_k import dtypes, settings
from decompose_k.config import KERNELS
from decompose_k.problem import layout_of

F16, BF16, F32, F64 = dtypes.FLOATS

VALUES = {
    "problem": dk.Problem.make(
        3, 4, 5, BF16, b_dtype=F32, out_dtype=F16, bias_dtype=F64, a_layout="column", activation="silu", static_b=True
    ),
    "plain problem": dk.Problem.make(0, 0, 0, torch.int8, device_type="cpu"),
    "config": dk.Config("pair", split_k=17, block_m=64, reducer="tile", launch="static_b", input_precision="tf32x3"),
    "device": dk.Device("stub", capability=(9, 0), multiprocessors=132, bandwidth=4.8e12),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_json_restores_an_equal_value(value):
    restored = type(value).from_json(json.loads(json.dumps(value.to_json())))
    assert restored == value
    assert hash(restored) == hash(value)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_values_are_frozen(value):
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, getattr(value, name))


BAD_PROBLEMS = [
    ("m", ValueError, {"m": -1}),
    ("n", ValueError, {"n": 1.0}),
    ("k", ValueError, {"k": True}),
    ("a_dtype", TypeError, {"dtype": torch.bool}),
    ("b_dtype", TypeError, {"b_dtype": "fp32", "out_dtype": F32}),
    ("out_dtype", TypeError, {"out_dtype": torch.float8_e4m3fn}),
    ("bias_dtype", TypeError, {"bias_dtype": torch.bool}),
    ("a_layout", ValueError, {"a_layout": "diagonal"}),
    ("b_layout", ValueError, {"b_layout": None}),
    ("activation", ValueError, {"activation": "swish"}),
    ("precision", ValueError, {"precision": "ieee"}),
    ("precision", ValueError, {"dtype": F32, "precision": "fp32"}),
]


@pytest.mark.parametrize(("name", "error", "fields"), BAD_PROBLEMS)
def test_a_bad_problem_names_the_field(name, error, fields):
    fields = {"m": 2, "n": 3, "k": 4, **fields}
    sizes = [fields.pop(size) for size in ("m", "n", "k")]
    if "b_dtype" in fields:
        with pytest.raises(error, match=f"^{name} must be"):
            dk.Problem(*sizes, BF16, fields["b_dtype"], fields["out_dtype"])
        return
    with pytest.raises(error, match=f"^{name} must be"):
        dk.Problem.make(*sizes, **fields)


BAD_CONFIGS = [
    ("kernel", {"kernel": "wmma"}),
    ("reducer", {"reducer": "atomic"}),
    ("launch", {"launch": "cooperative"}),
    ("input_precision", {"input_precision": "fp32"}),
    ("split_k", {"split_k": 0}),
    ("split_k", {"split_k": 2.0}),
    ("group_m", {"group_m": True}),
    ("num_stages", {"num_stages": -1}),
    ("block_m", {"block_m": 24}),
    ("block_n", {"block_n": 0}),
    ("block_k", {"block_k": 100}),
    ("num_warps", {"num_warps": 3}),
    ("reduce_block", {"reduce_block": "32"}),
    ("reduce_warps", {"reduce_warps": 0}),
]


@pytest.mark.parametrize(("name", "fields"), BAD_CONFIGS)
def test_a_bad_config_names_the_field(name, fields):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        dk.Config(**{"kernel": "pair", **fields})


def test_foreign_json_is_refused():
    with pytest.raises(ValueError, match="unknown fields speed"):
        dk.Config.from_json({"kernel": "mm", "speed": 1})
    with pytest.raises(ValueError, match="dtype must be one of"):
        dk.Problem.from_json({**VALUES["problem"].to_json(), "a_dtype": "fp4"})


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_config_says_in_words_what_it_is(kernel):
    config = dk.Config(kernel, split_k=4)
    assert config.backend == ("torch" if kernel in ("mm", "bmm_sum") else "triton")
    assert config.backend in str(config)
    assert kernel == "mm" or "split_k=4" in str(config)


def test_flops_bytes_and_roofline():
    problem = dk.Problem.make(16, 32, 1000, BF16, b_dtype=F32, out_dtype=F64)
    assert problem.flops == 2 * 16 * 32 * 1000
    assert problem.bytes == 16 * 1000 * 2 + 1000 * 32 * 4 + 16 * 32 * 8
    assert problem.roofline_seconds(1e12, 1e30) == problem.bytes / 1e12
    assert problem.roofline_seconds(1e30, 1e12) == problem.flops / 1e12
    assert problem.roofline_seconds(1e12, math.inf) == problem.bytes / 1e12
    with pytest.raises(ValueError, match=r"^bandwidth and rate must be > 0"):
        problem.roofline_seconds(0, 1)


@pytest.mark.parametrize(
    ("a", "b", "accumulate", "result"),
    [
        (BF16, BF16, F32, BF16),
        (F16, BF16, F32, F32),
        (BF16, F32, F32, F32),
        (F16, F64, F64, F64),
        (F32, F32, F32, F32),
        (torch.int8, torch.int8, torch.int8, torch.int8),
        (torch.complex64, torch.complex64, torch.complex64, torch.complex64),
    ],
)
def test_accumulate_and_result_dtypes(a, b, accumulate, result):
    problem = dk.Problem.make(1, 1, 1, a, b_dtype=b, device_type="cpu")
    assert problem.accumulate_dtype == accumulate
    assert problem.out_dtype == result
    assert problem.precision == ("highest" if F32 in (a, b) and accumulate == F32 else None)


@pytest.mark.parametrize("dtype", dtypes.SUPPORTED, ids=dtypes.dtype_name)
def test_dtype_names_go_both_ways(dtype):
    assert dtypes.dtype_from_name(dtypes.dtype_name(dtype)) == dtype


def test_layouts():
    matrix = torch.zeros(4, 6)
    assert layout_of(matrix) == "row"
    assert layout_of(matrix.t()) == "column"
    assert layout_of(matrix[:, ::2]) == "strided"
    assert layout_of(matrix[:, :1]) == "row"
    assert layout_of(torch.zeros(0, 3)) == "row"


def test_device_facts():
    assert dk.Device.of("cpu").type == "cpu"
    assert dk.Device.of("cpu").multiprocessors >= 1
    assert VALUES["device"].has_dependent_launch
    assert not dk.Device("old", capability=(8, 0)).has_dependent_launch
    with pytest.raises(ValueError, match=r"^multiprocessors must be >= 1"):
        dk.Device("none", multiprocessors=0)


def test_settings(monkeypatch, tmp_path):
    for name in ("DECOMPOSE_K_BACKEND", "DECOMPOSE_K_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert settings.default_backend() == "auto"
    assert settings.cache_directory() == Path.home() / ".cache" / "decompose-k"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert settings.cache_directory() == tmp_path / "decompose-k"
    monkeypatch.setenv("DECOMPOSE_K_CACHE_DIR", str(tmp_path / "mine"))
    assert settings.cache_directory() == tmp_path / "mine"
    assert not (tmp_path / "mine").exists()
    monkeypatch.setenv("DECOMPOSE_K_BACKEND", "torch")
    assert settings.default_backend() == "torch"
