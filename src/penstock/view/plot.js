// The drawing: a row for each rank and timeline, with time from left to right.
//
//   ┌ gutter ┬ axis ───────────────┐
//   │ rank 0 │ [0][1]   [ 0 ]      │  row: its boxes, and below them, on demand, the curve of its memory
//   │ rank 1 │    [0][ 0 ]         │  a block is all rows of a rank and the gap below them
//   └────────┴─────────────────────┘

const AXIS = 26, PAD = 14, TEXT = 'system-ui, "Liberation Sans", sans-serif';
const state = {
  t0: 0, t1: MAKESPAN, row: 0, top: 0, fitted: true, memory: false, critical: false, selected: null, hover: null,
};
const canvas = $("plot"), overview = $("overview"), pen = canvas.getContext("2d"), strips = new OffscreenCanvas(1, 1);
const wideAs = (text) => { pen.font = "12px " + TEXT; return pen.measureText(text).width; };
// The gutter has room for "rank 12" and, if there are several timelines, for their names.
const RANK_NAME = 12 + wideAs("rank " + (RANKS - 1)) + 14, longestName = Math.max(...lines.map((l) => wideAs(l.name)));
const GUTTER = COUNT > 1 ? Math.round(Math.max(132, Math.min(RANK_NAME + longestName + 9, innerWidth / 4))) : 92;
let width = 1, height = 1, dpr = 1, colours = {}, table = null, dimmed = null, frames = 0, drawn = 0, waiting = false;

const curve = () => (state.memory ? Math.max(16, state.row * 0.9) : 0);
const gap = () => (state.row >= 8 ? (COUNT > 1 || state.memory ? 9 : 4) : state.row >= 4 ? 1 : COUNT > 1 ? 1 : 0);
const block = () => COUNT * (state.row + curve()) + gap() + (state.row >= 8 ? COUNT - 1 : 0);
const content = () => RANKS * block() + AXIS + 8;
const plotWidth = () => Math.max(width - GUTTER - PAD, 10);
const x = (time) => GUTTER + ((time - state.t0) / (state.t1 - state.t0)) * plotWidth();
const time = (px) => state.t0 + ((px - GUTTER) / plotWidth()) * (state.t1 - state.t0);
const y = (rank, k) => AXIS + 4 + rank * block() + k * (state.row + curve() + (state.row >= 8 ? 1 : 0)) - state.top;
const middle = (rank, k) => y(rank, k) + state.row / 2;
// In the frame of a report, the frame takes the height of its content, up to a part of the window around it.
const framed = () => (window.frameElement ? Math.min(parent.innerHeight * 0.7, 760) : window.innerHeight);
// On a narrow window the figures and buttons above the rows are tall, and the frame grows with them.
const room = () => Math.max(
  framed() - canvas.parentElement.getBoundingClientRect().top - 58 - 26, window.frameElement ? framed() / 2 : 0);
const fits = (row) => { state.row = row; return content() <= room(); };
function fitRow() { // the tallest rows that show all ranks at once
  for (let row = 36; row > 3; row--) if (fits(row)) return row;
  return Math.max(state.memory ? 10 : 1.25, (room() - AXIS - 8) / RANKS / COUNT - gap() / COUNT);
}

function resize() {
  dpr = window.devicePixelRatio || 1;
  if (state.fitted) state.row = fitRow();
  if (window.frameElement) canvas.parentElement.style.flex = "none"; // The frame follows its content, not the reverse.
  canvas.parentElement.style.height = Math.max(60, Math.min(room(), content())) + "px";
  if (window.frameElement) window.frameElement.style.height = overview.getBoundingClientRect().bottom + 16 + "px";
  for (const c of [canvas, overview]) {
    const box = c.getBoundingClientRect();
    c.width = Math.round(box.width * dpr);
    c.height = Math.round(box.height * dpr);
  }
  width = canvas.clientWidth; height = canvas.clientHeight;
  look(state.t0, state.t1, state.top);
}
function look(t0, t1, top = state.top) { // moves the view, within bounds
  const span = Math.min(MAKESPAN, Math.max(t1 - t0, MAKESPAN * 1e-6));
  state.t0 = Math.max(0, Math.min(t0, MAKESPAN - span));
  state.t1 = state.t0 + span;
  state.top = Math.max(0, Math.min(top, content() - height));
  redraw();
}
function zoom(factor, at = (state.t0 + state.t1) / 2) {
  const span = Math.min(MAKESPAN, (state.t1 - state.t0) * factor), share = (at - state.t0) / (state.t1 - state.t0);
  look(at - share * span, at + (1 - share) * span);
}
function grow(factor, at = height / 2) { // the rows
  state.fitted = false;
  const before = block(), row = Math.max(2, Math.min(72, state.row * factor));
  state.row = Math.abs(row - state.row) < 1 ? Math.max(2, state.row + Math.sign(factor - 1)) : Math.round(row);
  const top = ((state.top + at) / before) * block() - at;
  resize();
  look(state.t0, state.t1, top);
}
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

