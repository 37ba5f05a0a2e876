// Timeline: one lane per worker on a canvas. Only visible items are painted, without the items hidden behind them.

const LABELS = 112, AXIS = 22, PAD = 8, STRIP = 5, MAX_ROWS = 16;
const timeline = { lanes: [], from: 0, to: 1, least: 0, most: 1, chosen: -1, cursor: null, height: 0 };

// Lanes of items {start, end, kind, row, sample, group, at} from the columns; times are ticks.
function buildTimeline() {
  const lanes = data.workers.map((worker, index) => ({ ...worker, index, items: [], strip: [], rows: 1 }));
  for (let s = 0; s < data.s_start.length; s++) {
    lanes[data.s_worker[s]].items.push({ start: data.s_start[s], end: data.s_end[s], kind: 0, row: 0, sample: s, group: data.groupOf[s], at: -1 });
  }
  for (let g = 0; g < data.g_number.length; g++) {
    if (data.g_scorer[g] === NOTHING || data.g_scoring[g] === UNKNOWN) continue;
    lanes[data.g_scorer[g]].items.push({ start: data.g_scoring[g], end: data.g_scored[g], kind: 1, row: 0, sample: -1, group: g, at: -1 });
  }
  for (let i = 0; i < data.i_kind.length; i++) {
    const item = { start: data.i_start[i], end: data.i_end[i], kind: data.i_kind[i], row: 0, sample: -1, group: -1, at: i };
    lanes[data.i_worker[i]].items.push(item);
  }
  for (let a = 0; a < data.a_start.length; a++) {
    lanes[data.a_worker[a]].strip.push({ start: data.a_start[a], end: data.a_end[a], kind: -1, label: data.a_label[a], row: 0, sample: -1, group: -1, at: -1 });
  }
  for (const lane of lanes) {
    lane.items.sort((a, b) => a.start - b.start);
    lane.rows = stack(lane.items, Infinity);
    if (lane.rows > MAX_ROWS && lane.role === "rollout") {
      lane.items = byGroup(lane.items).sort((a, b) => a.start - b.start);
      lane.rows = stack(lane.items, MAX_ROWS);
    } else if (lane.rows > MAX_ROWS) lane.rows = stack(lane.items, MAX_ROWS);
  }
  const start = data.kinds.indexOf("start");
  for (const lane of lanes) if (lane.items.some((item) => item.kind !== start)) lane.strip = []; // the log dates what it did
  timeline.lanes = lanes.filter((lane) => lane.items.length || lane.strip.length);
  timeline.least = 0;
  timeline.most = 1;
  for (const item of timeline.lanes.flatMap((lane) => [...lane.items, ...lane.strip])) {
    if (item.kind !== start) timeline.least = Math.min(timeline.least, item.start); // a worker may have waited for its run for hours
    timeline.most = Math.max(timeline.most, item.end);
  }
  layOut();
  Object.assign(timeline, working());
  timeline.home = [timeline.from, timeline.to];
}

// From the first sample to the last step, without loading or a pause before it.
function working() {
  const trains = data.kinds.indexOf("train"), moments = (column) => Array.from(column).filter((moment) => moment !== UNKNOWN);
  const ends = Array.from(data.i_end).filter((_, i) => data.i_kind[i] === trains).concat(moments(data.s_end)), begun = moments(data.s_start);
  const extreme = (values, choose, none) => values.reduce((best, value) => choose(best, value), none);
  const from = extreme(begun, Math.min, Infinity), to = extreme(ends, Math.max, -Infinity), room = 0.01 * (to - from);
  if (!(from < to)) return { from: timeline.least, to: timeline.most };
  return { from: Math.max(timeline.least, from - room), to: Math.min(timeline.most, to + room) };
}

