// The page: it draws what the document says for the plan that is chosen by the slider.

const DATA = JSON.parse(document.getElementById("data").textContent);
const PLAIN = DATA.steps[DATA.plain];
const WORDS = {
  parameters: "parameters", buffers: "buffers", optimizer: "optimizer", gradients: "gradients", other: "other",
  activations: "activations of the forward", rebuilt: "rebuilt by replays", backward: "made in backward",
};
const HOSTED = DATA.steps.some((step) => step.host_bytes);
const COLUMNS = [
  ["where", "part", "path"], ["count", "how many", "number"], ["what", "what becomes of it", ""],
  ["saved_bytes", "keeps", "number", bytes], ["freed_bytes", "frees", "number", bytes],
  ...(HOSTED ? [["host_bytes", "in host memory", "number", bytes]] : []), ["seconds", "costs", "number", seconds], ["why", "freed per ms", ""],
];
const WIDE = 1000, LEFT = 62, RIGHT = 12;
const state = { shown: DATA.chosen, sample: null, column: null, direction: 1 };
const by = (id) => document.getElementById(id);

function element(name, attributes = {}, text = "") {
  const svg = ["svg", "path", "line", "rect", "circle", "text", "title", "g", "polyline"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text;
  return made;
}

function scale(least, most, from, to) {
  return (value) => from + ((value - least) / (most - least || 1)) * (to - from);
}

const most = (key) => Math.max(...DATA.steps.map((step) => step[key]));
const HIGH = 380, TOP = 22, BOTTOM = 66;
const x = scale(0, most("step_seconds"), LEFT, WIDE - RIGHT);
const tallest = Math.max(most("peak_bytes"), most("host_bytes")) * 1.04;
const y = scale(0, tallest, HIGH - BOTTOM, TOP);

function axes(svg, high, bottom, across, up, xTicks, yTicks, xWord, yWord) {
  for (const tick of yTicks.ticks) {
    svg.append(element("line", { class: "grid", x1: LEFT, x2: WIDE - RIGHT, y1: up(tick.at), y2: up(tick.at) }));
    svg.append(element("text", { x: LEFT - 8, y: up(tick.at) + 4, "text-anchor": "end" }, tick.text));
  }
  for (const tick of xTicks.ticks) {
    svg.append(element("text", { x: across(tick.at), y: high - 24, "text-anchor": "middle" }, tick.text));
  }
  svg.append(element("text", { x: LEFT, y: 12 }, `${yWord}, ${yTicks.word}`));
  svg.append(element("text", { x: WIDE - RIGHT, y: high - 6, "text-anchor": "end" }, `${xWord}, ${xTicks.word}`));
}

function drawStep() {
  const svg = by("step"), step = DATA.steps[state.shown];
  svg.setAttribute("viewBox", `0 0 ${WIDE} ${HIGH}`);
  svg.replaceChildren();
  axes(svg, HIGH, BOTTOM, x, y, ticks(0, most("step_seconds"), 8, SECONDS), ticks(0, tallest, 6, BYTES), "time", "alive");
  for (const { layer, path } of outlines(step, DATA.layers, x, y)) {
    svg.append(element("path", { class: "layer", "data-layer": layer, d: path, fill: `var(--${layer})` }));
  }
  if (step !== PLAIN) svg.append(element("path", { class: "outline", d: outline(PLAIN, (i) => total(PLAIN, i), x, y) }));
  if (step.host_bytes) {
    svg.append(element("path", { class: "hosted", d: outline(step, (i) => step.samples.host[i], x, y) }));
  }
  for (const [phase, start, end] of step.phases) {
    const band = element("rect", { class: "phase", "data-phase": phase, x: x(start), y: HIGH - BOTTOM + 6,
      width: Math.max(0.3, x(end) - x(start)), height: 12, fill: `var(--${phase}-phase)` });
    band.append(element("title", {}, phase));
    svg.append(band);
  }
  if (step.promised) {
    const at = y(step.promised.budget_bytes);
    if (at > TOP) {
      svg.append(element("line", { class: "budget", x1: LEFT, x2: WIDE - RIGHT, y1: at, y2: at }));
      svg.append(element("text", { class: "marked", x: WIDE - RIGHT, y: at - 5, "text-anchor": "end" },
        `budget ${bytes(step.promised.budget_bytes)}`));
    }
  }
  const end = x(step.samples.ends[step.peak]);
  svg.append(element("circle", { id: "peak", cx: end, cy: y(step.peak_bytes), r: 4, fill: "var(--mark)" }));
  svg.append(element("line", { id: "cross", class: "cross", y1: TOP, y2: HIGH - BOTTOM + 18, visibility: "hidden" }));
  tell(state.sample);
}

function tell(sample) {
  const step = DATA.steps[state.shown], cross = by("cross");
  const at = sample === null ? step.peak : Math.max(0, Math.min(sample, step.samples.ends.length - 1));
  const { ends, phase, module, op, layers, host } = step.samples;
  cross.setAttribute("visibility", sample === null ? "hidden" : "visible");
  cross.setAttribute("x1", x(ends[at]));
  cross.setAttribute("x2", x(ends[at]));
  const place = [DATA.names[phase[at]], DATA.names[module[at]] && `in ${DATA.names[module[at]]}`,
    DATA.names[op[at]] && `after ${DATA.names[op[at]]}`].filter(Boolean).join(", ");
  const parts = DATA.layers.filter((layer) => layers[layer] && layers[layer][at])
    .map((layer) => `${WORDS[layer]} ${bytes(layers[layer][at])}`).join(", ");
  by("readout").textContent =
    `${at === step.peak ? "The peak, at" : "At"} ${seconds(ends[at])}: ${bytes(total(step, at))} alive. ` +
    `${place.charAt(0).toUpperCase()}${place.slice(1)}. Of it ${parts}.` +
    (step.host_bytes ? ` In host memory ${bytes(host[at])}.` : "");
}

function drawFrontier() {
  const svg = by("frontier"), high = 300;
  const peaks = DATA.steps.map((step) => step.peak_bytes), times = DATA.steps.map((step) => step.step_seconds);
  const widen = (values) => {
    const [least, greatest] = [Math.min(...values), Math.max(...values)];
    const more = (greatest - least) * 0.08 || greatest * 0.05 || 1;
    return [Math.max(0, least - more), greatest + more];
  };
  const [x0, x1] = widen(peaks), [y0, y1] = widen(times);
  const across = scale(x0, x1, LEFT, WIDE - RIGHT), up = scale(y0, y1, high - 46, TOP);
  svg.setAttribute("viewBox", `0 0 ${WIDE} ${high}`);
  svg.replaceChildren();
  axes(svg, high, 46, across, up, ticks(x0, x1, 8, BYTES), ticks(y0, y1, 5, SECONDS), "peak of the step", "step");
  const line = DATA.steps.filter((step) => !DATA.steps.some((other) => isBetter(other, step))).map((step) => `${across(step.peak_bytes)},${up(step.step_seconds)}`);
  svg.append(element("polyline", { class: "curve", points: line.join(" ") }));
  const order = DATA.steps.map((_, number) => number).sort((a, b) => (a === DATA.chosen) - (b === DATA.chosen));
  for (const number of order) {
    const step = DATA.steps[number];
    const kind = { "the plan": "plan", "without recomputation": "plain" }[step.name] || "other";
    const point = element("circle", { class: `point ${kind}`, "data-step": number, cx: across(step.peak_bytes),
      cy: up(step.step_seconds), r: 6 });
    point.append(element("title", {}, inWords(step, PLAIN)));
    point.addEventListener("click", () => show(number));
    svg.append(point);
    if (number === state.shown) {
      svg.append(element("circle", { id: "ring", class: "ring", cx: across(step.peak_bytes), cy: up(step.step_seconds), r: 10 }));
    }
    if (kind !== "other") {
      const left = kind === "plain";
      svg.append(element("text", { class: kind === "plan" ? "marked" : "", x: across(step.peak_bytes) + (left ? -14 : 14),
        y: up(step.step_seconds) + (left ? 20 : -8), "text-anchor": left ? "end" : "start" }, step.name));
    }
  }
}

function drawTable() {
  const table = by("placements"), step = DATA.steps[state.shown];
  const head = element("tr");
  for (const [key, word, kind] of COLUMNS) {
    const cell = element("th", { scope: "col", class: kind });
    if (key === state.column) cell.setAttribute("aria-sort", state.direction > 0 ? "ascending" : "descending");
    const button = element("button", { type: "button", "data-key": key }, word);
    button.addEventListener("click", () => sortBy(key, kind === "number" ? -1 : 1));
    cell.append(button);
    head.append(cell);
  }
  table.tHead.replaceChildren(head);
  const rows = state.column === null ? step.placements : sorted(step.placements, state.column, state.direction);
  table.tBodies[0].replaceChildren(...rows.map((row) => {
    const line = element("tr");
    for (const [key, , kind, shown] of COLUMNS) {
      line.append(element("td", { class: kind }, shown ? shown(row[key]) : String(row[key])));
    }
    return line;
  }));
}

function sortBy(column, first) {
  state.direction = state.column === column ? -state.direction : first;
  state.column = column;
  drawTable();
  by("placements").querySelector(`button[data-key="${column}"]`).focus();
}

function figures() {
  const step = DATA.steps[state.shown], less = step.peak_bytes - PLAIN.peak_bytes;
  const shown = [
    ["peak", bytes(step.peak_bytes), step === PLAIN ? "" : `${share(less / PLAIN.peak_bytes)} on ${bytes(PLAIN.peak_bytes)} without recomputation`],
    ["step", seconds(step.step_seconds), step === PLAIN ? "" : `${share(step.step_seconds / PLAIN.step_seconds - 1)} on ${seconds(PLAIN.step_seconds)} without recomputation`],
    ["replays", seconds(step.replay_seconds), flops(step.replay_flops)],
    ["kept for backward", bytes(step.kept_bytes), step === PLAIN ? "" : `${bytes(PLAIN.kept_bytes)} without recomputation`],
    ["regions", String(step.regions), step.promised ? `for a budget of ${state.shown === DATA.chosen ? step.promised.budget : bytes(step.promised.budget_bytes)}` : ""],
  ];
  if (HOSTED) shown.push(["in host memory", bytes(step.host_bytes), "at most, not on the device"]);
  by("figures").replaceChildren(...shown.map(([word, value, more]) => {
    const box = element("div"), figure = element("dd", {}, value);
    if (more) figure.append(element("small", {}, more));
    box.append(element("dt", {}, word), figure);
    return box;
  }));
}

function notes() {
  const step = DATA.steps[state.shown];
  const lines = [`Counted: ${DATA.counted}.`, step.advice, ...DATA.notes].filter(Boolean);
  by("notes").replaceChildren(...lines.map((line) => element("p", {}, line)));
}

function show(number) {
  state.shown = number;
  state.sample = null;
  by("slider").value = String(number);
  by("slider").setAttribute("aria-valuetext", inWords(DATA.steps[number], PLAIN));
  by("shown").textContent = inWords(DATA.steps[number], PLAIN);
  by("back").disabled = number === DATA.chosen;
  figures();
  drawStep();
  drawFrontier();
  drawTable();
  notes();
}

function point(sample) {
  state.sample = sample;
  tell(sample);
}

function timeUnder(event) {
  const box = by("step").getBoundingClientRect();
  const across = ((event.clientX - box.left) / box.width) * WIDE;
  return ((across - LEFT) / (WIDE - RIGHT - LEFT)) * most("step_seconds");
}

function legend(id, keys) {
  by(id).replaceChildren(...keys.map(([colour, word]) => {
    const item = element("li");
    if (colour !== "none") item.append(element("i", { style: `background: ${colour}`, class: word.includes("line: ") ? "line" : "" }));
    item.append(word);
    return item;
  }));
}

function begin() {
  by("source").textContent = DATA.source ? `A plan of ${DATA.steps[DATA.chosen].regions} regions, from ${DATA.source}.` : "";
  by("device").textContent = DATA.device;
  const used = DATA.layers.filter((layer) => DATA.steps.some((step) => step.samples.layers[layer]));
  const ran = ["forward", "loss", "replay", "backward", "optimizer"].filter(
    (phase) => DATA.steps.some((step) => step.phases.some(([name]) => name === phase)));
  legend("legend", [...used.map((layer) => [`var(--${layer})`, WORDS[layer]]), ["var(--ink)", "line: without recomputation"],
    ...(HOSTED ? [["var(--host)", "dotted line: in host memory, beside the device's"]] : [])]);
  legend("phases", [["none", "the strip:"], ...ran.map((phase) => [`var(--${phase}-phase)`, phase])]);
  by("slider").max = String(DATA.steps.length - 1);
  by("slider").addEventListener("input", (event) => show(Number(event.target.value)));
  by("back").addEventListener("click", () => show(DATA.chosen));
  by("step").addEventListener("pointermove", (event) => point(sampleAt(DATA.steps[state.shown].samples.ends, timeUnder(event))));
  by("step").addEventListener("pointerleave", () => point(null));
  by("step").addEventListener("keydown", (event) => {
    const by_ = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (event.key === "Escape") point(null);
    if (by_ === undefined) return;
    event.preventDefault();
    const from = state.sample === null ? DATA.steps[state.shown].peak : state.sample;
    point(Math.max(0, Math.min(from + by_, DATA.steps[state.shown].samples.ends.length - 1)));
  });
  show(DATA.chosen);
}

begin();
