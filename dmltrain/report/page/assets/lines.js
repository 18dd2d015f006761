// A chart of curves as options of the library. A band is two invisible stacked lines with the area between them.
const MOST_MARKERS = 12;

const GRID = { left: 8, right: 22, top: 34, bottom: 30, containLabel: true };
const BELOW = { nameLocation: "middle", nameGap: 28 };  // the name of an axis: below it, or above its upper end
const ABOVE = { nameLocation: "end", nameGap: 12 };

function axis(name, type, more) {
  return {
    type, name, nameTextStyle: { color: colour("soft"), align: more.nameLocation === "end" ? "left" : "center" },
    axisLabel: { color: colour("soft"), hideOverlap: true }, axisLine: { lineStyle: { color: colour("line") } },
    axisTick: { lineStyle: { color: colour("line") } }, splitLine: { lineStyle: { color: colour("grid") } }, ...more,
  };
}

const points = (xs, ys) => Array.from(xs, (x, place) => [Number.isNaN(x) ? null : x, Number.isNaN(ys[place]) ? null : ys[place]]);

function edge(curve, place, ys, area) {
  return {
    type: "line", id: `${place} ${area ? "high" : "low"}`, data: points(curve.x, ys), stack: `band ${place}`,
    stackStrategy: "all", symbol: "none", silent: true, z: 1, lineStyle: { opacity: 0 }, tooltip: { show: false },
    areaStyle: area ? { color: runColour(curve.run), opacity: 0.16 } : undefined,
  };
}

function seriesOf(curve, place) {
  const apart = Math.max(1, Math.ceil(curve.x.length / MOST_MARKERS)), ink = runColour(curve.run);
  const line = {
    type: "line", id: `${place}`, name: [data.runs[curve.run], curve.name].filter(Boolean).join(" "),
    data: points(curve.x, curve.y), z: 2, connectNulls: false, silent: true, emphasis: { disabled: true },
    lineStyle: { color: ink, width: 1.8, type: dash(curve.dash) }, itemStyle: { color: ink },
    symbol: marker(curve.run), showSymbol: true, showAllSymbol: true,
    symbolSize: (_, point) => ((point.dataIndex + 2 * curve.run) % apart ? 0 : 6),
  };
  if (!curve.low) return [line];
  const height = curve.high.map((high, at) => high - curve.low[at]);
  return [edge(curve, place, curve.low, false), edge(curve, place, height, true), line];
}

function linesOptions(spec, visible) {
  const curves = spec.curves.map((curve, place) => [curve, place]).filter(([curve]) => visible(curve.run));
  const label = { formatter: axisText(spec.unit) };
  return {
    animation: false,
    grid: GRID,
    textStyle: { fontFamily: "inherit" },
    xAxis: axis(spec.xLabel, "value", {
      ...BELOW, min: spec.xUnit === "seconds" ? 0 : "dataMin", max: "dataMax", minInterval: spec.whole ? 1 : 0,
      splitLine: { show: false }, axisLabel: { color: colour("soft"), hideOverlap: true, showMaxLabel: spec.whole ? undefined : false,
        formatter: axisText(spec.xUnit) },
    }),
    yAxis: axis(spec.yLabel, "value", {
      ...ABOVE, scale: !spec.fromZero, axisLabel: { color: colour("soft"), ...label },
    }),
    tooltip: {
      ...hoverFrame(), trigger: "axis", axisPointer: { type: "line", snap: false, lineStyle: { color: colour("soft") }, label: { show: false } },
      formatter: (found) => hoverOf(spec, found[0].axisValue, visible),
    },
    series: curves.flatMap(([curve, place]) => seriesOf(curve, place)),
  };
}

// Which curve is which, where a run has several: train, validation; and the table of values.
function linesKeys(spec) {
  const names = new Map(spec.curves.filter((curve) => curve.name).map((curve) => [curve.name, curve.dash]));
  const several = data.runs.length > 1;
  const keys = [...names].map(([name, number]) => {
    const key = node("span");
    key.innerHTML = markOf(several ? null : 0, number, several ? colour("ink") : runColour(0));
    key.append(name);
    return key;
  });
  if (spec.curves.some((curve) => curve.low)) keys.push(node("span", "band: smallest to largest worker"));
  return keys;
}

function linesTable(spec, visible) {
  const curves = spec.curves.filter((curve) => visible(curve.run));
  const xs = [...new Set(curves.flatMap((curve) => Array.from(curve.x)))].filter(Number.isFinite).sort((a, b) => a - b);
  const found = curves.map((curve) => new Map(Array.from(curve.x, (x, place) => [x, curve.y[place]])));
  const heads = curves.map((curve) => [data.runs[curve.run], curve.name].filter(Boolean).join(" "));
  return {
    heads: [spec.xLabel, ...heads],
    rows: xs.map((x) => [shown(x, ""), ...found.map((values) => (values.has(x) ? shown(values.get(x), spec.unit) : ""))]),
  };
}
