// The figures: each has a chart, keys, and a table of its values that is made when it is opened.
const KINDS = {
  lines: { options: linesOptions, keys: linesKeys, table: linesTable },
  stack: { options: stackOptions, keys: stackKeys, table: stackTable },
};
const hidden = new Set();  // numbers of runs
const visible = (run) => !hidden.has(run);
const figures = [];

function makeFigure(spec) {
  const frame = document.getElementById(spec.id), kind = KINDS[spec.kind];
  const place = frame.querySelector(".chart"), details = frame.querySelector("details");
  const figure = { spec, frame, chart: null, draw, resize };

  function draw() {
    if (frame.hidden) return;
    if (!figure.chart) figure.chart = echarts.init(place, null, { renderer: "svg" });
    figure.chart.setOption(kind.options(spec, visible), { notMerge: true, silent: true });
    frame.querySelector(".keys").replaceChildren(...kind.keys(spec, draw));
    place.setAttribute("aria-label", describe(spec, kind));
    if (details.open) fillTable();
  }

  function resize(size) {
    if (figure.chart) figure.chart.resize(size);
  }

  function fillTable() {
    const { heads, rows } = kind.table(spec, visible);
    const table = node("table"), head = node("tr"), body = node("tbody"), top = node("thead"), scroll = node("div", "", "scroll");
    head.append(...heads.map((text) => node("th", text)));
    top.append(head);
    for (const cells of rows) {
      const row = node("tr");
      row.append(...cells.map((text, at) => node(at ? "td" : "th", text, at ? "number" : "")));
      body.append(row);
    }
    table.append(node("caption", spec.title), top, body);
    scroll.tabIndex = 0;
    scroll.append(table);
    details.querySelector(".scroll")?.remove();
    details.append(scroll);
  }

  details.addEventListener("toggle", () => details.open && fillTable());
  figures.push(figure);
  return figure;
}

// What a chart shows, for those who cannot see it.
function describe(spec, kind) {
  if (spec.kind === "stack") return `Stacked bars: ${spec.title}; ${spec.parts.join(", ")}; ${spec.labels.length} bars.`;
  const curves = spec.curves.filter((curve) => visible(curve.run)).slice(0, 12).map((curve) => {
    const known = Array.from(curve.y).filter(Number.isFinite);
    const name = [data.runs[curve.run], curve.name].filter(Boolean).join(" ");
    return known.length ? `${name} from ${shown(known[0], spec.unit)} to ${shown(known[known.length - 1], spec.unit)}` : name;
  });
  return `Curves: ${spec.title}. ${curves.join("; ")}.`;
}