// Assign rows so that no items overlap, up to the largest number of rows; returns the number in use.
function stack(items, most) {
  const ends = [];
  for (const item of items) {
    let row = ends.findIndex((end) => end <= item.start);
    if (row < 0) row = ends.length < most ? ends.length : ends.indexOf(Math.min(...ends));
    item.row = row;
    ends[row] = Math.max(ends[row] ?? 0, item.end);
    if (ends.length > 400) return ends.length; // more side by side than anybody tells apart
  }
  return Math.max(1, ends.length);
}

// One item per group if there are too many samples to paint each.
function byGroup(items) {
  const merged = new Map(), rest = items.filter((item) => item.group < 0);
  for (const item of items) {
    const known = merged.get(item.group);
    if (item.group < 0) continue;
    if (!known) merged.set(item.group, { ...item, members: 1 });
    else {
      known.end = Math.max(known.end, item.end);
      known.members++;
    }
  }
  return [...merged.values(), ...rest];
}

function layOut() {
  const many = timeline.lanes.reduce((sum, lane) => sum + lane.rows, 0), fits = Math.floor((innerHeight - 260 - PAD * timeline.lanes.length) / many);
  let y = AXIS;
  for (const lane of timeline.lanes) {
    lane.rowHeight = Math.max(5, Math.min(14, fits));
    lane.top = y + PAD / 2;
    const height = lane.items.length ? lane.rows * lane.rowHeight : 6;
    lane.stripTop = lane.top + height + 2;
    y += Math.max(height + (lane.strip.length ? STRIP + 2 : 0), 13) + PAD;
    lane.bottom = y;
  }
  timeline.height = y + 4;
  Object.assign(timeline, { from: timeline.least, to: timeline.most });
}

const toX = (t, width) => LABELS + ((t - timeline.from) / (timeline.to - timeline.from)) * (width - LABELS - 8);
const toTime = (x, width) => timeline.from + ((x - LABELS) / (width - LABELS - 8)) * (timeline.to - timeline.from);

let painting = false;
function paint() {
  if (painting) return;
  painting = true;
  requestAnimationFrame(() => { painting = false; paintNow(); });
}

