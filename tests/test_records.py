"""The READMEs are made from the records: what is written, and what does not match is found."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from decompose_k.bench.rows import append_jsonl
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
    assert "| epilogue-bf16 | bf16 | default | torch eager | 4 | 2 | 0 | 2 | 0.83× | 1.67× | 2.50× |" in readme
    assert "| the fastest of these | 4 | 2 | 0 | 2 | 0.67× |" in readme
    assert "results/plots/h200-latency-epilogue-bf16-bf16.svg" in readme
    assert "results/h200" in readme
    full = (root / "results" / "README.md").read_text(encoding="utf-8")
    assert "| torch.compile | 4 | 2 | 0 | 2 | 0.67× | 1.33× | 2.00× | grid 64 64x64x8192 0.67×" in full


def test_a_document_without_marks_is_refused(records):
    root, run = records
    _replace(root / "README.md", "<!-- results:begin -->", "")
    with pytest.raises(ValueError, match="must have the marks"):
        run()


def _replace(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
