// The page's data: packed numbers -> arrays. NaN is a missing value.
const data = JSON.parse(document.getElementById("data").textContent);

const arrays = data.arrays.map((text) => {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Float64Array.from({ length: bytes.length / 4 }, (_, place) => exact(view.getFloat32(4 * place, true)));
});

// A 32-bit float is exact to seven digits; the other digits of a 64-bit one would be noise.
function exact(number) {
  return Number(number.toPrecision(7));
}

for (const chart of data.charts) {
  if (chart.kind === "lines") {
    for (const curve of chart.curves) {
      for (const name of ["x", "y", "low", "high"]) {
        curve[name] = name in curve ? arrays[curve[name]] : null;
      }
    }
  } else {
    for (const group of chart.groups) group.values = group.values.map((place) => arrays[place]);
  }
}
