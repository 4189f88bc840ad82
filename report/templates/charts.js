// Draws the charts of a page from its data, as wide as their place, and tells the values of a chart where a
// reader points, touches, or steps with the arrow keys.
const charts = JSON.parse(document.getElementById("charts").textContent);
const LETTER = 6.2, LINE = 15, LANE = 22;  // pixels: width of a letter, height of a line of text and of a lane
const SIDE_BY_SIDE = 640;  // panels stand beside each other from this width on

function add(parent, tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== "") made.textContent = text;
  return parent.appendChild(made);
}
const ink = (colour) => `var(--${colour})`;
const round = (value) => Math.round(value * 10) / 10;
const write = (svg, x, y, text, anchor = "start", colour = "muted") =>
  add(svg, "text", { x: round(x), y: round(y), "text-anchor": anchor, fill: ink(colour) }, text);
const line = (svg, x1, y1, x2, y2, style = {}) =>
  add(svg, "line", { x1: round(x1), y1: round(y1), x2: round(x2), y2: round(y2), stroke: ink("grid"), ...style });

function number(value, digits = 4) {
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

// Digits that tell the ticks of an axis apart.
function digits(found) {
  const most = Math.max(...found.map(Math.abs)), step = found[1] - found[0];
  const needed = 1 + Math.floor(Math.log10(most)) - Math.floor(Math.log10(step) + 1e-9);
  return step > 0 ? Math.min(9, Math.max(4, needed)) : 4;
}

function ticks(low, high, most, whole) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  let step = power * [1, 2, 5, 10].find((times) => times * power >= rough * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) {
    found.push(Number((i * step).toPrecision(9)));
  }
  return found;
}

// The values of an axis: those given, else those drawn and a little room.
function range(values, low, high, room) {
  let [least, most] = values.length ? values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [values[0], values[0]]) : [0, 1];
  least = low ?? least;
  most = high ?? most;
  const more = (most - least || Math.abs(most) || 1) * room;
  return [low ?? least - more, high ?? most + more];
}

function axis(svg, box, [low, high], label, whole, from = box.bottom) {
  const at = (x) => box.left + (x - low) / (high - low) * (box.right - box.left);
  const most = Math.max(2, Math.min(8, Math.floor((box.right - box.left) / 50)));
  const found = ticks(low, high, most, whole), precision = digits(found);
  for (const tick of found) {
    line(svg, at(tick), from, at(tick), box.bottom + 4);
    write(svg, at(tick), box.bottom + LINE, number(tick, precision), "middle");
  }
  line(svg, box.left, box.bottom, box.right, box.bottom);
  write(svg, (box.left + box.right) / 2, box.bottom + 2 * LINE, label, "middle");
  return at;
}

function mark(svg, box, at, marks = []) {
  for (const [x, words] of marks) {
    line(svg, at(x), box.top, at(x), box.bottom, { stroke: ink("muted"), "stroke-dasharray": "1 3" });
    const half = words.length * LETTER / 2;
    write(svg, Math.min(Math.max(at(x), box.left + half), box.right - half), box.top - 3, words, "middle");
  }
}

function panel(svg, spec, box) {
  const drawn = spec.series.filter((series) => !series.hidden);
  const xs = drawn.flatMap((series) => series.points.map(([x]) => x));
  const ys = drawn.flatMap((s) => s.points.flatMap(([, y], i) => s.spread ? [y - s.spread[i], y + s.spread[i]] : [y]));
  const bars = drawn.some((series) => series.style === "bars");
  const [low, high] = range(ys.filter((y) => y !== null), spec.low, spec.high, 0.06);
  let x = range(xs, spec.left, undefined, bars ? 0.6 / Math.max(1, xs.length - 1) : 0.02);
  if (spec.whole && x[1] - x[0] < 1) x = [x[0] - 0.5, x[1] + 0.5];
  const rows = ticks(low, high, Math.max(2, Math.min(5, Math.floor((box.bottom - box.top) / 30))));
  const named = rows.map((row) => number(row, digits(rows)));
  const inner = { ...box, left: box.left + 8 + LETTER * Math.max(...named.map((name) => name.length)) };
  inner.top += (spec.y ? LINE + 8 : 6) + (spec.marks ? LINE : 0);
  inner.bottom -= 2 * LINE + 6;
  if (spec.y) write(svg, box.left, box.top + 11, spec.y);
  const up = (y) => inner.bottom - (Math.min(Math.max(y, low), high) - low) / (high - low) * (inner.bottom - inner.top);
  rows.forEach((row, i) => {
    line(svg, inner.left, up(row), inner.right, up(row));
    write(svg, inner.left - 5, up(row) + 4, named[i], "end");
  });
  const at = axis(svg, inner, x, spec.x, spec.whole);
  mark(svg, inner, at, spec.marks);
  for (const series of drawn) curve(svg, series, at, up);
  const points = new Map();
  spec.series.forEach((series, i) => series.points.forEach(([place, value], p) => {
    const half = series.spread?.[p];
    const words = series.words?.[p] ?? (value === null ? "" : number(value) + (half === undefined ? "" : ` ± ${number(half)}`));
    if (!points.has(place)) points.set(place, []);
    points.get(place)[i] = words;
  }));
  return {
    label: spec.x,
    series: spec.series,
    place: [inner.left, inner.top, inner.right, inner.bottom, ...x],
    points: [...points].sort(([a], [b]) => a - b).map(([place, values]) => [place, number(place), values]),
  };
}

