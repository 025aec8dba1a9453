// Small charts: [{title, x, y, low?, high?, bar?, time?, labels?}], drawn by uPlot in the page's own colours; bars where x has labels.
import uPlot from "./vendor/uPlot.esm.js";

const HEIGHT = 130;
const WHOLE = [1, 2, 5].flatMap((n) => Array.from({ length: 9 }, (_, power) => n * 10 ** power)).sort((a, b) => a - b);
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 3 });
const drawn = new WeakMap();

export function draw(element, charts) {
  const before = drawn.get(element);
  const same = JSON.stringify(charts);
  if (before?.same === same && before.width === element.clientWidth) return;
  before?.plots.forEach((plot) => plot.destroy());
  element.replaceChildren();
  const figures = charts.map(() => element.appendChild(document.createElement("figure")));  // all, before the first is measured
  const plots = charts.map((chart, i) => one(figures[i], chart));
  drawn.set(element, { same, width: element.clientWidth, plots });
}

function one(figure, chart) {
  const caption = figure.appendChild(document.createElement("figcaption"));
  caption.append(chart.title);
  const last = caption.appendChild(document.createElement("b"));
  const show = (value, at) => {
    const of = chart.labels && at != null ? `${chart.labels[at]}: ` : "";
    last.textContent = value == null ? "" : `${of}${Math.abs(value) < 1000 ? Number(value.toPrecision(3)) : Math.round(value).toLocaleString("en")}`;
  };
  show(chart.y.at(-1));
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const banded = Boolean(chart.low);
  const series = [{}, { stroke: colour("--accent"), width: 1.75, points: { show: !chart.labels && chart.x.length < 40, size: 4 } }];
  if (chart.labels) Object.assign(series[1], { paths: uPlot.paths.bars({ size: [0.7, 60] }), fill: `color-mix(in srgb, ${colour("--accent")} 35%, transparent)` });
  const data = [chart.x, chart.y];
  if (banded) {
    series.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
    data.push(chart.high, chart.low);
  }
  if (chart.bar != null) { series.push({ stroke: colour("--bad"), width: 1, dash: [4, 4], points: { show: false } }); data.push(chart.x.map(() => chart.bar)); }
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const plot = new uPlot({
    width: figure.clientWidth, height: HEIGHT, series, padding: [10, chart.time ? 28 : 14, 0, 0],
    legend: { show: false }, cursor: { y: false, points: { size: 6 } },
    bands: banded ? [{ series: [2, 3], fill: `color-mix(in srgb, ${colour("--accent")} 16%, transparent)` }] : [],
    scales: { x: { time: Boolean(chart.time), ...(chart.labels && { range: [-0.6, chart.x.length - 0.4] }) }, ...(chart.labels && { y: { range: (_, low, high) => uPlot.rangeNum(Math.min(0, low), Math.max(0, high), 0.1, true) } }) },
    axes: [{ ...axis, size: 26, grid: { show: false }, space: 64, ...(chart.labels ? { incrs: WHOLE, values: (_, marks) => marks.map((mark) => chart.labels[mark]?.slice(0, 10) ?? "") } : chart.time ? { values: times } : chart.fractions ? {} : { incrs: WHOLE }) }, { ...axis, size: 46, space: 32, values: (_, marks) => marks.map((mark) => compact.format(mark)) }],
    hooks: { setCursor: [(u) => show(u.cursor.idx == null ? chart.y.at(-1) : chart.y[u.cursor.idx], u.cursor.idx)] },
  }, data, figure);
  plot.root.setAttribute("role", "img");
  plot.root.setAttribute("aria-label", `${chart.title}: ${chart.x.length} points, the last is ${last.textContent}`);
  return plot;
}

/** What the marks of a time axis say: as much of a time as tells them apart. */
function times(plot, marks) {
  const span = plot.scales.x.max - plot.scales.x.min;
  const form = new Intl.DateTimeFormat(undefined, span < 600 ? { hour: "2-digit", minute: "2-digit", second: "2-digit" } : span < 86400 * 1.5 ? { hour: "2-digit", minute: "2-digit" } : { month: "short", day: "numeric" });
  return marks.map((mark) => form.format(mark * 1000));
}

const redraw = () => document.querySelectorAll("[data-charts]").forEach((element) => {
  const known = drawn.get(element);
  if (known) { known.same = ""; draw(element, JSON.parse(element.dataset.charts)); }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("resize", redraw);
