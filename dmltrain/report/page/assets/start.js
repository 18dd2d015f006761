// Draws the page, and again when its width, its colours or its medium changes.
const PAPER = 660;  // width of a chart on paper, CSS pixels

function redraw() {
  drawMarks();
  for (const figure of figures) figure.draw();
}

function forPaper(printing) {
  for (const figure of figures) figure.resize(printing ? { width: PAPER, height: 270 } : { width: "auto", height: "auto" });
  redraw();
}

data.charts.forEach(makeFigure);
listenToRuns();
listenToHeadings();
redraw();

new ResizeObserver(() => requestAnimationFrame(() => {
  if (!matchMedia("print").matches) for (const figure of figures) figure.resize();
})).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
matchMedia("print").addEventListener("change", (event) => forPaper(event.matches));
document.documentElement.dataset.drawn = String(figures.filter((figure) => figure.chart).length);