// ---------------------------------------------------------------- colours
const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
function theme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["card", "ink", "soft", "line", "grid", "accent", "mark", "veil"])
    colours[name] = style.getPropertyValue("--" + name).trim();
  const back = rgb(colours.card);
  table = data.paints.map(([fill]) => rgb(fill));
  dimmed = table.map((c) => c.map((v, j) => Math.round(back[j] + (v - back[j]) * 0.16)));
  colours.dim = dimmed.map((c) => `rgb(${c})`);
  colours.back = back;
  redraw();
}
const marking = () => state.selected !== null || state.critical;
const lit = (l, i) =>
  !marking() || l.microbatch[i] === state.selected || (state.critical && l.critical.on[i] === 1);

// ---------------------------------------------------------------- drawing
function visible(l, rank) { // the actions of a rank that are in view
  if (rank >= l.ranks) return [0, 0];
  const a = l.first[rank], b = l.first[rank + 1];
  return [search(l.end, state.t0, a, b), search(l.start, state.t1, a, b)];
}
function draw() {
  const began = performance.now(), from = Math.max(0, Math.floor((state.top - 8) / block()));
  const to = Math.min(RANKS, Math.ceil((state.top + height - AXIS) / block()));
  pen.setTransform(dpr, 0, 0, dpr, 0, 0);
  pen.fillStyle = colours.card;
  pen.fillRect(0, 0, width, height);
  const step = grid();
  const rows = [];
  for (let rank = from; rank < to; rank++)
    lines.forEach((l, k) => { const [a, b] = visible(l, rank); if (rank < l.ranks) rows.push({ l, k, rank, a, b }); });
  drawn = rows.reduce((sum, r) => sum + r.b - r.a, 0);
  const dense = drawn * 4 > plotWidth() * Math.max(rows.length, 1);
  pen.save();
  pen.beginPath(); pen.rect(GUTTER, AXIS, plotWidth() + 1, height - AXIS); pen.clip();
  if (dense) density(rows); else { const named = roomy(rows); for (const row of rows) boxes(row, named); }
  for (const row of rows) sums(row);
  if (state.memory) for (const row of rows) memory(row);
  lines.forEach((l, k) => {
    if (state.critical) critical(l, k);
    if (state.selected !== null) path(l, k, dense);
  });
  hovered();
  pen.restore();
  gutter(from, to);
  axis(step);
  survey();
  frames++;
  window.penstock.milliseconds = performance.now() - began;
}
function roomy(rows) { // whether even the shortest box in view has room for the name of its action
  let least = Infinity;
  for (const { l, a, b } of rows) for (let i = a; i < b; i++) least = Math.min(least, l.end[i] - l.start[i]);
  return (least / (state.t1 - state.t0)) * plotWidth() > 60;
}
function boxes({ l, k, rank, a, b }, named) {
  const top = y(rank, k), tall = state.row, size = Math.min(12, tall * 0.62), digit = size * 0.6;
  pen.font = `${size}px ${TEXT}`;
  pen.textAlign = "center"; pen.textBaseline = "middle";
  for (let i = a; i < b; i++) {
    const left = x(l.start[i]), wide = x(l.end[i]) - left, sliver = Math.min(1, wide * 0.15), on = lit(l, i);
    pen.fillStyle = on ? data.paints[l.paint[i]][0] : colours.dim[l.paint[i]];
    box(left, top, Math.max(wide - sliver, 0.7), tall);
    if (size < 6 || wide < digit + 3) continue;
    const words = named ? [action(l, i)] : [label(l, i), String(l.microbatch[i])];
    const word = words.find((text) => text.length * digit + 3 <= wide);
    if (word === undefined) continue;
    pen.fillStyle = on ? data.paints[l.paint[i]][1] : colours.soft;
    const first = Math.max(left, GUTTER), last = Math.min(left + wide, GUTTER + plotWidth());
    if (last - first >= word.length * digit + 3) pen.fillText(word, (first + last) / 2, top + tall / 2 + 0.5);
  }
}
function sums({ l, k, rank }) { // a strip at the lower edge of the row, beside the actions
  const tall = Math.min(4, state.row / 3), top = y(rank, k) + state.row - tall;
  pen.fillStyle = data.sum.colour;
  for (const [start, end] of l.sumsOf[rank]) pen.fillRect(x(start), top, Math.max(x(end) - x(start), 0.7), tall);
}
function box(left, top, wide, tall) {
  if (tall < 12 || wide < 7) return pen.fillRect(left, top, wide, tall);
  pen.beginPath(); pen.roundRect(left, top, wide, tall, 3); pen.fill();
}
function density(rows) { // too many boxes to see: each pixel gets the mean colour of its time
  const wide = Math.round(plotWidth() * dpr), scale = wide / (state.t1 - state.t0), back = colours.back;
  if (!rows.length) return;
  strips.width = wide; strips.height = rows.length;
  const brush = strips.getContext("2d"), image = brush.createImageData(wide, rows.length);
  const sum = new Float32Array(wide * 4);
  const add = (at, share, c) => {
    const j = at * 4;
    sum[j] += c[0] * share; sum[j + 1] += c[1] * share; sum[j + 2] += c[2] * share; sum[j + 3] += share;
  };
  rows.forEach(({ l, a, b }, line) => {
    sum.fill(0);
    for (let i = a; i < b; i++) {
      const c = lit(l, i) ? table[l.paint[i]] : dimmed[l.paint[i]];
      const begin = Math.max(0, (l.start[i] - state.t0) * scale), end = Math.min(wide, (l.end[i] - state.t0) * scale);
      const first = Math.floor(begin), last = Math.min(Math.floor(end), wide - 1);
      if (first >= wide) continue;
      if (first >= last) { add(first, end - begin, c); continue; }
      add(first, first + 1 - begin, c);
      for (let at = first + 1; at < last; at++) add(at, 1, c);
      add(last, end - last, c);
    }
    for (let at = 0, j = line * wide * 4; at < wide; at++, j += 4) {
      const idle = Math.max(0, 1 - sum[at * 4 + 3]);
      for (let n = 0; n < 3; n++) image.data[j + n] = sum[at * 4 + n] + back[n] * idle;
      image.data[j + 3] = 255;
    }
  });
  brush.putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  rows.forEach(({ k, rank }, line) =>
    pen.drawImage(strips, 0, line, wide, 1, GUTTER, y(rank, k), plotWidth(), state.row + (state.row < 4 ? 0.5 : 0)));
}
function memory({ l, k, rank, a, b }) { // one step per action; between two actions, the smaller of their values
  const base = y(rank, k) + state.row + curve(), end = l.first[rank + 1], from = Math.max(a - 1, l.first[rank]);
  const level = (value) => base - (value / l.heldScale) * (curve() - 3);
  if (from >= end) return;
  pen.beginPath(); pen.moveTo(x(l.start[from]), base);
  let last = -Infinity, most = 0;
  for (let i = from; i < Math.min(b + 1, end); i++) {
    const left = Math.max(x(l.start[i]), last), right = x(l.end[i]), next = i + 1 < end ? l.held[i + 1] : 0;
    most = Math.max(most, l.held[i]);
    if (right - last < 1 && i + 1 < end) continue; // within a pixel, only the highest is drawn
    const after = level(Math.min(l.held[i], next));
    pen.lineTo(left, level(most)); pen.lineTo(right, level(most)); pen.lineTo(right, after);
    if (i + 1 < end) pen.lineTo(x(l.start[i + 1]), after);
    last = right; most = 0;
  }
  pen.lineTo(last, base); pen.closePath();
  pen.fillStyle = colours.veil; pen.fill();
  pen.strokeStyle = colours.accent; pen.lineWidth = 1; pen.stroke();
}
function critical(l, k) { // outlines the actions of the chain, and connects them
  pen.strokeStyle = colours.mark; pen.lineWidth = 1.5;
  pen.beginPath();
  l.critical.found.forEach((i, n) => {
    const left = x(l.start[i]), wide = Math.max(x(l.end[i]) - left - 1, 1), top = y(rankOf(l, i), k);
    if (state.row >= 6) pen.rect(left + 0.5, top, wide, state.row);
    pen.moveTo(left, middle(rankOf(l, i), k)); if (state.row < 6) pen.lineTo(left + wide, middle(rankOf(l, i), k));
    const before = l.critical.found[n + 1];
    if (before === undefined || rankOf(l, before) === rankOf(l, i)) return;
    pen.moveTo(x(l.end[before]), middle(rankOf(l, before), k)); pen.lineTo(left, middle(rankOf(l, i), k));
  });
  pen.stroke();
}
function path(l, k, dense) { // the actions of the selected micro-batch, and its messages
  const mine = l.of(state.selected);
  if (dense) for (const i of mine) {
    const left = x(l.start[i]), tall = Math.max(state.row, 2);
    pen.fillStyle = data.paints[l.paint[i]][0];
    pen.fillRect(left, middle(rankOf(l, i), k) - tall / 2, Math.max(x(l.end[i]) - left, 2), tall);
  }
  pen.strokeStyle = pen.fillStyle = colours.ink; pen.lineWidth = dense ? 0.7 : 1.1;
  for (const i of mine) if (l.target[i]) arrow(l, k, i, state.row >= 10);
}
function arrow(l, k, i, head) {
  const here = rankOf(l, i), there = l.target[i] - 1, down = there > here ? 1 : -1, edge = state.row * 0.32;
  const x0 = x(l.sent[i]), y0 = middle(here, k) + down * edge;
  const x1 = x(l.arrived[i]), y1 = middle(there, k) - down * edge;
  if (Math.max(x0, x1) < GUTTER || Math.min(x0, x1) > width) return;
  pen.beginPath(); pen.moveTo(x0, y0); pen.lineTo(x1, y1); pen.stroke();
  if (!head) return;
  const angle = Math.atan2(y1 - y0, x1 - x0);
  pen.beginPath(); pen.moveTo(x1, y1);
  for (const turn of [-0.42, 0.42]) pen.lineTo(x1 - 7 * Math.cos(angle + turn), y1 - 7 * Math.sin(angle + turn));
  pen.fill();
}
function hovered() {
  if (!state.hover) return;
  const { k, i } = state.hover, l = lines[k], left = x(l.start[i]), rank = rankOf(l, i);
  pen.strokeStyle = colours.ink; pen.lineWidth = 2;
  pen.strokeRect(left, y(rank, k) - 0.5, Math.max(x(l.end[i]) - left - 1, 2), Math.max(state.row, 3) + 1);
}

