"""The command line, run in this process: what it writes is read back, and wrong use is one line and exit code 2."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from decompose_k.bench import demo as demo_module
from decompose_k.bench.cases import custom_case
from decompose_k.bench.machine import Ceilings
from decompose_k.bench.rows import append_jsonl, read_jsonl
from decompose_k.cli import checking, measuring
from decompose_k.cli.common import named_cases
from decompose_k.verify import Check
from rows_for_tests import pair


@pytest.fixture
def run(run_command, monkeypatch, tmp_path):
    """Run a command; returns its exit code, output and error output."""
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.chdir(tmp_path)
    return run_command


@pytest.fixture
def quick_ceilings(monkeypatch):
    rates = dict.fromkeys((torch.bfloat16, torch.float16, torch.float32), 1e11)
    monkeypatch.setattr("decompose_k.bench.run.measure_ceilings", lambda device, dtypes: Ceilings(1e10, rates))


def test_bench_writes_rows_plots_and_report(run, tmp_path, quick_ceilings):
    arguments = ("--shape", "4x4x512", "--shape", "2x3x1000", "--dtype", "fp16", "--activation", "relu")
    code, out, err = run("bench", *arguments, "--repetitions", 2, "--device", "cpu", "-o", tmp_path / "new" / "out")
    assert (code, err) == (0, "")
    rows = read_jsonl(tmp_path / "new" / "out" / "rows.jsonl")
    assert {(row.size, row.a_dtype, row.activation) for row in rows} == {
        ("4x4x512", "fp16", "relu"),
        ("2x3x1000", "fp16", "relu"),
    }
    assert "4x4x512" in out
    assert "What was found" in out
    written = {path.name for path in (tmp_path / "new" / "out").rglob("*") if path.is_file()}
    assert {"rows.jsonl", "rows.csv", "report.html", "roofline.svg"} <= written
    assert "4x4x512" in (tmp_path / "new" / "out" / "report.html").read_text(encoding="utf-8")


def test_bench_takes_suites_narrowed_by_model_and_m(run, tmp_path, quick_ceilings):
    arguments = ("--suite", "router,gate", "--model", "qwen3-30b", "--m", "1,2", "--variants", "auto")
    code, _, err = run("bench", *arguments, "--repetitions", 1, "-o", tmp_path, "--device", "cpu")
    assert (code, err) == (0, "")
    rows = read_jsonl(tmp_path / "rows.jsonl")
    assert {(row.name, row.m) for row in rows} == {("Qwen3-30B-A3B", 1), ("Qwen3-30B-A3B", 2)}
    assert {row.variant for row in rows} == {"torch", "auto"}


def test_bench_makes_the_report_from_rows_alone(run, tmp_path):
    append_jsonl(tmp_path / "rows.jsonl", pair(10, 5))
    code, out, _ = run("bench", "--from", tmp_path / "rows.jsonl")
    assert code == 0
    assert "2.00×" in out
    assert "2.00×" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert run("bench", "--from", tmp_path / "rows.jsonl", "-o", tmp_path / "other")[0] == 0
    assert (tmp_path / "other" / "report.html").read_bytes() == (tmp_path / "report.html").read_bytes()


def test_parts_measure_all_cases_and_are_reported_together(run, tmp_path, quick_ceilings):
    shapes = ("--shape", "2x2x64", "--shape", "2x3x64", "--shape", "2x4x64")
    for index in (1, 2):
        arguments = ("--repetitions", 1, "--device", "cpu", "--part", f"{index}/2", "-o", tmp_path / str(index))
        assert run("bench", *shapes, *arguments)[0] == 0
    folders = [tmp_path / str(index) for index in (1, 2)]
    files = [folder / "rows.jsonl" for folder in folders]
    before = [file.read_bytes() for file in files]
    assert [{row.n for row in read_jsonl(file)} for file in files] == [{2, 4}, {3}]
    code, _, err = run("bench", "--from", folders[0], "--from", files[1])
    assert (code, "--output" in err) == (2, True)
    for _ in range(2):
        assert run("bench", "--from", folders[0], "--from", files[1], "-o", tmp_path / "all")[0] == 0
    assert {row.n for row in read_jsonl(tmp_path / "all" / "rows.jsonl")} == {2, 3, 4}
    assert len(read_jsonl(tmp_path / "all" / "rows.jsonl")) == sum(len(read_jsonl(file)) for file in files)
    assert [file.read_bytes() for file in files] == before
    page = (tmp_path / "all" / "report.html").read_text(encoding="utf-8")
    assert all(f"2x{n}x64" in page for n in (2, 3, 4))


def test_bench_keeps_rows_unless_told(run, tmp_path, quick_ceilings):
    arguments = ("bench", "--shape", "2x2x64", "--repetitions", 1, "--device", "cpu", "-o", tmp_path)
    assert run(*arguments)[0] == 0
    code, _, err = run(*arguments)
    assert code == 2
    assert "resume it (--resume), overwrite it (--overwrite)" in err
    before = (tmp_path / "rows.jsonl").read_text(encoding="utf-8")
    assert run(*arguments, "--resume")[0] == 0
    assert (tmp_path / "rows.jsonl").read_text(encoding="utf-8") == before
    assert run(*arguments, "--overwrite")[0] == 0
    assert (tmp_path / "rows.jsonl").read_text(encoding="utf-8") != before


def test_bench_measures_every_variant_that_makes_sense_here(run, tmp_path, quick_ceilings):
    arguments = ("--shape", "4x8x1028", "--activation", "relu", "--variants", "all", "--repetitions", 2)
    code, out, err = run("bench", *arguments, "--device", "cpu", "-o", tmp_path)
    assert (code, err) == (0, "")
    rows = {row.variant: row for row in read_jsonl(tmp_path / "rows.jsonl")}
    assert set(rows) >= {
        "torch",
        "torch-cast",
        "compiled",
        "compiled-split",
        "custom-op-mm",
        "custom-op-mm-relu",
        "auto",
    }
    assert not {"compiled-max-autotune", "generation-1", "floor-plain", "static"} & set(rows)
    assert rows["custom-op-mm-relu"].chosen
    assert all(row.warm_us and row.weight_cold_us for row in rows.values())
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for said in ("custom op mm_relu", "the fastest of these", "When to use it, and when not"):
        assert said in page
    assert "the fastest alternative of each case" in " ".join(out.split())


def test_bench_measures_other_rows_of_a_model_and_static_weights_of_a_shape(run, tmp_path, quick_ceilings):
    arguments = ("--model", "OLMoE", "--m", "3,5", "--variants", "torch", "--columns", "none")
    assert run("bench", *arguments, "--repetitions", 1, "--device", "cpu", "-o", tmp_path)[0] == 0
    assert [(row.name, row.m) for row in read_jsonl(tmp_path / "rows.jsonl")] == [("OLMoE", 3), ("OLMoE", 5)]
    (case,) = named_cases(None, ["4x8x64"], None, None, None, "NT", None, True)
    assert case.static_weight


@pytest.mark.parametrize(("after", "code"), [(5.0, 0), (4.0, 0), (8.0, 1)], ids=["same", "faster", "slower"])
def test_bench_compare_exits_by_what_became_of_ours(run, tmp_path, after, code):
    for name, ours in (("a", 5.0), ("b", after)):
        (tmp_path / name).mkdir()
        append_jsonl(tmp_path / name / "rows.jsonl", pair(10, ours, spread=0.01))
    exit_code, out, err = run("bench", "compare", tmp_path / "a", tmp_path / "b" / "rows.jsonl")
    assert exit_code == code
    assert ("1 of ours became slower" in err) == (code == 1)
    assert {5.0: "2 same", 4.0: "faster", 8.0: "slower"}[after] in out
    out = run("bench", "compare", tmp_path / "a", tmp_path / "b", "--only-changes")[1]
    assert out.count("16x16x8192") == (after != 5.0)


def test_demo_checks_measures_and_reports(run, tmp_path, monkeypatch, quick_ceilings):
    cases = tuple(custom_case((m, m, k), torch.bfloat16, activation="relu") for m in (4, 8) for k in (256, 512))
    for module in (demo_module, measuring):
        monkeypatch.setattr(module, "demo_cases", lambda: cases)
        monkeypatch.setattr(module, "demo_checks", lambda: cases[:2])
    code, out, err = run("demo", "--device", "cpu", "--budget", "20s", "-o", tmp_path)
    assert (code, err) == (0, "")
    for said in ("Correct?", "Measured", "What was found", "On this machine:", "4x4x256", "8x8x512"):
        assert said in out
    rows = read_jsonl(tmp_path / "rows.jsonl")
    assert {(row.m, row.k) for row in rows} == {(m, k) for m in (4, 8) for k in (256, 512)}
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert 'id="speedup-grid-custom-bf16"' in page
    assert 'id="roofline"' in page


def test_explain_says_what_would_run(run):
    code, out, _ = run("explain", 16, 256, 7168, "--layout", "NT", "--out-dtype", "fp32", "--device", "cpu")
    assert code == 0
    assert "[16, 7168] bf16 @ [7168, 256] bf16 -> fp32" in out
    for heading in ("roofline", "choice", "reason", "waves", "workspace", "from", "candidates"):
        assert heading in out


def test_explain_for_programs(run):
    arguments = ("--dtype", "fp32", "--activation", "silu", "--precision", "ieee", "--batch-invariant", "--json")
    code, out, _ = run("explain", 4, 4, 4096, *arguments, "--device", "cpu")
    assert code == 0
    problem = json.loads(out)["problem"]
    assert (problem["m"], problem["a_dtype"], problem["activation"]) == (4, "fp32", "silu")
    assert (problem["precision"], problem["batch_invariant"]) == ("ieee", True)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
@pytest.mark.usefixtures("plain_cpu")
def test_inspect_says_what_the_compiler_does_and_saves_both_programs(run, tmp_path):
    arguments = ("--activation", "relu", "--dtype", "bf16", "--layout", "NN", "--device", "cpu", "-o", "code")
    code, out, err = run("inspect", 64, 48, 8192, *arguments)
    assert (code, err) == (0, "")
    assert "plain    an extern product, then a separate pointwise kernel: extern_kernels.mm, cpp_fused_relu_0" in out
    assert "enabled  one operator of decompose-k: torch.ops.decompose_k.matmul" in out
    assert {path.name for path in (tmp_path / "code").iterdir()} == {"plain.py", "enabled.py"}


def test_info_shows_versions_devices_backends_and_the_cache(run, monkeypatch, tmp_path):
    monkeypatch.setenv("DECOMPOSE_K_CACHE_DIR", str(tmp_path / "cache"))
    code, out, _ = run("info")
    assert code == 0
    assert torch.__version__ in out
    assert str(tmp_path / "cache") in out
    facts = json.loads(run("info", "--json")[1])
    assert facts["torch"] == torch.__version__
    assert "torch" in facts["backends"]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("passed", [True, False])
def test_verify_exits_by_what_it_found(run, monkeypatch, passed):
    found = (Check("sums in fp32", True, "error 1e-7"), Check("keeps NaN", passed, "a NaN in row 3"))
    monkeypatch.setattr(checking, "verify_contract", lambda device, quick, progress: found)
    code, out, err = run("verify", "--quick", "--device", "cpu")
    assert code == (0 if passed else 1)
    assert "keeps NaN: a NaN in row 3" in out
    assert ("failed: keeps NaN" in err) == (not passed)


WRONG_USE = {
    "no-such-command": (("dmeo",), "dmeo"),
    "no-such-option": (("bench", "--siute", "seed"), "--siute"),
    "nothing-to-bench": (("bench",), "--suite, --shape or --model"),
    "unknown-suite": (("bench", "--suite", "seeds"), "suite must be one of"),
    "no-shape": (("bench", "--shape", "16x16"), "MxNxK"),
    "empty-shape": (("bench", "--shape", "0x16x16"), "at least 1"),
    "unknown-dtype": (("bench", "--shape", "2x2x2", "--dtype", "fp8"), "dtype must be one of"),
    "integer-dtype": (("bench", "--shape", "2x2x2", "--dtype", "int8"), "fp16, bf16, fp32, fp64"),
    "unknown-layout": (("bench", "--shape", "2x2x2", "--layout", "XY"), "layout must be one of NN"),
    "unknown-activation": (("bench", "--shape", "2x2x2", "--activation", "elu"), "activation must be one of none"),
    "unknown-variant": (("bench", "--shape", "2x2x2", "--variants", "best"), "variants must be among"),
    "no-m": (("bench", "--suite", "gate", "--m", "one"), "m must be integers"),
    "no-case-left": (("bench", "--suite", "seed", "--m", "7"), "no case is left"),
    "m-of-none": (("bench", "--suite", "gate", "--m", "0"), "m must be integers >= 1"),
    "unknown-column": (("bench", "--shape", "2x2x2", "--columns", "hot"), "columns must be among"),
    "no-repetitions": (("bench", "--suite", "gate", "--repetitions", "0"), "repetitions"),
    "repetitions-text": (("bench", "--suite", "gate", "--repetitions", "many"), "--repetitions"),
    "no-part": (("bench", "--shape", "2x2x64", "--part", "0/2"), "part must be I/N"),
    "empty-part": (("bench", "--shape", "2x2x64", "--part", "2/2"), "part 2/2 has no case"),
    "no-budget": (("demo", "--budget", "soon"), "budget must be a time"),
    "negative-budget": (("demo", "--budget=-3m"), "budget must be a time"),
    "unknown-device": (("demo", "--device", "tpu"), "device must be one of auto, cpu, cuda"),
    "bad-index": (("verify", "--device", "cuda:first"), "cuda:INDEX"),
    "cpu-index": (("verify", "--device", "cpu:1"), "device must be"),
    "missing-rows": (("bench", "--from", "no-such-rows.jsonl"), "no-such-rows.jsonl"),
    "compare-one": (("bench", "compare", "a.jsonl"), "after"),
    "compare-missing": (("bench", "compare", "a.jsonl", "b.jsonl"), "a.jsonl"),
    "no-such-bench": (("bench", "comprae"), "comprae"),
    "explain-missing": (("explain", "16", "16"), "K"),
    "explain-negative": (("explain", "16", "16", "--", "-5"), "k must be an integer >= 0; got -5"),
    "explain-text": (("explain", "a", "16", "16"), "'M'"),
    "explain-dtype": (("explain", "16", "16", "16", "--dtype", "half"), "got 'half'"),
    "explain-b-dtype": (("explain", "16", "16", "16", "--b-dtype", "fp4"), "got 'fp4'"),
    "inspect-empty": (("inspect", "16", "0", "16", "--device", "cpu"), "n must be an integer >= 1; got 0"),
    "inspect-mode": (("inspect", "1", "1", "1", "--mode", "fast", "--device", "cpu"), "mode must be one of default"),
    "inspect-layout": (("inspect", "1", "1", "1", "--layout", "TT", "--device", "cpu"), "layout must be one of NN, NT"),
    "explain-precision": (("explain", "16", "16", "16", "--precision", "tf32"), "precision must be"),
}


@pytest.mark.parametrize(("arguments", "said"), WRONG_USE.values(), ids=WRONG_USE)
def test_wrong_use_is_one_line_and_exit_code_2(run, arguments, said):
    code, _, err = run(*arguments)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert err.startswith("decompose-k: ")
    assert said in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU whose absence is tested")
@pytest.mark.parametrize("command", [("demo",), ("verify",), ("explain", "1", "1", "1"), ("bench", "--shape", "1x1x1")])
def test_a_missing_gpu_is_said(run, command):
    code, _, err = run(*command, "--device", "cuda")
    assert code == 2
    assert "finds no CUDA GPU" in err


def test_corrupt_rows_are_named_by_line(run, tmp_path):
    append_jsonl(tmp_path / "rows.jsonl", pair(10, 5))
    with (tmp_path / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"suite": "se')
    code, _, err = run("bench", "--from", tmp_path / "rows.jsonl")
    assert code == 2
    assert "rows.jsonl, line 3" in err
    assert len(err.splitlines()) == 1


def test_a_folder_that_cannot_be_written_is_said(run, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    for command in (("demo",), ("bench", "--shape", "2x2x64")):
        code, _, err = run(*command, "--device", "cpu", "-o", tmp_path / "file" / "out")
        assert code == 2
        assert str(tmp_path / "file") in err
        assert len(err.splitlines()) == 1


def test_python_m_runs_the_command_line():
    environment = {**os.environ, "COLUMNS": "100"}
    command = [sys.executable, "-m", "decompose_k"]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, env=environment, check=True)
    for name in ("demo", "bench", "verify", "explain", "info"):
        assert name in done.stdout
    failed = subprocess.run([*command, "bench"], capture_output=True, text=True, env=environment, check=False)
    assert failed.returncode == 2
    assert "Traceback" not in failed.stderr
