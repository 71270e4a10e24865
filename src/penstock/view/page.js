// The controls: the mouse, the keys and the buttons change the state. Also the texts about an action.
//
//   move ─► pick() ─► hover ─► tip          wheel, drag, arrows ─► look()          click, number ─► choose()

// ---------------------------------------------------------------- texts
const make = (name, text = "", kind = "") => {
  const node = document.createElement(name);
  node.textContent = text;
  node.className = kind;
  return node;
};
function waited(l, i) { // what delayed an action
  const cause = l.cause[i] - 1, rank = rankOf(l, i), first = i === l.first[rank];
  const idle = l.start[i] - (first ? 0 : l.end[i - 1]);
  const lost = idle > MAKESPAN * 1e-6 ? `, idle ${seconds(l, idle, 3)}` : "";
  if (cause < 0) return "nothing" + lost;
  if (rankOf(l, cause) === rank) return action(l, cause) + " on this rank" + lost;
  return `${action(l, cause)} from rank ${rankOf(l, cause)}, arrived ${seconds(l, l.arrived[cause])}${lost}`;
}
function about(k, i) { // the facts about an action, with their names
  const l = lines[k];
  const facts = [
    ["rank", String(rankOf(l, i))],
    ["stage", `${l.stage[i]}, part ${l.part[l.stage[i]]}`],
    ["micro-batch", String(l.microbatch[i])],
    ["tokens", tokens(l.cuts[l.cut[l.microbatch[i]]], l.slice[i])],
    ["start", seconds(l, l.start[i])],
    ["end", seconds(l, l.end[i])],
    ["duration", seconds(l, l.lasts[i])],
    ["waited for", waited(l, i)],
    ["holds", bytes(l, l.held[i]) + " of activations"],
  ];
  const times = isFinite(l.sent[i]) ? `, leaves ${seconds(l, l.sent[i])}, arrives ${seconds(l, l.arrived[i])}` : "";
  if (l.target[i]) facts.push(["sends", `${bytes(l, l.bytes[i])} to rank ${l.target[i] - 1}${times}`]);
  if (data.alike) lines.forEach((other, n) => n !== k && facts.push([other.name, against(other, l, i)]));
  return facts;
}
function tokens(cuts, piece) { // of a slice
  if (cuts.length === 2) return cuts[1] > 1 ? `all ${cuts[1]}` : "all";
  return `${cuts[piece]} to ${cuts[piece + 1]}, slice ${piece} of ${cuts.length - 1}`;
}
function against(other, l, i) { // the same action in another timeline
  const late = other.start[i] - l.start[i], longer = other.lasts[i] - l.lasts[i];
  const signed = (value) => (value < 0 ? "−" : "+") + bare(l, Math.abs(value), 3);
  return `${bare(other, other.start[i])} to ${seconds(other, other.end[i])} (start ${signed(late)}, duration ${signed(longer)})`;
}
function tell(px, py) { // the tip, near a point
  const tip = $("tip");
  tip.hidden = !state.hover;
  if (!state.hover) return;
  const { k, i } = state.hover, l = lines[k], head = make("b"), chip = make("i"), list = make("dl");
  chip.style.background = data.paints[l.paint[i]][0];
  head.append(chip, make("span", action(l, i)), make("small", op(l, i).name + (COUNT > 1 ? ", " + l.name : "")));
  for (const [name, text] of about(k, i)) list.append(make("dt", name), make("dd", text));
  tip.replaceChildren(head, list);
  const box = tip.getBoundingClientRect();
  const left = px + 16 + box.width < innerWidth ? px + 16 : px - 16 - box.width;
  const top = Math.min(py + 16, innerHeight - box.height - 8);
  tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
}
function stats() {
  const first = lines[0], change = (of) => COUNT > 1 && of(lines[COUNT - 1]) - of(first);
  const ratio = (of) => (COUNT > 1 && of(first) ? change(of) / of(first) : 0);
  const sameSizes = lines.every((l) => l.inBytes === first.inBytes); // otherwise nobody can compare them
  const rows = [
    ["ranks", (l) => l.ranks],
    ["micro-batches", (l) => l.microbatches],
    ["actions", (l) => l.count.toLocaleString("en")],
    ["makespan", (l) => seconds(l, l.makespan, 4), ratio((l) => l.makespan), "%"],
    ["bubble", (l) => percent(l.bubble), change((l) => l.bubble), " pp"],
    ["peak", (l) => bytes(l, l.peak), ratio((l) => l.peak), sameSizes ? "%" : ""],
  ];
  for (const [name, of, delta, unit] of rows) {
    const card = make("div"), values = [...new Set(lines.map(of))];
    card.append(make("dt", name));
    const compared = delta !== undefined;
    lines.slice(0, compared ? COUNT : values.length).forEach((l) => {
      const line = make("dd");
      if (COUNT > 1 && compared) line.append(make("small", l.name));
      line.append(String(of(l)));
      card.append(line);
    });
    const verdict = delta > 5e-4 ? "worse" : delta < -5e-4 ? "better" : "";
    if (COUNT > 1 && unit) card.append(make("dd", sign(delta, unit), verdict));
    $("stats").append(card);
  }
}
const sign = (value, unit) => (value < 0 ? "−" : "+") + (Math.abs(value) * 100).toFixed(1) + unit;
function legend() {
  const used = new Set(lines.flatMap((l) => [...new Set(l.paint)].map((p) => Math.floor(p / data.tones))));
  const meanings = [["stages of a rank", "places"], ["slices", "slices"]];
  const shaded = meanings.filter(([, of]) => lines.some((l) => l[of] > 1)).map(([name]) => name).join(", ");
  data.ops.forEach((one, code) => {
    if (!used.has(code)) return;
    const at = (share) => data.paints[code * data.tones + Math.floor(share * data.tones)][0], chip = make("i");
    chip.style.backgroundImage = `linear-gradient(90deg, ${shaded ? [at(0.1), at(0.9)] : [at(0.5), at(0.5)]})`;
    $("legend").append(entry(chip, one.name));
  });
  if (lines.some((l) => l.sums.length)) {
    const chip = make("i");
    chip.style.cssText = `background-color: ${data.sum.colour}; height: 4px`;
    $("legend").append(entry(chip, data.sum.name));
  }
  const idle = make("i");
  idle.style.cssText = "background-color: var(--card); border-color: var(--line)";
  $("legend").append(entry(idle, "idle"));
  if (shaded) $("legend").append(make("span", "light to dark: " + shaded));
}
const entry = (chip, text) => { const item = make("span"); item.append(chip, text); return item; };

