"""The commands that tune, show, move and remove choices, run in this process on the CPU."""

from __future__ import annotations

import json

import pytest
import torch

import decompose_k as dk
from decompose_k import cache
from decompose_k.cli import choosing
from decompose_k.store import choice_files
from stub_devices import DEVICES, entry_of

CPU_ONLY = ("--device", "cpu")
SPLIT = dk.Config("bmm_sum", split_k=5)


@pytest.fixture
def run(run_command, monkeypatch, tmp_path):
    """Run a command with a cache of its own; returns its exit code, output and error output."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("DECOMPOSE_K_CACHE_DIR", str(tmp_path / "cache"))
    cache.forget()
    return run_command


@pytest.fixture
def tuned(monkeypatch):
    """What `tune` was asked to do, instead of doing it."""
    asked = []

    def tune(problems, **options):
        asked.append((problems, options))
        return tuple(choosing.Tuned(problem, "measured", entry_of(problem, SPLIT)) for problem in problems)

    monkeypatch.setattr(choosing, "tune_problems", tune)
    return asked


def asked_problems(run, tuned, *arguments):
    code, _, err = run("tune", *arguments, *CPU_ONLY)
    assert (code, err) == (0, "")
    return tuned[-1][0]


def test_tune_measures_remembers_and_shows(run, tmp_path):
    code, out, err = run("tune", "--shape", "3x4x4096", "--activation", "relu", "--repetitions", 2, *CPU_ONLY)
    assert (code, err) == (0, "")
    for said in ("4x4x4096", "relu", "speed-up", "1 measured, 0 remembered, 0 left out", str(tmp_path / "cache")):
        assert said in out
    (path,) = choice_files(tmp_path / "cache")
    assert len(json.loads(path.read_text())["entries"]) == 1
    assert "0 measured, 1 remembered" in run("tune", "--shape", "4x4x4096", "--activation", "relu", *CPU_ONLY)[1]
    assert "from          tuned" in run("explain", 3, 4, 4096, "--activation", "relu", *CPU_ONLY)[1]


def test_tune_by_model_takes_its_cases_with_and_without_the_promise(run, tuned):
    problems = asked_problems(run, tuned, "--model", "DeepSeek-V3/R1/V3.2", "--m", "1,16")
    sizes = {(problem.m, problem.n, problem.k, problem.out_dtype, problem.b_layout) for problem in problems}
    assert sizes == {(m, 256, 7168, torch.float32, "column") for m in (1, 16)}
    assert [problem.static_b for problem in problems] == [False, True, False, True]


def test_tune_by_suite_promises_nothing_where_b_is_no_weight(run, tuned):
    problems = asked_problems(run, tuned, "--suite", "wgrad,gate")
    assert {problem.static_b for problem in problems if problem.k > 100_000} <= {False}
    assert {problem.static_b for problem in problems} == {False, True}


@pytest.mark.parametrize(("option", "promises"), [("--static-weight", {True}), ("--no-static-weight", {False})])
def test_tune_promises_as_told(run, tuned, option, promises):
    problems = asked_problems(run, tuned, "--suite", "gate", "--shape", "4x4x512", option)
    assert {problem.static_b for problem in problems} == promises


def test_tune_takes_every_option_of_a_shape(run, tuned):
    arguments = ("--dtype", "bf16", "--b-dtype", "fp32", "--out-dtype", "fp16", "--layout", "NT", "--bias", "fp32")
    more = ("--activation", "silu", "--precision", "tf32x3", "--batch-invariant")
    (problem,) = asked_problems(run, tuned, "--shape", "3x4x512", *arguments, *more)
    assert problem == dk.Problem.make(
        64,
        4,
        512,
        torch.bfloat16,
        b_dtype=torch.float32,
        out_dtype=torch.float16,
        b_layout="column",
        bias_dtype=torch.float32,
        activation="silu",
        precision="tf32x3",
        batch_invariant=True,
        device_type="cpu",
    )


def test_buckets_and_batch_invariant_problems_are_tuned_once(run, tuned):
    shapes = [word for m in (33, 40, 64) for word in ("--shape", f"{m}x4x512")]
    assert [problem.m for problem in asked_problems(run, tuned, *shapes)] == [64]
    problems = asked_problems(run, tuned, "--model", "Qwen3-30B", "--no-static-weight", "--batch-invariant")
    assert len({(problem.n, problem.k, problem.out_dtype) for problem in problems}) == len(problems)


def test_tune_passes_on_how(run, tuned):
    asked_problems(run, tuned, "--shape", "2x2x64", "--budget", "2m", "--jobs", 3, "--repetitions", 5, "--force")
    options = tuned[-1][1]
    assert (options["budget"], options["jobs"], options["repetitions"], options["force"]) == (120.0, 3, 5, True)


def test_tune_from_a_recording(run, tuned, tmp_path):
    with dk.record() as problems:
        dk.matmul(torch.ones(3, 512), torch.ones(512, 4), activation="relu")
    problems.save(tmp_path / "problems.json")
    assert asked_problems(run, tuned, "--from", tmp_path / "problems.json") == list(problems)
    code, _, _ = run("tune", "--from", tmp_path / "problems.json")
    assert code == 0
    assert tuned[-1][1]["device"].type == "cpu"


def test_a_dry_run_lists_and_does_nothing(run, tuned, tmp_path):
    code, out, err = run("tune", "--model", "DeepSeek-V3", "--m", "1", "--dry-run", *CPU_ONLY)
    assert (code, err, tuned) == (0, "", [])
    assert out.count("to be tuned") == 2
    assert not (tmp_path / "cache").exists()
    problem = dk.Problem.make(2, 2, 64, device_type="cpu")
    cache.remember([entry_of(problem, SPLIT)], dk.Device.of("cpu"))
    assert "remembered" in run("tune", "--shape", "2x2x64", "--dry-run", *CPU_ONLY)[1]
    assert "to be tuned" in run("tune", "--shape", "2x2x64", "--dry-run", "--force", *CPU_ONLY)[1]


def test_where_nothing_was_tuned_the_exit_code_says_so(run, monkeypatch):
    def tune(problems, **options):
        return tuple(choosing.Tuned(problem, "left out", None, ("out of memory",)) for problem in problems)

    monkeypatch.setattr(choosing, "tune_problems", tune)
    code, out, err = run("tune", "--shape", "2x2x64", *CPU_ONLY)
    assert (code, err) == (1, "nothing was tuned\n")
    assert "2x2x64: out of memory" in out


def remember(*problems, device=None):
    cache.remember([entry_of(problem, SPLIT) for problem in problems], device or dk.Device.of("cpu"))


def test_cache_list_says_which_files_count(run, tmp_path):
    remember(dk.Problem.make(2, 2, 64, device_type="cpu"))
    remember(dk.Problem.make(2, 2, 64), device=DEVICES["H200"])
    (tmp_path / "cache" / "nvidia-l4.fp32-fp32.json").write_text("{")
    code, out, err = run("cache", "list", *CPU_ONLY)
    assert (code, err) == (0, "")
    assert "3 files" in out
    for said in ("NVIDIA H200", "yes", "nvidia-l4.fp32-fp32.json", str(tmp_path / "cache")):
        assert said in out


def test_cache_show_shows_choices_and_timings(run):
    remember(dk.Problem.make(2, 2, 64, device_type="cpu"), dk.Problem.make(4, 8, 64, static_b=True, device_type="cpu"))
    code, out, _ = run("cache", "show", *CPU_ONLY)
    assert code == 0
    for said in ("2x2x64", "4x8x64", "static", str(SPLIT), "3.50×", "2 choices"):
        assert said in out
    out = run("cache", "show", "n=8", "--timings", *CPU_ONLY)[1]
    assert "1 choices" in out
    assert "2x2x64" not in out
    assert out.count("torch.mm") == 1
    values = json.loads(run("cache", "show", "n=8", "--json", *CPU_ONLY)[1])
    assert [entry["config"]["split_k"] for entry in values.values()] == [5]


def test_cache_export_clear_and_import(run, tmp_path):
    remember(dk.Problem.make(2, 2, 64, device_type="cpu"))
    code, out, _ = run("cache", "export", tmp_path / "out", *CPU_ONLY)
    assert code == 0
    (path,) = choice_files(tmp_path / "out")
    assert f"wrote {path}" in out
    assert "1 files removed" in run("cache", "clear", *CPU_ONLY)[1]
    assert "0 choices" in run("cache", "show", *CPU_ONLY)[1]
    assert run("cache", "import", path) == (0, f"{path}: 1 choices\n", "")
    assert "1 choices" in run("cache", "show", *CPU_ONLY)[1]


def test_cache_clear_takes_one_device_or_all(run, tmp_path):
    remember(dk.Problem.make(2, 2, 64, device_type="cpu"))
    remember(dk.Problem.make(2, 2, 64), device=DEVICES["H200"])
    assert "1 files removed" in run("cache", "clear", *CPU_ONLY)[1]
    assert [path.name for path in choice_files(tmp_path / "cache")] == ["nvidia-h200.bf16-bf16.json"]
    assert "1 files removed" in run("cache", "clear", "--all")[1]
    assert choice_files(tmp_path / "cache") == ()


def test_a_warning_is_one_line(run, tmp_path):
    problem = dk.Problem.make(2, 2, 64, device_type="cpu")
    remember(problem)
    (path,) = choice_files(tmp_path / "cache")
    path.write_text("{")
    cache.forget()
    code, _, err = run("explain", 2, 2, 64, *CPU_ONLY)
    assert code == 0
    assert len(err.splitlines()) == 1
    assert err.startswith(f"decompose-k: the remembered choices in {path} cannot be read")


WRONG_USE = {
    "nothing-to-tune": (("tune",), "--model, --suite, --shape or --from"),
    "unknown-model": (("tune", "--model", "GPT-9"), "no case is left"),
    "unknown-suite": (("tune", "--suite", "routers"), "suite must be one of"),
    "shape": (("tune", "--shape", "16"), "MxNxK"),
    "bias": (("tune", "--shape", "2x2x64", "--bias", "fp4"), "got 'fp4'"),
    "complex-bias": (("tune", "--shape", "2x2x64", "--bias", "complex64"), "bias_dtype must be one of"),
    "precision": (("tune", "--shape", "2x2x64", "--precision", "tf32"), "precision must be"),
    "budget": (("tune", "--shape", "2x2x64", "--budget", "soon"), "budget must be a time"),
    "jobs": (("tune", "--shape", "2x2x64", "--jobs", "0"), "jobs"),
    "device": (("tune", "--shape", "2x2x64", "--device", "tpu"), "device must be one of"),
    "no-recording": (("tune", "--from", "nothing.json"), "nothing.json"),
    "from-and-model": (("tune", "--from", "a.json", "--model", "Kimi"), "from must be alone"),
    "mixed-explain": (("explain", "2", "2", "64", "--b-dtype", "int8"), "b_dtype must be bf16"),
    "nothing-to-export": (("cache", "export", "out", "--device", "cpu"), "nothing is remembered for"),
    "no-import": (("cache", "import", "nothing.json"), "nothing.json"),
    "no-cache-command": (("cache", "empty"), "empty"),
}


@pytest.mark.parametrize(("arguments", "said"), WRONG_USE.values(), ids=WRONG_USE)
def test_wrong_use_is_one_line_and_exit_code_2(run, monkeypatch, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*arguments)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert err.startswith("decompose-k: ")
    assert said in err


def test_a_file_that_is_no_recording_or_cache_is_said(run, tmp_path):
    (tmp_path / "file.json").write_text("{")
    for command in (("tune", "--from"), ("cache", "import")):
        code, _, err = run(*command, tmp_path / "file.json")
        assert code == 2
        assert len(err.splitlines()) == 1
        assert "file.json" in err


def test_a_folder_that_cannot_be_written_is_said(run, tmp_path):
    remember(dk.Problem.make(2, 2, 64, device_type="cpu"))
    (tmp_path / "file").write_text("")
    code, _, err = run("cache", "export", tmp_path / "file" / "out", *CPU_ONLY)
    assert code == 2
    assert str(tmp_path / "file") in err
