// How runs and parts look: colours from the style sheet, markers and dashes that tell the same without colour.
const COLOURS = 8, PARTS = 5;
const MARKERS = ["circle", "rect", "triangle", "diamond", "emptyCircle", "emptyRect", "emptyTriangle"];
const DASHES = ["solid", [6, 4], [2, 3], [8, 3, 2, 3]];
const PATTERNS = [  // of the parts of a bar, for the colour-blind and for print
  null,
  { symbol: "rect", dashArrayX: [1, 0], dashArrayY: [2, 5], rotation: -Math.PI / 4 },
  { symbol: "circle", dashArrayX: [[5, 5], [0, 5, 5, 0]], dashArrayY: [5, 0], symbolSize: 0.7 },
  { symbol: "rect", dashArrayX: [1, 0], dashArrayY: [4, 3], rotation: Math.PI / 4 },
  { symbol: "rect", dashArrayX: [[1, 0], [1, 6]], dashArrayY: [1, 0, 6, 0], rotation: Math.PI / 4 },
];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const runColour = (run) => colour(`run-${run % COLOURS}`);
const partColour = (part) => colour(`part-${part % PARTS}`);
const marker = (run) => MARKERS[run % MARKERS.length];
const dash = (number) => DASHES[number % DASHES.length];
const pattern = (part) => PATTERNS[part % PATTERNS.length] &&
  { color: "rgba(0, 0, 0, .25)", ...PATTERNS[part % PATTERNS.length] };

const SHAPES = {  // in a box of 8 x 8
  circle: '<circle cx="4" cy="4" r="3.5"/>',
  rect: '<rect x=".8" y=".8" width="6.4" height="6.4"/>',
  triangle: '<path d="M4 .3 7.8 7.2H.2Z"/>',
  diamond: '<path d="M4 0 8 4 4 8 0 4Z"/>',
};

// A line with its marker, as in the charts. All parts of it are this file's own.
function markOf(run, dashes = 0, ink = runColour(run), shape = run === null ? null : marker(run)) {
  const kind = shape && shape.replace(/^empty(.)/, (_, letter) => letter.toLowerCase());
  const fill = shape && shape.startsWith("empty") ? colour("card") : ink;
  const stroke = dash(dashes) === "solid" ? "" : ` stroke-dasharray="${dash(dashes).join(" ")}"`;
  const symbol = kind ? `<g transform="translate(11 2)" fill="${fill}" stroke="${ink}">${SHAPES[kind]}</g>` : "";
  return `<svg width="30" height="12" viewBox="0 0 30 12" aria-hidden="true">` +
    `<path d="M0 6H30" stroke="${ink}" stroke-width="2"${stroke}/>${symbol}</svg>`;
}

function drawMarks() {
  for (const place of document.querySelectorAll("[data-mark]")) place.innerHTML = markOf(Number(place.dataset.mark));
}