// ---------------------------------------------------------------- around the rows
function spacing(extent, most) { // 1, 2 or 5 times a power of ten
  const raw = extent / most, power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw * (1 - 1e-9));
}
function grid() {
  const step = spacing(state.t1 - state.t0, plotWidth() / 90);
  pen.fillStyle = colours.grid;
  for (let t = Math.ceil(state.t0 / step) * step; t <= state.t1; t += step) pen.fillRect(x(t), AXIS, 1, height - AXIS);
  return step;
}
function axis(step) {
  pen.fillStyle = colours.card; pen.fillRect(0, 0, width, AXIS);
  pen.fillStyle = colours.line; pen.fillRect(0, AXIS - 1, width, 1);
  pen.font = "11px " + TEXT; pen.textBaseline = "middle"; pen.fillStyle = colours.soft;
  pen.textAlign = "center";
  for (let t = Math.ceil(state.t0 / step) * step; t <= state.t1 + step * 1e-6; t += step) {
    const exact = Math.round(t / step) * step, digits = 2 + Math.ceil(Math.log10(Math.max(1, Math.abs(exact) / step)));
    const text = bare(lines[0], exact, digits, state.t1), half = pen.measureText(text).width / 2;
    pen.fillText(text, Math.min(x(t), width - half - 4), AXIS / 2);
    pen.fillRect(x(t), AXIS - 5, 1, 4);
  }
  if (!lines[0].seconds) { pen.textAlign = "left"; pen.fillText("forwards", 12, AXIS / 2); }
}
function gutter(from, to) {
  pen.fillStyle = colours.card; pen.fillRect(0, AXIS, GUTTER - 1, height);
  pen.textBaseline = "middle"; pen.textAlign = "right";
  pen.font = "12px " + TEXT;
  const every = block() >= 13 ? 1 : Math.max(1, Math.round(spacing(RANKS, (RANKS * block()) / 18)));
  for (let rank = from; rank < to; rank++) {
    if (rank % every) continue;
    const high = block() >= 13 ? (COUNT - 1) * (state.row + curve()) + state.row : state.row;
    const at = Math.max(y(rank, 0) + high / 2, rank ? 0 : AXIS + 9 - state.top);
    pen.fillStyle = colours.ink;
    if (COUNT > 1) { pen.textAlign = "left"; pen.fillText("rank " + rank, 12, at); pen.textAlign = "right"; }
    else pen.fillText("rank " + rank, GUTTER - 10, at);
    pen.fillStyle = colours.soft;
    if (COUNT > 1 && state.row >= 11) lines.forEach((l, k) => pen.fillText(NAMES[k], GUTTER - 8, middle(rank, k)));
    if (state.memory && state.row >= 9) lines.forEach((l, k) =>
      rank < l.ranks && pen.fillText(bytes(l, l.peaks[rank]), GUTTER - 8, y(rank, k) + state.row + curve() / 2));
  }
}
function shortened(names) { // names without their ends, or without their beginnings if they would look the same
  const room = GUTTER - 8 - RANK_NAME;
  const fit = (name, part) => {
    let length = name.length - 1;
    while (length > 1 && wideAs(part(name, length)) > room) length--;
    return wideAs(name) <= room ? name : part(name, length);
  };
  const heads = names.map((name) => fit(name, (text, length) => text.slice(0, length) + "…"));
  if (new Set(heads).size === names.length) return heads;
  return names.map((name) => fit(name, (text, length) => "…" + text.slice(-length)));
}
const NAMES = shortened(lines.map((l) => l.name));

