"""A report as a reader's program sees it: parsed, or shown by a browser without a window where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SECONDS = 120


class Page(HTMLParser):
    """Every element of a page with its attributes, and the texts of table cells."""

    VOID = frozenset({"meta", "input", "path", "use", "rect", "link", "br"})

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.cells = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "td":
            self.cells.append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data

    def count(self, tag):
        return sum(name == tag for name, _ in self.elements)


def find_browser() -> str | None:
    """A Chromium of this machine; None where there is none."""
    return next((found for name in _BROWSERS if (found := shutil.which(name))), None)


# What goes before the page's own script and after it. Each heading is clicked twice; what a reader then sees is kept.
_BEFORE = """<script>
window.problems = [];
addEventListener("error", (event) => problems.push(event.message));
addEventListener("unhandledrejection", (event) => problems.push(String(event.reason)));
</script>"""
_AFTER = """<script>
const seen = { tables: {}, filtered: {}, plots: [] };
for (const table of document.querySelectorAll("table.sortable")) {
  const columns = [];
  Array.from(table.tHead.rows[0].cells).forEach((heading, column) => {
    const orders = [];
    for (let turn = 0; turn < 2; turn += 1) {
      heading.querySelector("button").click();
      orders.push([heading.getAttribute("aria-sort"),
                   Array.from(table.tBodies[0].rows, (row) => row.cells[column])
                     .map((cell) => cell.dataset.key ?? cell.textContent)]);
    }
    columns.push([heading.classList.contains("number"), orders]);
  });
  seen.tables[table.id] = columns;
}
for (const input of document.querySelectorAll("input[data-table]")) {
  const rows = Array.from(document.getElementById(input.dataset.table).tBodies[0].rows);
  input.value = "router 64";
  input.dispatchEvent(new Event("input"));
  seen.filtered[input.dataset.table] = rows.filter((row) => !row.hidden).map((row) => row.textContent);
}
document.querySelectorAll("details").forEach((one) => { one.open = true; });
for (const svg of document.querySelectorAll("figure svg")) {
  const box = svg.getBoundingClientRect();
  seen.plots.push([svg.closest("figure").id, box.width, box.height]);
}
seen.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
seen.paper = getComputedStyle(document.body).backgroundColor;
seen.problems = problems;
const result = document.createElement("script");
result.type = "application/json";
result.id = "seen";
result.textContent = JSON.stringify(seen);
document.body.append(result);
</script>"""


def show(browser: str, page: str, folder: Path, *, width: int = 1200, dark: bool = False) -> dict[str, object]:
    """What a browser makes of a page in a window of some width: orders of its tables, sizes of its plots, errors.

    `dark` is what a reader sees who prefers dark pages.
    """
    path = folder / "page.html"
    if dark:
        page = page.replace("(prefers-color-scheme: dark)", "all")
    path.write_text(page.replace("<style>", f"{_BEFORE}<style>", 1).replace("</body>", f"{_AFTER}</body>"), "utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", "--dump-dom"]
    command += ["--virtual-time-budget=10000"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=_SECONDS, check=True)
    found = re.search(r'<script type="application/json" id="seen">(.*?)</script>', done.stdout, re.DOTALL)
    assert found is not None, f"the page did not come to its end: {done.stderr[-2000:]}"
    return json.loads(found[1])
