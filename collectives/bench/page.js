"use strict";
// Draws each figure from the table it names, at the available width, and sorts tables by their headings.

const PALETTE = 12, TICK = 5, LABEL_HEIGHT = 14;
const color = (number) => `var(--c${number % PALETTE})`;

function svg(parent, name, attributes = {}, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function html(parent, name, text, style = "") {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (style) node.style.cssText = style;
  parent.append(node);
  return node;
}

// --- tables ---

function valueOf(cell) {
  const text = cell.dataset.v ?? cell.textContent;
  if (cell.className === "text") return text;
  const number = Number(text);
  return text === "" || !Number.isFinite(number) ? null : number; // a loss may be NaN
}

function rowsOf(key) {
  const table = document.getElementById(key);
  const names = [...table.tHead.rows[0].cells].map((head) => head.textContent);
  return [...table.tBodies[0].rows].map((row) =>
    Object.fromEntries([...row.cells].map((cell, i) => [names[i], valueOf(cell)])));
}

function sortBy(head) {
  const table = head.closest("table"), body = table.tBodies[0], i = head.cellIndex;
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const order = (a, b) => {
    const x = valueOf(a.cells[i]), y = valueOf(b.cells[i]);
    if (x === null || y === null) return (x === null) - (y === null); // missing values come last
    return (typeof x === "number" ? x - y : x.localeCompare(y)) * (down ? -1 : 1);
  };
  body.append(...[...body.rows].sort(order));
}

for (const button of document.querySelectorAll("th button")) {
  const head = button.parentNode, first = head.closest("table").tBodies[0].rows[0];
  if (first?.cells[head.cellIndex]?.className === "text") head.className = "text";
  button.addEventListener("click", () => sortBy(head));
}

// --- numbers ---

function si(value, unit) {
  if (value === 0) return `0 ${unit}`.trim();
  const steps = unit === "µs" ? [[1e6, "s"], [1e3, "ms"], [1, "µs"]]
    : unit === "ms" ? [[1e3, "s"], [1, "ms"], [1e-3, "µs"]]
    : unit === "B" ? [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]
    : unit === "MiB" ? [[2 ** 10, "GiB"], [1, "MiB"]]
    : unit === "GB" ? [[1e3, "TB"], [1, "GB"], [1e-3, "MB"]]
    : unit === "%" ? [[1, "%"]]
    : unit === "GB/s" ? [[1, "GB/s"], [1e-3, "MB/s"], [1e-6, "kB/s"]]
    : [[1e9, `G${unit}`], [1e6, `M${unit}`], [1e3, `k${unit}`], [1, unit]];
  const plain = unit === "" ? [1, unit] : null;
  const [size, name] = plain ?? steps.find(([least]) => Math.abs(value) >= least * 0.9995) ?? steps.at(-1);
  return `${Number((value / size).toPrecision(3))} ${name}`.trim();
}

function scale(low, high, begin, end, log) {
  const f = log ? Math.log : (x) => x;
  const a = f(low), b = f(high) === a ? a + 1 : f(high);
  return (x) => begin + ((f(x) - a) / (b - a)) * (end - begin);
}

function ticks(low, high, log, most, unit) {
  const inside = (list) => list.filter((x) => x >= low * (1 - 1e-9) && x <= high * (1 + 1e-9));
  if (!log) {
    const rough = (high - low) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
    const first = Math.ceil(low / step - 1e-9);
    return Array.from({length: Math.floor(high / step + 1e-9) - first + 1}, (_, i) => (first + i) * step);
  }
  const base = unit === "B" ? 2 : 10, logs = (x) => Math.log(x) / Math.log(base);
  const exponents = (every) => inside(Array.from(
    {length: 200}, (_, i) => base ** (Math.floor(logs(low)) + i * every)));
  if (base === 10) {
    const fine = inside(exponents(1).flatMap((x) => [x / 5, x / 2, x, 2 * x, 5 * x]));
    const unique = [...new Set(fine.map((x) => Number(x.toPrecision(6))))].sort((a, b) => a - b);
    if (unique.length <= most) return unique;
  }
  let every = 1;
  while (exponents(every).length > most) every += 1;
  return exponents(every);
}

// --- frames ---

function start(figure, spec, height) {
  for (const old of figure.querySelectorAll("svg, .keys, .tip")) old.remove();
  const width = figure.clientWidth;
  const picture = svg(figure, "svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img"});
  picture.setAttribute("aria-label", `${spec.title}; its numbers are in the table beneath`);
  return [picture, width];
}

