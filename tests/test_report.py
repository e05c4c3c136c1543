"""Rows, what is concluded from them, and the page that shows it."""

from __future__ import annotations

import csv
import json
import re
from xml.etree import ElementTree

import pytest

from decompose_k.bench.plots import make_plots
from decompose_k.bench.report import report_html, write_report
from decompose_k.bench.rows import Row, append_jsonl, read_jsonl, write_csv
from decompose_k.bench.summary import duels, duration, findings, per_second, tallies, times
from pages_for_tests import Page
from rows_for_tests import pair, row

GRID = [
    found
    for m in (16, 32, 48, 64)
    for place, k in enumerate((8192, 16384, 32768))
    for found in pair(10.0 + place, 4.0 if m < 64 else 20.0, m=m, n=m, k=k, name=f"seed grid M=N={m}")
]
ROUTER = [
    found
    for model in range(12)
    for m in (1, 16, 64)
    for found in pair(
        7.0, 2.0 + model / 4, suite="router", name=f"model {model}", m=m, n=256, k=7168, out_dtype="fp32", layout="NT"
    )
]
LORA = pair(5.0, 2.0, suite="lora", name='LoRA <r=8> & "co"', m=1, n=8, k=14336, out_dtype="fp32", status="unverified")
ROWS = GRID + ROUTER + LORA


@pytest.fixture(scope="module")
def page():
    return report_html(ROWS, make_plots(ROWS), ["a note with <b>"])


def test_rows_survive_the_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_jsonl(path, ROWS[:3])
    append_jsonl(path, ROWS[3:])
    assert read_jsonl(path) == tuple(ROWS)


def test_the_table_for_spreadsheets_has_every_field_of_every_row(tmp_path):
    write_csv(tmp_path / "rows.csv", ROWS)
    with (tmp_path / "rows.csv").open(newline="", encoding="utf-8") as file:
        records = list(csv.DictReader(file))
    assert len(records) == len(ROWS)
    assert set(records[0]) == set(ROWS[0].to_json())
    assert json.loads(records[1]["config"]) == ROWS[1].config
    assert float(records[1]["p50_us"]) == ROWS[1].p50_us


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
        ("[]", "JSON object; got list"),
        ("{}", r"lacks \['a_dtype'"),
        (json.dumps({**ROWS[0].to_json(), "extra": 1}), "unknown fields.*extra"),
        (json.dumps({**ROWS[0].to_json(), "p50_us": "fast"}), "p50_us must be a finite number > 0; got 'fast'"),
        (json.dumps({**ROWS[0].to_json(), "p50_us": 0}), "p50_us must be"),
        (json.dumps({**ROWS[0].to_json(), "error": float("nan")}), "error must be a finite number"),
        (json.dumps({**ROWS[0].to_json(), "m": -1}), "m must be an integer >= 0"),
        (json.dumps({**ROWS[0].to_json(), "ours": "yes"}), "ours must be true or false"),
        (json.dumps({**ROWS[0].to_json(), "config": "mm"}), "config must be an object or null"),
        (json.dumps({**ROWS[0].to_json(), "device": None}), "device must be a text"),
    ],
    ids=["json", "list", "empty", "extra", "text", "zero", "nan", "negative", "flag", "config", "null"],
)
def test_a_corrupt_row_is_named_by_its_line(tmp_path, line, said):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0].to_json()) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"line 2: .*{said}" if said != "line 2" else said):
        read_jsonl(path)


@pytest.mark.parametrize(("content", "said"), [(b"", "no rows"), (b"\n \n", "no rows"), (b"\xff\xfe", "not a file")])
def test_a_file_without_rows_is_refused(tmp_path, content, said):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_jsonl(path)


@pytest.mark.parametrize(
    ("torch_us", "ours_us", "spread", "verdict"),
    [
        (10, 5, 0.1, "win"),
        (5, 10, 0.1, "loss"),
        (10, 9.8, 0.0, "tie"),
        (10, 10.2, 0.0, "tie"),
        (10, 9, 0.2, "tie"),
        (9, 10, 0.2, "tie"),
        (10, 9, 0.01, "win"),
    ],
)
def test_a_verdict_needs_more_than_the_noise(torch_us, ours_us, spread, verdict):
    theirs = row(torch_us, spread)
    ours = row(ours_us, spread, variant="auto", ours=True)
    assert [duel.verdict for duel in duels([theirs, ours])] == [verdict]


def test_what_callers_get_is_compared_and_a_repeated_case_counts_once():
    rows = [
        row(10),
        row(1, variant="static", ours=True, static_b=True),
        row(8, variant="auto", ours=True),
        row(4, variant="split", ours=True),
        row(6, variant="torch-cast"),
        row(5, variant="split", ours=True),
        row(9, variant="auto", ours=True),
    ]
    (duel,) = duels(rows)
    assert (duel.ours.variant, duel.ours.p50_us, duel.speedup) == ("auto", 9, 10 / 9)
    assert duels(rows, ours="split")[0].speedup == 10 / 5
    assert duels(rows, "torch-cast")[0].speedup == 6 / 9


def test_without_auto_the_fastest_of_ours_is_compared():
    rows = [row(10), row(1, variant="static", ours=True, static_b=True), row(4, variant="generation-3", ours=True)]
    (duel,) = duels([*rows, row(5, variant="split", ours=True)])
    assert (duel.ours.variant, duel.speedup) == ("generation-3", 2.5)
    assert duels(rows, ours="auto") == []


