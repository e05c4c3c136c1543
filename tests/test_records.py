"""The READMEs are made from the records: what is written, and what does not match is found."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from decompose_k.bench.rows import append_jsonl
from decompose_k.bench.suites import suite_cases
from rows_for_tests import pair, row

ROOT = Path(__file__).parents[1]
MARK = "<!-- results:begin -->\n"

STUDY = [
    found
    for m in (16, 64)
    for k in (8192, 32768)
    for found in [
        *pair(10.0, 4.0 if m == 16 else 12.0, spread=0.01, suite="epilogue-bf16", name=f"grid {m}", m=m, n=m, k=k),
        row(8.0, 0.01, variant="compiled", suite="epilogue-bf16", name=f"grid {m}", m=m, n=m, k=k),
    ]
]


@pytest.fixture
def records(tmp_path, monkeypatch):
    """The script on a copy of the project's records and READMEs, without a study and up to date."""
    shutil.copytree(ROOT / "results", tmp_path / "results")
    for file in (tmp_path / "results").glob("*/study*.jsonl"):
        file.unlink()
    shutil.copy(ROOT / "README.md", tmp_path)
    spec = importlib.util.spec_from_file_location("summarize", tmp_path / "results" / "summarize.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["summarize.py", *arguments])
        return module.main()

    if run("--check"):
        run()
    return tmp_path, run


@pytest.fixture
def summarize():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("summarize", ROOT / "results" / "summarize.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "change",
    [
        lambda root: _replace(root / "README.md", MARK, f"{MARK}| typed | by | hand |\n"),
        lambda root: _replace(root / "results" / "README.md", MARK, f"{MARK}typed by hand\n"),
        lambda root: _replace(root / "results" / "plots" / "h200-roofline.svg", "</svg>", "<g/></svg>"),
        lambda root: (root / "results" / "plots" / "h200-roofline.svg").unlink(),
        lambda root: (root / "results" / "plots" / "stray.svg").write_text("<svg/>", encoding="utf-8"),
        lambda root: append_jsonl(root / "results" / "h200" / "study.jsonl", STUDY),
    ],
    ids=["table", "results", "plot", "missing-plot", "stray-plot", "new-rows"],
)
def test_what_does_not_match_is_found_named_and_mended(records, change, capsys):
    root, run = records
    change(root)
    assert run("--check") == 1
    assert "run `make readme`" in capsys.readouterr().err
    assert run() == 0
    assert run("--check") == 0


def test_a_run_of_the_study_becomes_tables_and_plots(records):
    root, run = records
    append_jsonl(root / "results" / "h200" / "study.jsonl", STUDY)
    run()
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert "| epilogue-bf16 | 4 of 28 | 0.83× / 1.67× / 2.50× |  | 0.67× / 1.33× / 2.00× |  | 2 |" in readme
    assert "Decompose-K is 1.67× as fast as torch.mm and 1.33× as fast as the fastest alternative" in readme
    assert "It wins 2, ties 0 and loses 2 of them (epilogue-bf16)." in readme
    assert "results/plots/h200-latency-epilogue-bf16-bf16.svg" in readme
    assert "results/h200/report.html" in readme
    assert "grid 64" in (root / "results" / "h200" / "report.html").read_text(encoding="utf-8")
    full = (root / "results" / "README.md").read_text(encoding="utf-8")
    assert "| epilogue-bf16 | bf16 | default | torch eager | 4 | 2 | 0 | 2 | 0.83× | 1.67× | 2.50× |" in full
    assert "| torch.compile | 4 | 2 | 0 | 2 | 0.67× | 1.33× | 2.00× | grid 64 64x64x8192 0.67×" in full


def test_a_report_without_its_rows_goes(records):
    root, run = records
    rows, report = (root / "results" / "h200" / name for name in ("study.jsonl", "report.html"))
    append_jsonl(rows, STUDY)
    run()
    report.write_text("typed by hand", encoding="utf-8")
    assert run("--check") == 1
    run()
    assert "typed" not in report.read_text(encoding="utf-8")
    rows.unlink()
    assert run("--check") == 1
    run()
    assert not report.exists()


def test_a_part_of_the_study_is_said_to_be_one(summarize):
    assert "2 of the study's 504 cases" in summarize.coverage(
        [row(suite="mhc", name="x", m=1), row(suite="mhc", name="x", m=4)]
    )
    everything = [
        row(suite=case.shape.suite, name=str(index), m=case.shape.m)
        for index, case in enumerate(suite_cases(["study"]))
    ]
    assert summarize.coverage(everything) == "All 504 cases of the study are measured."


def test_few_numbers_in_short_are_the_least_the_median_and_the_greatest(summarize):
    assert summarize.in_short([4.0, 1.0, 2.0, 3.0]) == "1.00× / 2.50× / 4.00×"
    assert summarize.in_short([]) == ""


def test_a_document_without_marks_is_refused(records):
    root, run = records
    _replace(root / "README.md", "<!-- results:begin -->", "")
    with pytest.raises(ValueError, match="must have the marks"):
        run()


def _replace(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