function curve(svg, { points, spread, style, colour }, at, up) {
  const shown = points.map(([x, y], i) => ({ x, y, half: spread?.[i] })).filter(({ y }) => y !== null);
  const path = (height) => shown.map((point) => `${round(at(point.x))} ${round(up(height(point)))}`);
  if (style === "bars") {
    const half = 0.35 * (at(1) - at(0));
    for (const { x, y } of shown) {
      const box = { x: round(at(x) - half), y: round(up(y)), width: round(2 * half), height: round(up(0) - up(y)) };
      add(svg, "rect", { ...box, fill: ink(colour) });
      if (y && shown.length <= 12) write(svg, at(x), up(y) - 3, `${Math.round(y)}%`, "middle");
    }
    return;
  }
  if (spread) {
    const band = [...path(({ y, half }) => y + half), ...path(({ y, half }) => y - half).reverse()];
    const lone = shown.length === 1 ? { stroke: ink(colour) } : {};
    add(svg, "path", { d: `M${band.join("L")}Z`, fill: ink(colour), opacity: 0.16, ...lone });
  }
  const faint = style === "faint" ? { opacity: 0.35, "stroke-width": 1 } : { "stroke-width": 1.8 };
  if (style !== "points" && shown.length > 1) {
    const d = `M${path(({ y }) => y).join("L")}`;
    add(svg, "path", { d, fill: "none", stroke: ink(colour), "stroke-linejoin": "round", ...faint });
  }
  if (style === "dots" || style === "points" || shown.length === 1) {
    for (const { x, y } of shown) add(svg, "circle", { cx: round(at(x)), cy: round(up(y)), r: 2.6, fill: ink(colour) });
  }
}

function lanes(svg, spec, width) {
  const narrow = width < SIDE_BY_SIDE, names = Math.max(...spec.lanes.map((lane) => lane.name.length));
  const heights = spec.lanes.map((lane) => LANE * (lane.height ?? 1) + (narrow ? LINE : 0));
  const top = spec.marks ? LINE : 4;
  const box = { left: narrow ? 8 : 14 + LETTER * names, right: width - 12, top, bottom: top + heights.reduce((a, b) => a + b) };
  const seconds = spec.stop - spec.start;
  const at = axis(svg, box, [spec.start, spec.stop], spec.x, false, box.top);
  const across = (second) => at(Math.min(Math.max(second, spec.start), spec.stop));
  mark(svg, box, at, spec.marks);
  let y = box.top;
  spec.lanes.forEach((lane, i) => {
    const high = heights[i] - (narrow ? LINE : 0) - 6, base = y + heights[i] - 3;
    write(svg, narrow ? box.left : box.left - 8, narrow ? y + 11 : base - high / 2 + 4, lane.name, narrow ? "start" : "end", "ink");
    const each = high / (lane.slots ?? 1), thick = (lane.slots > 1 ? 0.9 : 1) * each, shades = new Map();
    for (const [start, stop, slot, shade] of lane.boxes) {
      const long = Math.max(across(stop) - across(start), 0.3).toFixed(2);
      const shape = `M${round(across(start))} ${round(base - slot * each)}h${long}v${round(-thick)}h-${long}z`;
      shades.set(shade, (shades.get(shade) ?? "") + shape);
    }
    for (const [shade, shapes] of shades) add(svg, "path", { d: shapes, fill: ink(lane.colour), opacity: shade });
    for (const [start, stop, , , text] of lane.boxes.filter((box) => box[4])) {
      const from = across(start), to = across(stop);
      line(svg, from, base, from, base - high, { stroke: ink("paper") });
      if (to - from > LETTER * text.length + 4) write(svg, (from + to) / 2, base - high / 2 + 4, text, "middle", "paper");
    }
    y += heights[i];
  });
  const moments = spec.lanes[0].told.length;
  const words = ({ counted, told }, i) => {
    if (told[i] === null) return "";
    return counted ? `${counted} ${told[i]}` : `${told[i]} group${told[i] > 1 ? "s" : ""}`;
  };
  const points = Array.from({ length: moments }, (_, i) => {
    const second = spec.start + seconds * (i + 0.5) / moments;
    return [second, `${second.toFixed(1)} s`, spec.lanes.map((lane) => words(lane, i))];
  });
  const place = [box.left, box.top, box.right, box.bottom, spec.start, spec.stop];
  return [box.bottom + 2 * LINE + 6, [{ label: "", series: spec.lanes, place, points }]];
}