function axes(picture, box, x, y, spec) {
  const {left, right, top, bottom} = box;
  const across = Math.max(2, Math.floor((right - left) / 58)), up = Math.max(2, Math.floor((bottom - top) / 40));
  for (const value of ticks(x.low, x.high, spec.x.log, across, spec.x.unit)) {
    svg(picture, "line", {class: "grid", x1: x(value), x2: x(value), y1: top, y2: bottom + TICK});
    svg(picture, "text", {class: "soft", x: x(value), y: bottom + 18, "text-anchor": "middle"}, si(value, spec.x.unit));
  }
  for (const value of y ? ticks(y.low, y.high, spec.y.log, up, spec.y.unit) : []) {
    svg(picture, "line", {class: "grid", x1: left - TICK, x2: right, y1: y(value), y2: y(value)});
    svg(picture, "text", {class: "soft", x: left - 8, y: y(value) + 4, "text-anchor": "end"}, si(value, spec.y.unit));
  }
  svg(picture, "text", {class: "soft", x: (left + right) / 2, y: bottom + 35, "text-anchor": "middle"}, spec.x.label);
}

function tip(figure, event, title, entries) {
  figure.querySelector(".tip")?.remove();
  const box = html(figure, "div");
  box.className = "tip";
  html(box, "b", title);
  for (const [name, value, fill] of entries) {
    const line = html(box, "div");
    html(line, "i", undefined, `background:${fill}`);
    line.append(name);
    html(line, "span", value);
  }
  const frame = figure.getBoundingClientRect(), at = event.clientX - frame.left;
  const left = at + 14 + box.offsetWidth > frame.width ? at - 14 - box.offsetWidth : at + 14;
  box.style.left = `${Math.max(0, Math.min(left, frame.width - box.offsetWidth))}px`;
  box.style.top = `${event.clientY - frame.top + 10}px`;
}

function keys(figure, entries) {
  const list = html(figure, "div");
  list.className = "keys";
  for (const [name, fill] of entries) {
    const item = html(list, "span");
    html(item, "i", undefined, `background:${fill}`);
    item.append(name);
  }
  figure.insertBefore(list, figure.querySelector("svg"));
}

// --- lines ---

const FEW = 3; // lines that need no switches
const hidden = new Map(); // by table: the names of lines that are switched off, in all of its charts

function switches(figure, spec, lines) {
  if (!hidden.has(spec.table)) hidden.set(spec.table, new Set());
  const off = hidden.get(spec.table);
  if (lines.length <= FEW || figure.querySelector(".switches")) return off;
  const list = html(figure, "div");
  list.className = "switches";
  const redraw = () => {
    for (const other of document.querySelectorAll("figure")) {
      if (JSON.parse(other.dataset.chart).table !== spec.table) continue;
      for (const box of other.querySelectorAll(".switches input")) box.checked = box.name ? !off.has(box.name) : !off.size;
      drawn.delete(other);
      draw(other, other.clientWidth);
    }
  };
  const add = (name, text, fill, act) => {
    const label = html(list, "label"), box = html(label, "input");
    Object.assign(box, {type: "checkbox", name, checked: name ? !off.has(name) : !off.size});
    if (fill) html(label, "i", undefined, `background:${fill}`);
    label.append(text);
    box.addEventListener("change", () => { act(box.checked); redraw(); });
  };
  add("", "all", null, (on) => lines.forEach((line) => off[on ? "delete" : "add"](line.name)));
  for (const line of lines) add(line.name, line.name, color(line.color), (on) => off[on ? "delete" : "add"](line.name));
  return off;
}

