"use strict";
// What the page computes, without the document: units, ticks, the shape of the picture, order of rows.

function unitOf(most, units) {
  return units.find(([, size]) => most >= size) || units[units.length - 1];
}

const BYTES = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["bytes", 1]];
const SECONDS = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]];

function said(value, units, digits = 2) {
  const [word, size] = unitOf(Math.abs(value), units);
  const shown = value / size;
  const places = size === 1 && units === BYTES ? 0 : digits;
  return `${shown.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places })} ${word}`;
}

const bytes = (value) => (value ? said(value, BYTES) : "0");
const seconds = (value) => (value ? said(value, SECONDS, 1) : "0");
const flops = (value) => said(value, [["PFLOP", 1e15], ["TFLOP", 1e12], ["GFLOP", 1e9], ["MFLOP", 1e6], ["FLOP", 1]], 1);

function share(more) {
  return `${more < 0 ? "−" : "+"}${Math.abs(100 * more).toFixed(1)}%`;
}

/** Whether a step needs no more memory and no more time than another one, and less of one of them. */
const isBetter = (a, b) => a.peak_bytes <= b.peak_bytes && a.step_seconds <= b.step_seconds
  && (a.peak_bytes < b.peak_bytes || a.step_seconds < b.step_seconds);

/** Round numbers from the least to the most, in a unit in which they are short. */
function ticks(least, most, count, units) {
  const [word, size] = unitOf(most, units);
  const rough = (most - least) / size / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((factor) => factor * power >= 0.7 * rough) || 10);
  const found = [];
  for (let k = Math.ceil(least / size / step); k * step <= (most / size) * (1 + 1e-9); k += 1) {
    found.push({ at: k * step * size, text: Number((k * step).toPrecision(6)).toLocaleString("en-US") });
  }
  return { word, ticks: found };
}

/** The index of the last sample that has ended at a time. */
function sampleAt(ends, time) {
  let low = 0;
  let high = ends.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (ends[middle] <= time) low = middle;
    else high = middle - 1;
  }
  return low;
}

const total = (step, sample) => Object.values(step.samples.layers).reduce((sum, layer) => sum + layer[sample], 0);

/** Outlines of the layers, the first at the bottom: for each the path of its area, as steps. */
function outlines(step, layers, x, y) {
  const { ends } = step.samples;
  const floor = ends.map(() => 0);
  const right = ends.map((_, i) => x(i + 1 < ends.length ? ends[i + 1] : Math.max(step.step_seconds, ends[i])));
  return layers.filter((layer) => step.samples.layers[layer]).map((layer) => {
    const lower = floor.slice();
    step.samples.layers[layer].forEach((value, i) => { floor[i] += value; });
    const edge = (heights) => ends.map((end, i) => `${x(end).toFixed(1)},${y(heights[i]).toFixed(1)} ${right[i].toFixed(1)},${y(heights[i]).toFixed(1)}`);
    return { layer, path: `M${edge(floor).join(" ")} ${edge(lower).join(" ").split(" ").reverse().join(" ")}Z` };
  });
}

/** A line of the height that each sample of a step has. */
function outline(step, height, x, y) {
  const { ends } = step.samples;
  return "M" + ends.map((end, i) => `${x(end).toFixed(1)},${y(height(i)).toFixed(1)} ` +
    `${x(i + 1 < ends.length ? ends[i + 1] : step.step_seconds).toFixed(1)},${y(height(i)).toFixed(1)}`).join(" ");
}

/** The rows of a table by one column; those that are alike stay in their order. */
function sorted(rows, key, direction) {
  const compare = (a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  return rows.slice().sort((a, b) => direction * compare(a[key], b[key]));
}

/** What one plan is, in a line. */
function inWords(step, plain) {
  const name = { "the plan": "The plan", "without recomputation": "Without recomputation", "another budget": "For another budget", "without a plan": "Without a plan" }[step.name];
  const more = step === plain || !plain.step_seconds ? "" : ` (${share(step.step_seconds / plain.step_seconds - 1)})`;
  return `${name}: peak ${bytes(step.peak_bytes)}, step ${seconds(step.step_seconds)}${more}, ${step.regions} regions`;
}