// ---------------------------------------------------------------- selection
function pick(px, py) { // the action at a point of the plot
  if (px < GUTTER || py < AXIS) return null;
  const rank = Math.floor((py + state.top - AXIS - 4) / block());
  const k = lines.findIndex((_, n) => py >= y(rank, n) && py <= y(rank, n) + Math.max(state.row, 1));
  if (rank < 0 || k < 0 || rank >= lines[k].ranks) return null;
  const l = lines[k], t = time(px), slack = (state.t1 - state.t0) / plotWidth() * 1.5;
  const i = search(l.start, t + slack, l.first[rank], l.first[rank + 1]) - 1;
  return i >= l.first[rank] && l.end[i] >= t - slack ? { k, i } : null;
}
function hover(found, px, py) {
  const same = found && state.hover && found.k === state.hover.k && found.i === state.hover.i;
  state.hover = found;
  tell(px, py);
  if (!same) redraw();
}
function choose(microbatch) {
  const known = Number.isInteger(microbatch) && microbatch >= 0 && lines.some((l) => microbatch < l.microbatches);
  state.selected = known ? microbatch : null;
  const field = $("microbatch"), text = known ? String(microbatch) : "";
  if (document.activeElement !== field || known) field.value = text;
  redraw();
}
function toggle(name) {
  const before = block();
  state[name] = !state[name];
  $(name).setAttribute("aria-pressed", state[name]);
  resize();
  look(state.t0, state.t1, (state.top / before) * block());
}
function step(along, across) { // to the next action of the rank, or to the next rank at the same time
  const { k, i } = state.hover || { k: 0, i: 0 }, l = lines[k], rank = rankOf(l, i);
  let next = state.hover ? i + along : 0;
  if (across) {
    const there = Math.max(0, Math.min(l.ranks - 1, rank + across)), begin = l.first[there];
    next = Math.max(begin, search(l.start, l.start[i], begin, l.first[there + 1]) - 1);
  }
  if (next < 0 || next >= l.count || (along && state.hover && rankOf(l, next) !== rank)) return;
  show(k, next);
}
function show(k, i) { // brings an action into view and shows its facts
  const l = lines[k], span = state.t1 - state.t0, rank = rankOf(l, i), at = y(rank, k);
  const t0 = l.end[i] > state.t1 || l.start[i] < state.t0 ? (l.start[i] + l.end[i]) / 2 - span / 2 : state.t0;
  const top = at < AXIS || at + state.row > height ? state.top + at - height / 2 : state.top;
  look(t0, t0 + span, top);
  const point = locate(k, i);
  hover({ k, i }, point.x, point.y);
}
function locate(k, i) { // the middle of an action, on the screen
  const l = lines[k], box = canvas.getBoundingClientRect();
  return { x: box.left + x((l.start[i] + l.end[i]) / 2), y: box.top + middle(rankOf(l, i), k) };
}

