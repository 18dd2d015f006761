// Tables sort by a click on a heading, or Enter or space on it: numbers by value, texts in natural order, empty last.
const NATURAL = new Intl.Collator("en", { numeric: true });

function compare(one, other) {
  if (one === "" || other === "") return one === other ? 0 : one === "" ? 2 : -2;  // 2: whatever the direction
  const numbers = [Number(one), Number(other)];
  return numbers.some(Number.isNaN) ? NATURAL.compare(one, other) : numbers[0] - numbers[1];
}

const keyOf = (row, column) => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();

function sortBy(heading) {
  const body = heading.closest("table").tBodies[0], column = heading.cellIndex;
  const descending = heading.getAttribute("aria-sort") === "ascending";
  const rows = [...body.rows].sort((one, other) => {
    const order = compare(keyOf(one, column), keyOf(other, column));
    return Math.abs(order) === 2 && (keyOf(one, column) === "" || keyOf(other, column) === "") ? order : descending ? -order : order;
  });
  for (const each of heading.parentNode.cells) each.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  body.append(...rows);
}

function listenToHeadings() {
  for (const button of document.querySelectorAll("table.sortable thead button")) {
    button.addEventListener("click", () => sortBy(button.closest("th")));
  }
}
