"""The report as its readers get it: checked by a parser always, and by a Chromium where this machine has one.

The first lines of a test run say which of the two it has.
"""

from __future__ import annotations

import math

import pytest

from decompose_k.bench.plots import make_plots
from decompose_k.bench.report import report_html
from pages_for_tests import Page, find_browser, show
from rows_for_tests import pair, row

GRID = [
    found
    for m in (16, 64)
    for k in (8192, 16384, 32768)
    for found in [
        *pair(10.0, 4.0 if m < 64 else 20.0, m=m, n=m, k=k, name=f"grid {m}", noise=0.01, host_us=20.0, event_us=30.0),
        row(8.0, variant="compiled", m=m, n=m, k=k, name=f"grid {m}"),
        row(2.0, variant="floor-wait-first", m=m, n=m, k=k, name=f"grid {m}"),
    ]
]
ROUTER = [
    found
    for model in range(4)
    for m in (1, 64, 256)
    for found in pair(7.0, 2.0 + m / 32, suite="router", name=f"model {model}", m=m, n=256, k=7168, layout="NT")
]
CROSSOVER = [
    found
    for m in (16, 1024)
    for n in (16, 1024)
    for k in (512, 8192)
    for found in pair(10.0, 4.0 if k > 512 and m * n < 1 << 19 else 30.0, suite="crossover", m=m, n=n, k=k, name="x")
]
ROWS = GRID + ROUTER + CROSSOVER
TABLES = {"suites", "floors", "cases", "variants"}


@pytest.fixture(scope="module")
def plots():
    return make_plots(ROWS)


@pytest.fixture(scope="module")
def page(plots):
    return report_html(ROWS, plots)


def test_parsed_it_has_every_table_and_plot(page, plots):
    parsed = Page(page)
    assert parsed.open == []
    ids = {attributes.get("id") for _, attributes in parsed.elements}
    assert ids >= TABLES | {plot.name for plot in plots}
    assert {plot.name for plot in plots} >= {"crossover", "host-time", "roofline", "latency-seed-bf16-16"}
    assert parsed.count("script") == 1


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 500], ids=["wide", "narrow"])
def test_shown_it_sorts_filters_and_fits(page, plots, width, dark, tmp_path):
    seen = show(find_browser(), page, tmp_path, width=width, dark=dark)
    assert seen["problems"] == []
    assert seen["overflow"] <= 0
    assert seen["paper"] == ("rgb(20, 24, 31)" if dark else "rgb(255, 255, 255)")
    assert set(seen["tables"]) == TABLES
    for name, columns in seen["tables"].items():
        for is_number, orders in columns:
            for (direction, keys), expected in zip(orders, ("ascending", "descending"), strict=True):
                assert direction == expected, name
                if is_number:
                    numbers = [math.inf if key == "Infinity" else float(key) for key in keys]
                    assert numbers == sorted(numbers, reverse=direction == "descending")
    assert {name for name, _, _ in seen["plots"]} == {plot.name for plot in plots}
    assert all(shown_width > 100 and height > 50 for _, shown_width, height in seen["plots"])
    for texts in seen["filtered"].values():
        assert all("router" in text and "64" in text for text in texts)


def test_a_reader_is_told_when_to_use_it_and_when_not(page):
    text = " ".join(page.split())
    for said in (
        "When to use it, and when not",
        "seed (bf16): use Decompose-K at M = 16 (3 cases, 2.00× to 2.00×, median 2.00×);"
        " stay with torch at M = 64 (3 cases, 0.40× to 0.40×, median 0.40×).",
        "use Decompose-K at M = 1, 64",
        "stay with torch at M = 256",
        "crossover, K = 512: it wins at none of 4 sizes.",
        "crossover, K = 8192: it wins at 3 of 4 sizes, up to M × N = 16 × 1024; the smallest output where it does not"
        " is 1024 × 1024 (0.33×).",
    ):
        assert said in text