function paintNow() {
  const canvas = $("lanes"), scale = devicePixelRatio || 1, width = canvas.clientWidth;
  if (!width) return; // another view is shown
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(timeline.height * scale)) {
    canvas.style.height = `${timeline.height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(timeline.height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.fillStyle = colour("back");
  pen.fillRect(0, 0, width, timeline.height);
  paintAxis(pen, width);
  pen.save();
  pen.beginPath();
  pen.rect(LABELS, 0, width - LABELS, timeline.height);
  pen.clip();
  paintItems(pen, width, scale);
  for (const [start, end] of data.pauses) {
    const x = toX(start, width), long = toX(end, width) - x, text = `stopped ${clock(ms(end - start))}`;
    pen.fillStyle = colour("panel");
    pen.fillRect(x, AXIS, long, timeline.height);
    pen.fillStyle = colour("dim");
    pen.fillRect(x, AXIS, 1, timeline.height);
    pen.textAlign = "center";
    if (long > pen.measureText(text).width) pen.fillText(text, x + long / 2, AXIS + 8);
  }
  paintDrag(pen);
  pen.restore();
  $("span").textContent = `${clock(ms(timeline.from), 1)} – ${clock(ms(timeline.to), 1)}  (${lasting(ms(timeline.to - timeline.from))})`;
  Object.assign(canvas.dataset, { from: timeline.from, to: timeline.to, lanes: timeline.lanes.map((lane) => lane.name).join(" ") });
}

function paintAxis(pen, width) {
  const span = ms(timeline.to - timeline.from), most = Math.max(2, (width - LABELS) / 90);
  const step = niceStep(span / most);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.lineWidth = 1;
  for (let at = Math.ceil(ms(timeline.from) / step) * step; at <= ms(timeline.to); at += step) {
    const x = Math.round(toX(at / data.tick_ms, width)) + 0.5;
    pen.strokeStyle = colour("line");
    pen.beginPath(); pen.moveTo(x, AXIS - 4); pen.lineTo(x, timeline.height); pen.stroke();
    pen.fillStyle = colour("dim");
    pen.textAlign = x > width - 40 ? "right" : "center";
    pen.fillText(clock(at, step < 1000 ? Math.min(3, Math.ceil(-Math.log10(step / 1000))) : 0), x, AXIS / 2);
  }
  pen.textAlign = "left";
  for (const lane of timeline.lanes) {
    pen.fillStyle = colour("text");
    pen.fillText(lane.name.length > 16 ? `${lane.name.slice(0, 15)}…` : lane.name, 8, (lane.top + lane.bottom - PAD / 2) / 2);
    pen.strokeStyle = colour("line");
    pen.beginPath(); pen.moveTo(0, Math.round(lane.bottom) + 0.5); pen.lineTo(width, Math.round(lane.bottom) + 0.5); pen.stroke();
  }
}

function niceStep(least) {
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 15000, 30000, 60000, 120000, 300000, 600000, 900000, 1800000, 3600000];
  return steps.find((step) => step >= least) ?? Math.ceil(least / 7200000) * 7200000;
}

// All items, written into pixels: twenty thousand of them as rectangles of a canvas would take too long to move smoothly.
function paintItems(pen, width, scale) {
  const wide = Math.round(width * scale), high = Math.round(timeline.height * scale);
  if (!pixels || pixels.width !== wide || pixels.height !== high) {
    pixels = new ImageData(wide, high);
    layer = new OffscreenCanvas(wide, high);
  }
  const cells = new Uint32Array(pixels.data.buffer).fill(0), marked = [];
  for (const lane of timeline.lanes) {
    fillItems(cells, wide, scale, lane, lane.items, lane.top, lane.rowHeight, marked);
    fillItems(cells, wide, scale, lane, lane.strip, lane.stripTop, STRIP, marked);
  }
  layer.getContext("2d").putImageData(pixels, 0, 0);
  pen.drawImage(layer, 0, 0, width, timeline.height);
  pen.strokeStyle = colour("strong");
  for (const [item, x, y, long, tall] of marked) {
    pen.lineWidth = item === timeline.cursor ? 2 : 1.5;
    pen.strokeRect(x / scale, y / scale, long / scale, tall / scale);
  }
}

let pixels = null, layer = null;

function fillItems(cells, wide, scale, lane, items, top, height, marked) {
  const painted = new Float64Array(lane.rows + 1).fill(-1), left = Math.round(LABELS * scale), right = wide - Math.round(8 * scale);
  const each = (right - left) / (timeline.to - timeline.from), tall = Math.round(height * scale), gap = Math.max(1, Math.round(scale));
  for (const item of items) {
    if (item.start > timeline.to) break;
    if (item.end < timeline.from) continue;
    const x = Math.max(left, Math.round(left + (item.start - timeline.from) * each));
    const end = Math.min(wide, Math.round(left + (item.end - timeline.from) * each)), y = Math.round((top + item.row * height) * scale);
    if ((item.group >= 0 && item.group === timeline.chosen) || item === timeline.cursor) marked.push([item, x, y, Math.max(2, end - x), tall]);
    const last = Math.min(wide, Math.max(x + 1, end - (end - x > 3 * gap ? gap : 0))), fill = shadeOf(item);
    if (last <= painted[item.row]) continue;
    for (let row = y * wide, bottom = (y + tall - gap) * wide; row < bottom; row += wide) for (let at = row + x; at < row + last; at++) cells[at] = fill;
    painted[item.row] = last;
  }
}

const shades = new Map();
// An item's colour as a pixel: red, green, blue, opacity, from the lowest byte.
function shadeOf(item) {
  const odd = item.kind === 0 && (data.s_min[item.sample] & 1) === 1, key = item.kind >= 0 ? 2 * item.kind + (odd ? 1 : 0) : -1 - item.label;
  let shade = shades.get(key);
  if (shade === undefined) {
    const kind = item.kind >= 0 ? data.kinds[item.kind] : data.labels[item.label][1];
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour(kind === "work" ? "dim" : kind).slice(at, at + 2), 16));
    shade = ((Math.round(255 * (kind === "work" ? 0.3 : odd ? 0.62 : 1)) << 24) | (blue << 16) | (green << 8) | red) >>> 0;
    shades.set(key, shade);
  }
  return shade;
}

// The item under a point, null for none.
function itemAt(x, y, width) {
  const lane = timeline.lanes.find((one) => y >= one.top - PAD / 2 && y < one.bottom);
  if (!lane || x < LABELS) return null;
  const t = toTime(x, width), near = (3 * (timeline.to - timeline.from)) / (width - LABELS);
  const inStrip = y >= lane.stripTop - 1 || !lane.items.length;
  const row = Math.min(lane.rows - 1, Math.max(0, Math.floor((y - lane.top) / lane.rowHeight)));
  const fits = (inStrip ? lane.strip : lane.items).filter((item) => (inStrip || item.row === row) && t >= item.start - near && t <= item.end + near);
  const off = (item) => Math.max(0, item.start - t, t - item.end);
  fits.sort((a, b) => off(a) - off(b) || b.kind - a.kind || b.start - a.start);
  return fits.length ? { lane, item: fits[0] } : null;
}

function describe({ lane, item }) {
  const when = `${moment(item.start)} – ${moment(item.end)}, ${lasting(ms(item.end - item.start))}`;
  if (item.kind === -1) return `${lane.name}: “${data.labels[item.label][0]}”\n${when}, by its statuses`;
  const kind = data.kinds[item.kind], lines = [`${lane.name}: ${kind}`, when];
  if (item.group >= 0) {
    const g = item.group, status = data.statuses[data.g_status[g]], step = data.g_step[g] >= 0 ? `, step ${data.g_step[g]}` : "";
    if (item.members) lines[0] += ` of ${item.members} samples`;
    lines.push(`group ${data.g_number[g]}${item.sample >= 0 && !item.members ? `, sample ${data.s_number[item.sample]}` : ""}: ${status}${step}`);
    if (item.sample >= 0 && !item.members) {
      const s = item.sample, reward = Number.isNaN(data.s_reward[s]) ? "not scored" : `reward ${number(data.s_reward[s])}`;
      lines.push(`${count(data.s_tokens[s])} tokens under version ${range(data.s_min[s], data.s_max[s])}, ${reward}`);
    }
    if (kind === "score") lines.push("its reward functions");
  }
  if (item.at >= 0) {
    const step = data.i_step[item.at], version = data.i_version[item.at];
    if (data.causes[data.i_cause[item.at]]) lines[0] += ` for ${data.causes[data.i_cause[item.at]]}`;
    if (step >= 0) lines.push(`step ${step}${version >= 0 ? ` at version ${version}` : ""}`);
    else if (version >= 0) lines.push(`version ${version}`);
  }
  return lines.join("\n");
}

function buildLegend() {
  const used = new Set(data.i_kind);
  const present = data.kinds.filter((kind, index) => used.has(index) || (index === 0 && data.s_start.length) || (index === 1 && data.g_scorer.some((scorer) => scorer !== NOTHING)));
  const words = { rollout: "rollout (fainter under odd versions)", load: "load weights", start: "start up" };
  const strip = timeline.lanes.some((lane) => lane.strip.length) ? [el("li", {}, "thin lines: statuses of a worker")] : [];
  if (data.pauses.length) strip.push(el("li", {}, "vertical line: the run was stopped"));
  $("legend").replaceChildren(...present.map((kind) => el("li", {}, swatch(`var(--${kind})`), words[kind] ?? kind)), ...strip);
}