def test_cases_that_differ_in_anything_are_apart():
    changes = [{}, {"m": 32}, {"a_dtype": "fp16"}, {"layout": "NT"}, {"activation": None}, {"device": "other"}]
    assert len(duels([found for change in changes for found in pair(10, 5, **change)])) == len(changes)


def test_a_case_without_its_rival_is_no_duel():
    assert duels(pair(10, 5)[:1]) == duels(pair(10, 5)[1:]) == []
    assert "nothing to compare" in findings(pair(10, 5)[:1])[0]


def test_the_tally_counts_and_names_the_losses():
    (tally,) = tallies(duels(GRID))
    assert [tally.count(verdict) for verdict in ("win", "tie", "loss")] == [9, 0, 3]
    assert next(duel.title for duel in tally.losses) == "seed grid M=N=64 64x64x8192"
    assert (tally.speedups[0], tally.speedups[-1]) == (0.5, 3.0)


def test_the_findings_say_where_it_wins_and_where_it_does_not():
    text = " ".join(findings(GRID + pair(5, 10, suite="gram", name="Gram", m=64, n=64, k=1 << 20)))
    assert "wins 9, ties 0 and loses 4 of 13" in text
    assert "Lost: " in text
    assert "Gram 64x64x1048576 0.50×" in text
    assert "use Decompose-K for seed (bf16); stay with torch for gram (bf16)" in text
    assert "busy" not in text


def test_a_busy_machine_is_admitted():
    theirs, ours = row(10, 0.5), row(5, 0.5, variant="auto", ours=True)
    assert "busy" in findings([theirs, ours])[-1]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.5, "0.50 µs"), (9.996, "10.0 µs"), (123.4, "123 µs"), (999.6, "1.00 ms"), (2.5e6, "2.50 s")],
)
def test_durations_have_three_digits_and_a_unit(value, shown):
    assert duration(value) == shown


def test_ratios_and_rates_are_short():
    assert [times(value) for value in (0.5, 1.854, 9.94, 9.96, 123.4)] == ["0.50×", "1.85×", "9.94×", "10.0×", "123.4×"]
    assert [per_second(value, "B") for value in (4.3e12, 17.9e9, 5e6)] == ["4.30 TB/s", "17.9 GB/s", "5.00 MB/s"]


def test_there_is_a_plot_of_each_kind():
    plots = {plot.name: plot for plot in make_plots(ROWS)}
    latencies = {f"latency-seed-bf16{size}" for size in ("", "-16", "-32", "-48", "-64")}
    assert set(plots) == {"speedup-grid-seed-bf16", *latencies, "speedup-router", "speedup-lora", "roofline"}
    for plot in plots.values():
        ElementTree.fromstring(plot.svg)
    for shown in ("2.50×", "0.60×", "8k", "32k", "M = N"):
        assert shown in plots["speedup-grid-seed-bf16"].svg


def test_plots_take_the_page_s_colours_and_are_the_same_every_time():
    first, second = make_plots(ROWS), make_plots(ROWS)
    assert first == second
    assert all("var(--ink" in plot.svg for plot in first)


def test_one_row_makes_a_page():
    assert "Every variant" in report_html([row()], make_plots([row()]))


def test_the_page_is_well_formed_and_complete(page):
    parsed = Page(page)
    assert parsed.open == []
    assert parsed.count("table") == 3
    assert parsed.count("svg") == 9
    ids = {attributes.get("id") for _, attributes in parsed.elements}
    assert {"suites", "cases", "variants", "roofline"} <= ids
    assert parsed.count("tr") == 3 + 3 + len(ROWS) // 2 + len(ROWS)
    assert parsed.count("details") == 2


def test_the_page_loads_nothing(page):
    parsed = Page(page)
    loading = [
        (tag, name, value)
        for tag, attributes in parsed.elements
        for name, value in attributes.items()
        if name in ("src", "srcset", "data", "action") or (name.endswith("href") and not value.startswith("#"))
    ]
    assert loading == []
    assert not re.search(r"url\((?!['\"]?#)|@import|fetch\(|XMLHttpRequest", page)


def test_the_page_has_both_colour_schemes_and_fits_a_phone(page):
    assert "prefers-color-scheme: dark" in page
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page


def test_cells_are_sortable_by_number_and_text_is_escaped(page):
    parsed = Page(page)
    cells = [attributes for tag, attributes in parsed.elements if tag == "td"]
    assert len(cells) == len(parsed.cells)
    keys = [attributes.get("data-key", text) for attributes, text in zip(cells, parsed.cells, strict=True)]
    numbers = [
        key for key, attributes in zip(keys, cells, strict=True) if "number" in attributes.get("class", "").split()
    ]
    assert [float(key) for key in numbers]
    assert not any(attributes.get("data-key") == text for attributes, text in zip(cells, parsed.cells, strict=True))
    assert 'LoRA <r=8> & "co" (unverified)' in parsed.cells
    assert "a note with &lt;b&gt;" in page


def test_the_report_is_made_from_stored_rows_alone(tmp_path):
    stored = tmp_path / "rows.jsonl"
    append_jsonl(stored, ROWS)
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder, rows in zip(folders, (ROWS, read_jsonl(stored)), strict=True):
        folder.mkdir()
        write_report(folder, rows)
    files = sorted(path.relative_to(folders[0]) for path in folders[0].rglob("*") if path.is_file())
    assert len(files) == 2 + 9
    for file in files:
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes()


def test_a_row_knows_its_roofline():
    assert row(bytes=4_000_000, bandwidth=4e12).roofline_us == pytest.approx(1.0)
    assert row(flops=8 * 10**9, rate=8e14).roofline_us == pytest.approx(10.0)
    assert isinstance(row(), Row)
