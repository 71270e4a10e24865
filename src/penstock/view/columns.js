// The data. The columns of a timeline are typed arrays with one entry per action, lane by lane;
// an action is its number.
//
//   columns.js  data ─ unpack ─► lines[]                  the page contains these three, one after the other,
//   plot.js     lines[], state ─ draw() ─► canvas         in one function
//   page.js     mouse, keys, buttons ─► state ─► redraw()
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const KINDS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array };

async function unpack({ kind, data }) {
  const text = atob(data), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new KINDS[kind](await new Response(stream).arrayBuffer());
}
const lines = [];
for (const { columns, units, ...facts } of data.timelines) {
  for (const name in columns) facts[name] = await unpack(columns[name]);
  lines.push({ ...facts, ...units, count: facts.start.length });
}
$("data").remove();
const COUNT = lines.length, RANKS = Math.max(...lines.map((l) => l.ranks));
const MAKESPAN = Math.max(...lines.map((l) => l.makespan)) || 1;

// ---------------------------------------------------------------- the actions
const op = (l, i) => data.ops[Math.floor(l.paint[i] / data.tones)];
const rankOf = (l, i) => l.home[l.stage[i]];
const label = (l, i) => l.microbatch[i] + (l.slice[i] ? "." + l.slice[i] : "");
const action = (l, i) => l.stage[i] + op(l, i).letter + label(l, i);

function search(column, time, first, end) { // the first entry after a time
  while (first < end) {
    const middle = (first + end) >> 1;
    if (column[middle] > time) end = middle; else first = middle + 1;
  }
  return first;
}
function members(l) { // the actions of each micro-batch: all of them in that order, and where each one's begin
  const begin = new Uint32Array(l.microbatches + 1), all = new Uint32Array(l.count);
  for (let i = 0; i < l.count; i++) begin[l.microbatch[i] + 1]++;
  for (let m = 0; m < l.microbatches; m++) begin[m + 1] += begin[m];
  const at = begin.slice();
  for (let i = 0; i < l.count; i++) all[at[l.microbatch[i]]++] = i;
  return (m) => (m !== null && m < l.microbatches ? all.subarray(begin[m], begin[m + 1]) : all.subarray(0, 0));
}
function chain(l) { // the critical path, last action first
  const found = [], on = new Uint8Array(l.count);
  for (let i = l.last; i >= 0 && !on[i]; i = l.cause[i] - 1) { found.push(i); on[i] = 1; }
  return { found, on };
}
function sumsByRank(l) { // the sums of gradients that each rank takes part in
  const found = Array.from({ length: l.ranks }, () => []);
  for (const [ranks, start, end] of l.sums) for (const rank of ranks) found[rank].push([start, end]);
  return found;
}
function peaks(l) { // the largest number of bytes of activations on each rank
  const most = new Float32Array(l.ranks);
  for (let i = 0; i < l.count; i++) most[rankOf(l, i)] = Math.max(most[rankOf(l, i)], l.held[i]);
  return most;
}
for (const l of lines) Object.assign(l, { of: members(l), critical: chain(l), peaks: peaks(l), sumsOf: sumsByRank(l) });
const mostHeld = (l) => l.peaks.reduce((a, b) => Math.max(a, b), 0);
for (const l of lines) // timelines with the same units share a scale
  l.heldScale = Math.max(...lines.filter((other) => other.inBytes === l.inBytes).map(mostHeld)) || 1;

// ---------------------------------------------------------------- numbers as text
function short(value, digits = 4) {
  if (!value || !isFinite(value)) return String(value || 0);
  const text = value.toFixed(Math.min(20, Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))))));
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}
function seconds(l, value, digits = 6, size = Math.abs(value)) { // in the units of a timeline
  if (!l.seconds) return counted(short(value, digits), "forward", "forwards");
  const [unit, one] = size >= 1 || !size ? ["s", 1] : size >= 1e-3 ? ["ms", 1e-3] : ["µs", 1e-6];
  return short(value / one, digits) + " " + unit;
}
const bare = (l, ...numbers) => (l.seconds ? seconds(l, ...numbers) : short(...numbers)); // where the unit is known
function bytes(l, value) {
  if (!l.inBytes) return counted(short(value), "micro-batch", "micro-batches");
  const power = value < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(value) / 10));
  return short(value / 1024 ** power, 3) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][power];
}
const counted = (number, one, several) => `${number} ${number === "1" ? one : several}`; // in the units of the papers
const percent = (value) => (value * 100).toFixed(1) + "%";
