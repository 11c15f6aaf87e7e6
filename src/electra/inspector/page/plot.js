// Curves and dots as SVG, without a library.
import { h, number, visible } from "./dom.js";

const WIDTH = 360, HEIGHT = 190, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 24;
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "1 3", "10 4"];
export const colour = (place) => `var(--run-${place % 6})`;

/** [value, words]: with as many digits as tell one from the next. */
function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((it) => it * power >= rough * 0.999) || 10), digits = Math.min(8, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9))), all = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) all.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return all.map((at) => [at, Math.abs(at) >= 1e6 ? `${+(at / 1e6).toPrecision(4)}M` : Math.abs(at) >= 1e4 ? `${+(at / 1e3).toPrecision(4)}k` : at && step < 1e-4 ? at.toExponential(1) : String(+at.toFixed(digits))]);
}

/** series: [{name, place, points: [[x, y]], style: "line" | "thin" | "dots"}] -> a figure. Nothing where there are no points. */
export function curves(title, series, axis) {
  const drawn = series.filter((it) => it.points.length);
  if (!drawn.length) return null;
  const xs = drawn.flatMap((it) => it.points.map(([x]) => x)), ys = drawn.flatMap((it) => it.points.map(([, y]) => y));
  const left = Math.min(...xs), right = Math.max(...xs) > left ? Math.max(...xs) : left + 1;
  let low = Math.min(...ys), high = Math.max(...ys);
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  low = low >= 0 ? Math.max(0, low - room) : low - room;
  high += room;
  const x = (value) => LEFT + ((value - left) / (right - left)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const last = drawn.filter((it) => it.style !== "thin" || drawn.every((one) => one.style === "thin"));
  const words = last.map((it) => `${it.name} ${number(it.points.at(-1)[1])}`).join(", ");
  const end = last.length === 1 ? number(last[0].points.at(-1)[1]) : "", readout = h("span", {}, end);
  const svg = h("svg", { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title} against ${axis}, last: ${words}` });
  for (const [at, text] of ticks(low, high, 4)) {
    svg.append(h("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at) }), h("text", { x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, text));
  }
  for (const [at, text] of ticks(left, right, 4)) if (x(at) < WIDTH - 14) svg.append(h("text", { x: x(at), y: HEIGHT - 6, "text-anchor": "middle" }, text));
  for (const it of drawn) {
    const path = it.points.map(([a, b], n) => `${n ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
    svg.append(h("path", { class: `line ${it.style === "thin" ? "thin" : ""}`, d: path, "stroke-dasharray": it.dash ? DASHES[it.dash % 6] : undefined, style: { "--c": colour(it.place) } }));
    if (it.style === "dots" && it.points.length < 60) for (const [a, b] of it.points) svg.append(h("circle", { class: "dot", cx: x(a), cy: y(b), r: 2.6, style: { "--c": colour(it.place) } }));
  }
  const cross = h("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(cross);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), at = left + (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (right - left);
    const near = drawn.map((it) => [it, it.points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a))]);
    const step = near[0][1][0];
    cross.setAttribute("x1", x(step));
    cross.setAttribute("x2", x(step));
    cross.setAttribute("visibility", "visible");
    readout.textContent = `${number(step)} ${axis}: ${near.map(([, point]) => number(point[1])).join(" · ")}`;
  });
  svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); readout.textContent = end; });
  const names = [...new Map(drawn.map((it) => [it.name, it])).values()];
  return h("figure", { class: "panel" }, h("figcaption", {}, title, readout), svg,
    names.length > 1 ? h("div", { class: "legend" }, names.map((it) => h("span", {}, legendLine(it), " ", visible(it.name)))) : null);
}

function legendLine(it) {
  return h("svg", { width: 18, height: 8, "aria-hidden": "true" }, h("line", { x1: 0, x2: 18, y1: 4, y2: 4, stroke: colour(it.place), "stroke-width": it.style === "thin" ? 1.2 : 2.4,
    "stroke-dasharray": it.dash ? DASHES[it.dash % 6] : undefined, style: { stroke: colour(it.place) } }));
}

/** rows: [{name, seeds, median}], levels: {name: value}: every seed a dot, a bar at the median, a line at each level. */
export function dots(title, rows, levels) {
  const values = [...rows.flatMap((it) => it.seeds), ...Object.values(levels)].filter(Number.isFinite);
  if (!values.length) return null;
  let low = Math.min(...values), high = Math.max(...values);
  const room = (high - low || Math.abs(high) || 1) * 0.12;
  low -= room;
  high += room;
  const isNarrow = innerWidth < 560, wide = isNarrow ? 340 : 640, label = isNarrow ? 76 : 150, line = 34, lines = Object.entries(levels).filter(([, value]) => Number.isFinite(value));
  const bottom = 8 + rows.length * line, height = bottom + 24 + lines.length * 16;
  const x = (value) => label + ((value - low) / (high - low)) * (wide - label - 16);
  const svg = h("svg", { class: "plot dots", viewBox: `0 0 ${wide} ${height}`, role: "img",
    "aria-label": `${title}: ${rows.map((it) => `${it.name} ${it.seeds.map(number).join(" ")}`).join("; ")}; ${lines.map(([name, value]) => `${name} ${number(value)}`).join(", ")}` });
  for (const [at, text] of ticks(low, high, isNarrow ? 3 : 6)) svg.append(h("line", { class: "grid", x1: x(at), x2: x(at), y1: 4, y2: bottom }), h("text", { x: x(at), y: bottom + 16, "text-anchor": "middle" }, text));
  rows.forEach((it, place) => {
    const at = 8 + place * line + line / 2;
    svg.append(h("text", { x: 0, y: at + 4 }, h("title", {}, visible(it.name)), visible(it.name.length > label / 6 ? `${it.name.slice(0, label / 6 - 1)}…` : it.name)));
    for (const seed of it.seeds.filter(Number.isFinite)) svg.append(h("circle", { class: "dot", cx: x(seed), cy: at, r: 6, opacity: 0.65, style: { "--c": colour(place) } }, h("title", {}, number(seed))));
    if (Number.isFinite(it.median)) svg.append(h("line", { class: "median", x1: x(it.median), x2: x(it.median), y1: at - 12, y2: at + 12 }, h("title", {}, `median ${number(it.median)}`)));
  });
  lines.forEach(([name, value], place) => {
    const at = bottom + 32 + place * 16;
    svg.append(h("line", { class: "level", x1: x(value), x2: x(value), y1: 4, y2: at - 8 }),
      h("text", { x: x(value) + (x(value) > wide * 0.7 ? -6 : 6), y: at, "text-anchor": x(value) > wide * 0.7 ? "end" : "start" }, `${visible(name)} ${number(value)}`));
  });
  return h("div", { class: "scroll" }, svg);
}
