// What the pointer reads off a chart: every visible curve's value nearest to it. Texts become text nodes, never HTML.
function node(name, text = "", style = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (style) made.className = style;
  return made;
}

const hoverFrame = () => ({
  className: "hover", backgroundColor: colour("card"), borderColor: colour("line"), borderWidth: 1, padding: [6, 8],
  textStyle: { color: colour("ink"), fontSize: 13 }, position: beside, transitionDuration: 0,
});

// Right of the pointer if there is room, else left of it; always inside the window.
function beside([x], found, shown, rect, size) {
  const frame = shown.parentElement.getBoundingClientRect(), [width, height] = size.contentSize;
  const end = document.documentElement.clientWidth - frame.left;
  const left = x + 16 + width < end ? x + 16 : x - width - 16;
  const inside = (start, length, from, to) => Math.max(from + 4, Math.min(start, to - length - 4));
  return [
    inside(left, width, -frame.left, end),
    inside(8, height, -frame.top, innerHeight - frame.top),
  ];
}

// The index of the point of a curve nearest to x; -1 if x lies outside of it by more than a step.
function nearest(curve, x) {
  const xs = curve.x, last = xs.length - 1;
  let best = -1;
  for (let place = 0; place <= last; place += 1) {
    if (!Number.isNaN(xs[place]) && (best < 0 || Math.abs(xs[place] - x) < Math.abs(xs[best] - x))) best = place;
  }
  if (best < 0) return -1;
  const step = last > 0 ? Math.abs(xs[last] - xs[0]) / last : 1;
  return Math.abs(xs[best] - x) <= step * 1.01 ? best : -1;
}

function rowOf(spec, curve, place, x) {
  const row = node("tr");
  const mark = node("td");
  mark.innerHTML = markOf(curve.run, curve.dash);
  const name = [data.runs.length > 1 || !curve.name ? data.runs[curve.run] : "", curve.name].filter(Boolean).join(" ");
  const value = node("td", shown(curve.y[place], spec.unit), "number");
  const band = curve.low && Number.isFinite(curve.low[place])
    ? `${shown(curve.low[place], spec.unit)} to ${shown(curve.high[place], spec.unit)}` : "";
  const at = spec.whole && curve.x[place] === x ? "" : `at ${axisText(spec.xUnit)(curve.x[place])}`;
  row.append(mark, node("td", name), value, node("td", band), node("td", at));
  return row;
}

function hoverOf(spec, x, visible) {
  const wanted = spec.whole ? Math.round(x) : x;
  const frame = node("div");
  frame.append(node("strong", `${spec.whole ? "epoch " : ""}${shown(wanted, spec.xUnit)}`));
  const table = node("table");
  for (const curve of spec.curves) {
    const place = visible(curve.run) ? nearest(curve, wanted) : -1;
    if (place >= 0) table.append(rowOf(spec, curve, place, wanted));
  }
  frame.append(table);
  return frame;
}