function panels(svg, chart, width) {
  const high = chart.height ?? 240, columns = width >= SIDE_BY_SIDE ? chart.drawn.length : 1;
  const each = (width - 16 * (columns - 1)) / columns;
  const axes = chart.drawn.map((spec, i) => {
    const left = (i % columns) * (each + 16), top = Math.floor(i / columns) * (high + 10);
    return panel(svg, spec, { left, right: left + each - 10, top, bottom: top + high });
  });
  return [Math.ceil(axes.length / columns) * (high + 10) - 10, axes];
}

function legend(figure, chart) {
  const series = chart.drawn.lanes ? [] : chart.drawn.flatMap((spec) => spec.series).filter(({ hidden }) => !hidden);
  const named = new Map(series.map((one) => [one.name, one]));
  if (named.size < 2) return;
  const box = figure.appendChild(document.createElement("div"));
  box.className = "legend";
  for (const { name, colour, style } of named.values()) {
    const entry = box.appendChild(document.createElement("span"));
    const sign = entry.appendChild(document.createElement("i"));
    sign.style.background = ink(colour);
    if (style === "faint") sign.style.opacity = 0.35;
    entry.append(name);
  }
}

function show(figure) {
  const chart = charts[figure.dataset.chart];
  legend(figure, chart);
  const svg = add(figure, "svg", { role: "img", "aria-label": figure.getAttribute("aria-label"), tabindex: 0 });
  const told = figure.appendChild(document.createElement("div"));
  told.className = "told";
  told.setAttribute("role", "status");
  let axes = [], pointer, now = [0, -1], wide = 0;
  const hide = () => { told.hidden = true; pointer.style.display = "none"; now = [0, -1]; };
  const draw = () => {
    const width = Math.round(figure.clientWidth);
    if (!width || width === wide) return;
    wide = width;
    svg.replaceChildren();
    const [height, drawn] = chart.drawn.lanes ? lanes(svg, chart.drawn, width) : panels(svg, chart, width);
    axes = drawn;
    svg.setAttribute("viewBox", `0 0 ${width} ${Math.ceil(height)}`);
    svg.dataset.axes = JSON.stringify(axes.map((one) => one.place));
    pointer = add(svg, "line", { class: "pointer" });
    hide();
  };
  const tell = (a, p) => {
    now = [a, p];
    const { label, series, place: [left, top, right, bottom, low, high], points } = axes[a];
    const [x, words, values] = points[p];
    const at = left + (x - low) / (high - low) * (right - left);
    for (const [name, value] of [["x1", at], ["x2", at], ["y1", top], ["y2", bottom]]) pointer.setAttribute(name, value);
    pointer.style.display = "";
    told.replaceChildren(Object.assign(document.createElement("b"), { textContent: `${label} ${words}`.trim() }));
    series.forEach(({ name, colour }, i) => {
      if (!values[i]) return;
      const row = told.appendChild(document.createElement("div"));
      row.appendChild(document.createElement("i")).style.background = ink(colour);
      row.append(`${name} `, Object.assign(document.createElement("b"), { textContent: values[i] }));
    });
    told.hidden = false;
    const frame = figure.getBoundingClientRect(), drawn = svg.getBoundingClientRect(), scale = drawn.width / wide;
    const beside = drawn.left - frame.left + at * scale, above = drawn.top - frame.top + top * scale;
    const narrow = frame.width < 500;  // there it would cover the curves
    const room = beside + 14 + told.offsetWidth <= frame.width;
    const shift = narrow ? -told.offsetWidth / 2 : room ? 14 : -14 - told.offsetWidth;
    told.style.left = `${Math.max(0, Math.min(beside + shift, frame.width - told.offsetWidth))}px`;
    told.style.top = `${narrow ? above - told.offsetHeight - 2 : above + 4}px`;
  };
  const point_at = (event) => {
    const drawn = svg.getBoundingClientRect(), scale = wide / drawn.width;
    const x = (event.clientX - drawn.left) * scale, y = (event.clientY - drawn.top) * scale;
    const a = axes.findIndex(({ place: [l, t, r, b] }) => x >= l - 8 && x <= r + 8 && y >= t && y <= b);
    if (a < 0 || !axes[a].points.length) return hide();
    const [left, , right, , low, high] = axes[a].place, value = low + (x - left) / (right - left) * (high - low);
    const distance = ([place]) => Math.abs(place - value);
    tell(a, axes[a].points.reduce((best, p, i, all) => distance(p) < distance(all[best]) ? i : best, 0));
  };
  const step = (event) => {
    const all = axes.flatMap(({ points }, a) => points.map((_, p) => [a, p])), last = all.length - 1;
    const here = all.findIndex(([a, p]) => a === now[0] && p === now[1]);
    const next = { ArrowRight: Math.min(here + 1, last), ArrowLeft: Math.max(here - 1, 0), Home: 0, End: last };
    if (event.key === "Escape") return hide();
    if (!(event.key in next) || last < 0) return;
    event.preventDefault();
    tell(...all[next[event.key]]);
  };
  svg.addEventListener("pointermove", point_at);
  svg.addEventListener("pointerdown", point_at);
  svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
  svg.addEventListener("keydown", step);
  svg.addEventListener("blur", hide);
  draw();
  new ResizeObserver(draw).observe(figure);
}

document.querySelectorAll("figure[data-chart]").forEach(show);
