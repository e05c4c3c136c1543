"use strict";

// Sort by a column's keys; the same heading again turns the order round. Equal rows keep their order.
function sortBy(table, column, descending) {
  const isNumber = table.tHead.rows[0].cells[column].classList.contains("number");
  const keyOf = (row) => row.cells[column].dataset.key ?? row.cells[column].textContent;
  const compare = isNumber
    ? (left, right) => Number(keyOf(left)) - Number(keyOf(right))
    : (left, right) => keyOf(left).localeCompare(keyOf(right), undefined, { numeric: true });
  const rows = Array.from(table.tBodies[0].rows).sort((left, right) => (descending ? compare(right, left) : compare(left, right)));
  table.tBodies[0].append(...rows);
}

for (const table of document.querySelectorAll("table.sortable")) {
  const headings = Array.from(table.tHead.rows[0].cells);
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const descending = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sortBy(table, column, descending);
    });
  });
}

for (const input of document.querySelectorAll("input[data-table]")) {
  const rows = Array.from(document.getElementById(input.dataset.table).tBodies[0].rows);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
}