// ---------------------------------------------------------------- mouse
let held = null;
canvas.addEventListener("pointerdown", (e) => {
  if (e.button) return;
  held = { x: e.clientX, y: e.clientY, t0: state.t0, t1: state.t1, top: state.top, moved: false };
  canvas.setPointerCapture(e.pointerId);
});
canvas.addEventListener("pointermove", (e) => {
  if (!held) return hover(pick(e.offsetX, e.offsetY), e.clientX, e.clientY);
  const dx = e.clientX - held.x, dy = e.clientY - held.y;
  held.moved ||= Math.hypot(dx, dy) > 4;
  if (!held.moved) return;
  canvas.classList.add("held");
  hover(null);
  const shift = (-dx / plotWidth()) * (held.t1 - held.t0);
  look(held.t0 + shift, held.t1 + shift, held.top - dy);
});
canvas.addEventListener("pointerup", (e) => {
  if (held && !held.moved) {
    const found = pick(e.offsetX, e.offsetY), microbatch = found && lines[found.k].microbatch[found.i];
    choose(found && microbatch !== state.selected ? microbatch : null);
  }
  canvas.classList.remove("held");
  held = null;
});
canvas.addEventListener("pointerleave", () => held || hover(null));
canvas.addEventListener("wheel", (e) => {
  e.preventDefault();
  const turn = e.deltaMode ? 30 : 1, dy = e.deltaY * turn, dx = e.deltaX * turn, span = state.t1 - state.t0;
  if (e.ctrlKey || e.altKey) grow(Math.exp(-dy * 0.003), e.offsetY);
  else if (e.offsetX < GUTTER) look(state.t0, state.t1, state.top + dy);
  else if (e.shiftKey || Math.abs(dx) > Math.abs(dy)) {
    const shift = ((dx || dy) / plotWidth()) * span;
    look(state.t0 + shift, state.t1 + shift);
  } else zoom(Math.exp(dy * 0.0018), time(e.offsetX));
  hover(pick(e.offsetX, e.offsetY), e.clientX, e.clientY);
}, { passive: false });
for (const kind of ["pointerdown", "pointermove"]) overview.addEventListener(kind, (e) => {
  if (!e.buttons) return;
  overview.setPointerCapture(e.pointerId);
  const centre = ((e.offsetX - GUTTER) / plotWidth()) * MAKESPAN, half = (state.t1 - state.t0) / 2;
  look(centre - half, centre + half);
});

// ---------------------------------------------------------------- buttons and keys
const everything = () => { state.fitted = true; resize(); look(0, MAKESPAN, 0); };
const clear = () => { choose(null); $("microbatch").value = ""; hover(null); };
const pan = (dx, dy) => {
  const shift = dx * (state.t1 - state.t0);
  look(state.t0 + shift, state.t1 + shift, state.top + dy);
};
const highlight = () => state.hover && choose(lines[state.hover.k].microbatch[state.hover.i]);
const KEYS = {
  ArrowLeft: () => pan(-0.15, 0), ArrowRight: () => pan(0.15, 0),
  ArrowUp: () => pan(0, -60), ArrowDown: () => pan(0, 60),
  "+": () => zoom(1 / 1.5), "=": () => zoom(1 / 1.5), "-": () => zoom(1.5), 0: everything, Home: everything,
  "[": () => grow(1 / 1.3), "]": () => grow(1.3), m: () => toggle("memory"), c: () => toggle("critical"),
  n: () => step(1, 0), p: () => step(-1, 0), j: () => step(0, 1), k: () => step(0, -1), Enter: highlight, Escape: clear,
};
addEventListener("keydown", (e) => {
  const typing = e.target.tagName === "INPUT", pressing = /BUTTON|SUMMARY/.test(e.target.tagName) && e.key === "Enter";
  if (e.ctrlKey || e.metaKey || e.altKey || pressing || (typing && e.key !== "Escape") || !KEYS[e.key]) return;
  e.preventDefault();
  KEYS[e.key]();
});
const PRESS = {
  in: KEYS["+"], out: KEYS["-"], fit: everything, taller: KEYS["]"], lower: KEYS["["], memory: KEYS.m, critical: KEYS.c,
};
for (const id in PRESS) $(id).addEventListener("click", PRESS[id]);
$("microbatch").max = Math.max(...lines.map((l) => l.microbatches)) - 1;
$("microbatch").addEventListener("input", (e) => choose(e.target.value === "" ? null : Number(e.target.value)));

// ---------------------------------------------------------------- for tests and the curious
window.penstock = {
  state, lines, milliseconds: 0,
  get view() { return [state.t0, state.t1]; },
  get frames() { return frames; },
  get drawn() { return drawn; },
  get selected() { return state.selected; },
  get hovered() { return state.hover && action(lines[state.hover.k], state.hover.i); },
  get highlighted() { return lines.map((l) => Array.from(l.of(state.selected), (i) => action(l, i))); },
  counts: { timelines: COUNT, ranks: RANKS, actions: lines.map((l) => l.count) },
  find: (text, k = 0) => lines[k].start.findIndex((_, i) => action(lines[k], i) === text),
  locate, show,
};
stats();
legend();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
addEventListener("resize", resize);
theme();
resize();
