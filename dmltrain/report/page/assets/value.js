// Numbers as text. Each unit has its own way; "" is a plain number.
const SIZES = ["B", "kB", "MB", "GB", "TB", "PB"];

function plain(number, digits = 5) {
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (size >= 1e9 || size < 1e-4) return number.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(number.toPrecision(Math.max(digits, Math.ceil(Math.log10(size))))));
}

function bytes(number) {
  let unit = 0;
  while (Math.abs(number) >= 1000 && unit < SIZES.length - 1) {
    number /= 1000;
    unit += 1;
  }
  return `${plain(number, 4)} ${SIZES[unit]}`;
}

const UNITS = {
  "": (number) => plain(number),
  fraction: (number) => plain(number, 5),
  percent: (number) => `${plain(100 * number, 3)} %`,
  seconds: (number) => `${plain(number, 4)} s`,
  bytes,
  MiB: (number) => `${plain(number, 5)} MiB`,
};

const shown = (number, unit) => (Number.isFinite(number) ? UNITS[unit](number) : "-");
const axisText = (unit) => (number) => (unit === "seconds" ? plain(number) : shown(number, unit === "MiB" ? "" : unit));
