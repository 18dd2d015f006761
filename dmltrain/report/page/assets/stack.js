// A chart of stacked bars as options of the library. What a reader chooses (all workers, one) is a group.
const groupOf = (spec) => spec.groups[spec.chosen || 0];

function stackOptions(spec) {
  return {
    animation: false,
    grid: GRID,
    textStyle: { fontFamily: "inherit" },
    xAxis: axis(spec.xLabel, "category", { data: spec.labels, ...BELOW }),
    yAxis: axis(spec.yLabel, "value", { ...ABOVE }),
    tooltip: {
      ...hoverFrame(), trigger: "axis", axisPointer: { type: "shadow" },
      formatter: (found) => stackHover(spec, found[0].dataIndex),
    },
    series: spec.parts.map((name, part) => ({
      type: "bar", id: name, name, stack: "all", barCategoryGap: "12%", barMaxWidth: 60, emphasis: { disabled: true },
      data: Array.from(groupOf(spec).values[part], (value) => (Number.isNaN(value) ? null : value)),
      itemStyle: { color: partColour(part), decal: pattern(part) || { symbol: "none" } },
    })),
  };
}

function stackHover(spec, place) {
  const frame = node("div"), table = node("table"), values = groupOf(spec).values.map((part) => part[place]);
  frame.append(node("strong", `${spec.xLabel} ${spec.labels[place]}`));
  const total = values.reduce((sum, value) => sum + (value || 0), 0);
  spec.parts.map((name, part) => [name, part]).reverse().forEach(([name, part]) => {
    const row = node("tr"), key = node("td");
    key.append(swatch(part));
    const share = total > 0 && values[part] >= 0 ? `${plain((100 * values[part]) / total, 3)} %` : "";
    row.append(key, node("td", name), node("td", shown(values[part], spec.unit), "number"), node("td", share, "number"));
    table.append(row);
  });
  const sum = node("tr");
  sum.append(node("td"), node("td", "together"), node("td", shown(total, spec.unit), "number"));
  table.append(sum);
  frame.append(table);
  return frame;
}

function swatch(part) {
  const made = node("span");
  made.innerHTML = `<svg width="12" height="12" aria-hidden="true"><rect width="12" height="12" fill="${partColour(part)}"/></svg>`;
  return made;
}

function stackKeys(spec, redraw) {
  const keys = spec.parts.map((name, part) => {
    const key = node("span");
    key.append(swatch(part), name);
    return key;
  });
  if (spec.groups.length > 1) {
    const choice = node("select"), label = node("label", "of ");
    spec.groups.forEach((group, place) => choice.append(new Option(group.name, String(place))));
    choice.value = String(spec.chosen || 0);
    choice.addEventListener("change", () => {
      spec.chosen = Number(choice.value);
      redraw();
    });
    label.append(choice);
    keys.push(label);
  }
  return keys;
}

function stackTable(spec) {
  const values = groupOf(spec).values;
  return {
    heads: [spec.xLabel, ...spec.parts],
    rows: spec.labels.map((label, place) => [label, ...values.map((part) => shown(part[place], spec.unit))]),
  };
}