// ---------------------------------------------------------------- overview
const WORK = 8; // pixels between the overview and its edges
function shares(l, bins) { // the share of ranks at each op, in each bin of time
  const found = data.ops.map(() => new Float32Array(bins)), scale = bins / MAKESPAN;
  for (let i = 0; i < l.count; i++) {
    const sum = found[Math.floor(l.paint[i] / data.tones)], begin = l.start[i] * scale, end = l.end[i] * scale;
    for (let at = Math.floor(begin); at < end && at < bins; at++)
      sum[at] += Math.max(0, Math.min(end, at + 1) - Math.max(begin, at)) / RANKS;
  }
  return found;
}
let surveyed = { wide: 0, all: [] };
function survey() {
  const brush = overview.getContext("2d"), wide = overview.clientWidth, tall = overview.clientHeight;
  const bins = Math.max(10, Math.round(plotWidth()));
  if (surveyed.wide !== bins) surveyed = { wide: bins, all: lines.map((l) => shares(l, bins)) };
  brush.setTransform(dpr, 0, 0, dpr, 0, 0);
  brush.clearRect(0, 0, wide, tall);
  const each = (tall - 2 * WORK - (COUNT - 1) * 2) / COUNT;
  surveyed.all.forEach((ops, k) => {
    const floor = WORK + (k + 1) * each + k * 2, under = new Float32Array(bins);
    ops.forEach((share, code) => {
      brush.fillStyle = data.paints[code * data.tones + (data.tones >> 1)][0];
      for (let at = 0; at < bins; at++) {
        if (share[at]) brush.fillRect(GUTTER + at, floor - (under[at] + share[at]) * each, 1, share[at] * each);
        under[at] += share[at];
      }
    });
    brush.fillStyle = colours.line; brush.fillRect(GUTTER, floor, bins, 1);
  });
  brush.fillStyle = colours.soft; brush.font = "11px " + TEXT; brush.textBaseline = "middle";
  brush.textAlign = COUNT > 1 ? "left" : "right";
  brush.fillText("ranks at work", COUNT > 1 ? 12 : GUTTER - 8, tall / 2);
  const left = GUTTER + (state.t0 / MAKESPAN) * bins, size = ((state.t1 - state.t0) / MAKESPAN) * bins;
  brush.globalAlpha = 0.72; brush.fillStyle = colours.card;
  brush.fillRect(GUTTER - 1, 1, left - GUTTER, tall - 2);
  brush.fillRect(left + size, 1, GUTTER + bins - left - size + 1, tall - 2);
  brush.globalAlpha = 1; brush.strokeStyle = colours.accent; brush.lineWidth = 1.5;
  brush.strokeRect(left, 2, Math.max(size, 3), tall - 4);
}
