// Mouse, wheel and key events of the timeline. Every mouse action has a key or a button.

let dragging = null; // {x, time, move}: where a drag started, and whether it moves the view

function zoom(factor, centre = (timeline.from + timeline.to) / 2) {
  show(centre - (centre - timeline.from) * factor, centre + (timeline.to - centre) * factor);
}

function show(from, to) {
  const whole = timeline.most - timeline.least, least = Math.min(whole, 2 / data.tick_ms);
  const long = Math.min(whole, Math.max(least, to - from));
  const press = Math.min(Math.max((from + to - long) / 2, timeline.least), timeline.most - long);
  Object.assign(timeline, { from: press, to: press + long });
  paint();
}

function shift(share) {
  const by = share * (timeline.to - timeline.from);
  show(timeline.from + by, timeline.to + by);
}

function showAll() {
  show(timeline.least, timeline.most);
}

// Bring a group into view and mark it.
function zoomToGroup(g) {
  timeline.chosen = g;
  const first = data.first[g], last = data.first[g + 1];
  if (first === last) return paint();
  let from = Infinity, to = data.g_scored[g] === UNKNOWN ? -Infinity : data.g_scored[g];
  for (let s = first; s < last; s++) {
    from = Math.min(from, data.s_start[s]);
    to = Math.max(to, data.s_end[s]);
  }
  const room = 2 * (to - from) + 1;
  show(from - room, to + room);
}

function paintDrag(pen) {
  if (!dragging || dragging.move || dragging.to === undefined) return;
  pen.globalAlpha = 0.18;
  pen.fillStyle = colour("focus");
  pen.fillRect(Math.min(dragging.x, dragging.to), AXIS, Math.abs(dragging.to - dragging.x), timeline.height);
  pen.globalAlpha = 1;
}

function startTimeline() {
  const canvas = $("lanes");
  canvas.addEventListener("pointermove", hover);
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("pointerdown", press);
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", () => { dragging = null; paint(); });
  canvas.addEventListener("dblclick", showAll);
  canvas.addEventListener("wheel", wheel, { passive: false });
  canvas.addEventListener("keydown", key);
  canvas.addEventListener("blur", () => { timeline.cursor = null; hideTip(); paint(); });
  for (const button of document.querySelectorAll("#timeline [data-do]")) button.addEventListener("click", () => ACTIONS[button.dataset.do]());
  new ResizeObserver(paint).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { shades.clear(); paint(); });
}

const ACTIONS = { in: () => zoom(0.5), out: () => zoom(2), left: () => shift(-0.25), right: () => shift(0.25), all: showAll };

function press(event) {
  if (event.button !== 0 || event.offsetX < LABELS) return;
  event.target.setPointerCapture(event.pointerId);
  dragging = { x: event.offsetX, move: event.shiftKey, last: event.offsetX };
}

function hover(event) {
  const width = event.target.clientWidth;
  if (dragging) {
    hideTip();
    if (dragging.move) shift((dragging.last - event.offsetX) / (width - LABELS));
    else dragging.to = Math.min(Math.max(event.offsetX, LABELS), width);
    dragging.last = event.offsetX;
    return paint();
  }
  const hit = itemAt(event.offsetX, event.offsetY, width);
  event.target.style.cursor = hit && hit.item.group >= 0 ? "pointer" : "crosshair";
  if (hit) showTip(describe(hit), event.clientX, event.clientY);
  else hideTip();
}

function release(event) {
  const drag = dragging, width = event.target.clientWidth;
  dragging = null;
  if (!drag) return;
  if (drag.to !== undefined && Math.abs(drag.to - drag.x) > 5) {
    const ends = [toTime(drag.x, width), toTime(drag.to, width)];
    show(Math.min(...ends), Math.max(...ends));
  } else if (!drag.move) {
    const hit = itemAt(event.offsetX, event.offsetY, width);
    if (hit && hit.item.group >= 0) visit(hit.item);
    paint();
  }
}

function wheel(event) {
  if (document.activeElement !== event.target && !event.ctrlKey && !event.metaKey) return; // the page scrolls on
  event.preventDefault();
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) return shift(event.deltaX / 1000);
  zoom(Math.exp(Math.max(-200, Math.min(200, event.deltaY)) / 300), toTime(event.offsetX, event.target.clientWidth));
}

function key(event) {
  const action = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": showAll, Home: showAll, ArrowLeft: () => shift(-0.2), ArrowRight: () => shift(0.2), n: () => walk(1), p: () => walk(-1), Enter: openCursor, Escape: hideTip }[event.key];
  if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  action();
}

// The next or the previous interval, in the order of their starts.
function walk(by) {
  timeline.ordered ??= timeline.lanes.flatMap((lane) => lane.items.map((item) => ({ lane, item }))).sort((a, b) => a.item.start - b.item.start);
  const order = timeline.ordered;
  if (!order.length) return;
  let at = order.findIndex((one) => one.item === timeline.cursor);
  if (at < 0) at = order.findIndex((one) => one.item.start >= timeline.from) - (by > 0 ? 1 : 0);
  at = Math.min(order.length - 1, Math.max(0, at + by));
  const { lane, item } = order[at];
  timeline.cursor = item;
  const span = timeline.to - timeline.from;
  if (item.start < timeline.from || item.end > timeline.to) show(item.start - span / 2, item.start + span / 2);
  paint();
  const canvas = $("lanes"), box = canvas.getBoundingClientRect();
  showTip(describe({ lane, item }), box.left + Math.max(LABELS, toX(item.start, canvas.clientWidth)), box.top + lane.top + (item.row + 1) * lane.rowHeight);
}

function openCursor() {
  if (timeline.cursor && timeline.cursor.group >= 0) visit(timeline.cursor);
}

// Open an item's group, and its sample.
function visit({ group, sample, members }) {
  location.href = to(`g/${data.g_number[group]}${members || sample < 0 ? "" : `?s=${data.s_number[sample]}`}`);
}