let clips = 0; // in the page
const MARKERS = [
  (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
  (r) => `M0,${-1.3 * r}l${1.3 * r},${2.3 * r}h${-2.6 * r}z`,
  (r) => `M0,${-1.4 * r}l${1.4 * r},${1.4 * r}l${-1.4 * r},${1.4 * r}l${-1.4 * r},${-1.4 * r}z`,
];
const DASHES = ["", "6 4", "2 3"];

function pointsOf(line, rows, spec) {
  // A time is drawn as a rate: bytes per microsecond, times a factor, in GB/s.
  const value = (row, name) => row[name] === null || row[name] === undefined ? null
    : spec.y.rate ? (line.rate * row[spec.x.column]) / row[name] * 1e-3 : row[name];
  return rows
    .filter((row) => Object.entries(line.where ?? {}).every(([name, wanted]) => row[name] === wanted))
    .map((row) => ({
      x: row[spec.x.column],
      y: value(row, line.column),
      bands: (line.bands ?? []).map((pair) => pair.map((name) => value(row, name))),
    }))
    .filter((point) => point.y !== null && (!spec.y.log || point.y > 0))
    .sort((a, b) => a.x - b.x);
}

function measured(picture, text) {
  const node = svg(picture, "text", {}, text), width = node.getComputedTextLength();
  node.remove();
  return width;
}

function shortened(picture, text, width) {
  let short = text;
  while (short.length > 4 && measured(picture, short) > width) short = `${short.slice(0, -2)}…`;
  return short;
}

function apart(labels, top, bottom) {
  labels.sort((a, b) => a.at - b.at);
  labels.forEach((label, i) => { label.y = Math.max(label.at, i ? labels[i - 1].y + LABEL_HEIGHT : top); });
  for (let i = labels.length - 1, limit = bottom; i >= 0; i -= 1, limit = labels[i + 1].y - LABEL_HEIGHT)
    labels[i].y = Math.min(labels[i].y, limit);
}

function extent(values, axis) {
  let low = Math.min(...values), high = Math.max(...values);
  if (axis.zero) low = Math.min(0, low);
  if (low === high) [low, high] = axis.log ? [low / 2, high * 2] : [low - 1, high + 1];
  const room = axis.log ? (high / low) ** 0.04 : (high - low) * 0.04;
  return axis.log ? [low / room, high * room] : [axis.zero && low === 0 ? 0 : low - room, high + room];
}

function drawLines(figure, spec) {
  const rows = rowsOf(spec.table);
  const every = spec.lines.map((line) => ({...line, points: pointsOf(line, rows, spec)})).filter((l) => l.points.length);
  if (!every.length) return;
  const off = switches(figure, spec, every), some = every.filter((line) => !off.has(line.name));
  const lines = some.length ? some : every; // at least one, for the axes
  const needed = 90 + LABEL_HEIGHT * lines.length;
  const [picture, width] = start(figure, spec, Math.max(needed, figure.clientWidth < 480 ? 280 : 360));
  const points = lines.flatMap((line) => line.points);
  const solid = lines.some((line) => !line.thin) ? lines.filter((line) => !line.thin) : lines;
  const ys = solid.flatMap((line) => line.points).flatMap(
    (point) => [point.y, ...point.bands.flat().filter((y) => y !== null && (!spec.y.log || y > 0))]);
  const [lowX, highX] = [Math.min(...points.map((p) => p.x)), Math.max(...points.map((p) => p.x))];
  const [lowY, highY] = extent(ys, spec.y);
  const widest = Math.max(...lines.map((line) => measured(picture, line.name)));
  const margin = Math.min(widest + 26, 0.36 * width);
  const strip = spec.ranges?.length ? 22 : 0;
  const box = {left: 66, right: width - margin, top: 12 + strip, bottom: picture.viewBox.baseVal.height - 44};
  const x = Object.assign(scale(lowX, highX, box.left + 4, box.right - 4, spec.x.log), {low: lowX, high: highX});
  const y = Object.assign(scale(lowY, highY, box.bottom, box.top, spec.y.log), {low: lowY, high: highY});
  axes(picture, box, x, y, spec);
  drawRanges(picture, spec, x, box);
  const clip = svg(svg(picture, "clipPath", {id: `clip${++clips}`}), "rect", {
    x: box.left - 5, y: box.top - 5, width: box.right - box.left + 10, height: box.bottom - box.top + 10});
  const plot = svg(picture, "g", {"clip-path": `url(#${clip.parentNode.id})`});
  if (!some.length) return;
  const groups = new Map(lines.map((line) => [line, svg(plot, "g")]));
  const path = (list) => list.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)},${b.toFixed(1)}`).join("");
  for (const line of lines) for (const i of line.points[0].bands.keys()) {
    const full = line.points.filter((p) => p.bands[i].every((value) => value !== null));
    if (!full.length) continue;
    const edge = (side) => full.map((p) => [x(p.x), y(p.bands[i][side])]);
    svg(groups.get(line), "path", {class: "band", fill: color(line.color), d: `${path([...edge(0), ...edge(1).reverse()])}Z`});
  }
  const labels = [];
  for (const line of lines) {
    const list = line.points.map((p) => [x(p.x), y(p.y)]), stroke = color(line.color);
    const look = {class: "line", stroke, d: path(list), "stroke-dasharray": DASHES[line.dash ?? 0]};
    if (line.thin) look.style = "stroke-width:1.2";
    svg(groups.get(line), "path", look);
    if (list.length <= 40 && line.marker !== undefined)
      for (const [a, b] of list)
        svg(groups.get(line), "path", {d: MARKERS[line.marker % MARKERS.length](3), fill: stroke, transform: `translate(${a},${b})`});
    const [endX, endY] = list.at(-1);
    labels.push({line, from: [endX, Math.max(box.top, Math.min(box.bottom, endY))], at: endY + 4});
  }
  apart(labels, box.top + 4, box.bottom + 4);
  for (const {line, from, y: at} of labels) {
    const end = box.right + 14, ends = from[0] > box.right - 20 ? "" : "1 5"; // faint, where the line ends earlier
    svg(picture, "path", {class: "line", style: "stroke-width:1", stroke: color(line.color), "stroke-dasharray": ends,
      d: path([from, [end - 6, at - 4], [end, at - 4]])});
    const text = svg(picture, "text", {x: end + 4, y: at}, shortened(picture, line.name, margin - 22));
    svg(text, "title", {}, line.name);
    text.addEventListener("pointerenter", () => groups.forEach((group, other) => { group.style.opacity = other === line ? 1 : 0.12; }));
    text.addEventListener("pointerleave", () => groups.forEach((group) => { group.style.opacity = 1; }));
  }
  hover(figure, picture, spec, lines, x, box);
}

function drawRanges(picture, spec, x, box) {
  for (const range of spec.ranges ?? []) {
    const begin = Math.max(box.left, x(range.from)), length = Math.min(box.right, x(range.to)) - begin;
    const bar = svg(picture, "rect", {x: begin, y: 10, width: Math.max(1, length - 1), height: 16, fill: color(range.color)});
    svg(bar, "title", {}, `${range.name} is the fastest from ${si(range.from, spec.x.unit)} to ${si(range.to, spec.x.unit)}`);
    if (measured(picture, range.name) < length - 8)
      svg(picture, "text", {class: "on", x: begin + length / 2, y: 22, "text-anchor": "middle"}, range.name);
  }
}

function hover(figure, picture, spec, lines, x, box) {
  const values = [...new Set(lines.flatMap((line) => line.points.map((p) => p.x)))].sort((a, b) => a - b);
  const cursor = svg(picture, "line", {class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden"});
  picture.addEventListener("pointermove", (event) => {
    const at = event.clientX - picture.getBoundingClientRect().left;
    const value = values.reduce((a, b) => (Math.abs(x(b) - at) < Math.abs(x(a) - at) ? b : a));
    const entries = lines
      .map((line) => [line.name, line.points.find((p) => p.x === value), color(line.color)])
      .filter(([, point]) => point)
      .sort((a, b) => b[1].y - a[1].y)
      .map(([name, point, fill]) => [name, si(point.y, spec.y.unit), fill]);
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(value));
    cursor.setAttribute("visibility", "visible");
    tip(figure, event, `${spec.x.name ?? ""} ${si(value, spec.x.unit)}`.trim(), entries);
  });
  picture.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    figure.querySelector(".tip")?.remove();
  });
}

// --- bars: a row's parts, one after the other ---

function drawBars(figure, spec) {
  const rows = rowsOf(spec.table), each = 30;
  const [picture, width] = start(figure, spec, rows.length * each + 54);
  const parts = spec.parts.filter((part) => rows.some((row) => row[part.column] > 0));
  const total = (row) => parts.reduce((sum, part) => sum + (row[part.column] ?? 0), 0);
  const left = 14 + Math.max(...rows.map((row) => measured(picture, `${spec.name} ${row[spec.row]}`)));
  const box = {left, right: width - 14, top: 6, bottom: rows.length * each + 8}, high = Math.max(...rows.map(total));
  const x = Object.assign(scale(0, high, box.left, box.right, false), {low: 0, high});
  axes(picture, box, x, null, spec);
  rows.forEach((row, i) => {
    const middle = box.top + (i + 0.5) * each;
    svg(picture, "text", {x: left - 8, y: middle + 4, "text-anchor": "end"}, `${spec.name} ${row[spec.row]}`);
    let at = 0;
    for (const part of parts) {
      const value = row[part.column] ?? 0;
      const look = {x: x(at), y: middle - 11, width: Math.max(0, x(at + value) - x(at) - 1), height: 22, fill: color(part.color)};
      svg(picture, "rect", look);
      at += value;
    }
    const whole = svg(picture, "rect", {x: left, y: middle - each / 2, width: width - left, height: each, fill: "transparent"});
    const entries = parts.map((part) => [part.column, si(row[part.column] ?? 0, spec.x.unit), color(part.color)]);
    whole.addEventListener("pointermove", (event) => tip(figure, event, `${spec.name} ${row[spec.row]}`, entries));
    whole.addEventListener("pointerleave", () => figure.querySelector(".tip")?.remove());
  });
  keys(figure, parts.map((part) => [part.column, color(part.color)]));
}

// --- lanes: each rank's work over time ---

function drawLanes(figure, spec) {
  const rows = rowsOf(spec.table).filter((row) => row.timeline === spec.timeline), each = 30;
  const ranks = [...new Set(rows.map((row) => row.rank))].sort((a, b) => a - b);
  const [picture, width] = start(figure, spec, ranks.length * each + 54);
  const left = 14 + Math.max(...ranks.map((rank) => measured(picture, `rank ${rank}`)));
  const box = {left, right: width - 14, top: 6, bottom: ranks.length * each + 8};
  const x = Object.assign(scale(0, spec.end, box.left, box.right, false), {low: 0, high: spec.end});
  axes(picture, box, x, null, spec);
  const fills = Object.fromEntries(spec.kinds.map((kind) => [kind.name, color(kind.color)]));
  ranks.forEach((rank, i) => svg(picture, "text", {x: left - 8, y: box.top + (i + 0.5) * each + 4, "text-anchor": "end"}, `rank ${rank}`));
  for (const row of rows) {
    const begin = x(row["begin, ms"]), length = x(row["end, ms"]) - begin, top = box.top + ranks.indexOf(row.rank) * each + 4;
    const look = {x: begin, y: top, width: Math.max(0.5, length - 0.7), height: 22, fill: fills[row.kind] ?? color(6)};
    const bar = svg(picture, "rect", look);
    svg(bar, "title", {}, `${row.what}: ${si(row["end, ms"] - row["begin, ms"], "ms")}`);
    if (length > 7 * row.what.length + 3) svg(picture, "text", {class: "on", x: begin + length / 2, y: top + 15, "text-anchor": "middle"}, row.what);
  }
  keys(figure, spec.kinds.map((kind) => [kind.name, color(kind.color)]));
}

const DRAW = {lines: drawLines, bars: drawBars, lanes: drawLanes};
const drawn = new WeakMap(); // the width at which a figure was drawn last
function draw(figure, width) {
  if (drawn.get(figure) === width) return;
  drawn.set(figure, width);
  const spec = JSON.parse(figure.dataset.chart);
  DRAW[spec.kind](figure, spec);
}
const sizes = new ResizeObserver((entries) => requestAnimationFrame(() => {
  for (const {target, contentRect} of entries) draw(target, contentRect.width);
}));
for (const figure of document.querySelectorAll("figure")) sizes.observe(figure);
