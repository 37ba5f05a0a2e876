// Starts what a page has: curves, list, group, timeline, live updates, keys. In the one-file report it also shows one view at a time.

const views = {
  samples: (params) => showSamples(params),
  g: (params, groupNumber) => showGroup($("group"), Number(groupNumber), { sample: params.has("s") ? Number(params.get("s")) : null }),
  timeline: showTimeline,
};
let started = new Set();

// The parts of the address below the run, and its query.
function address() {
  const full = FILE ? location.hash.replace(/^#\/?/, "") : location.pathname.split("/").slice(4).join("/") + location.search;
  const [path, query = ""] = full.split("?");
  return { parts: path.split("/"), params: new URLSearchParams(query) };
}

// Put the state of a view into the address, so that it can be sent.
function remember(params) {
  const query = String(params), { parts } = address();
  history.replaceState(null, "", FILE ? `#/${parts.join("/")}${query && `?${query}`}` : location.pathname + (query && `?${query}`));
}

function route() {
  const { parts: [name, ...rest], params } = address();
  if (FILE) {
    for (const view of document.querySelectorAll(".view")) view.hidden = view.dataset.view !== name;
    for (const tab of document.querySelectorAll("[data-tab]")) tab.toggleAttribute("aria-current", tab.dataset.tab === (name === "g" ? "samples" : name));
  }
  if (name === "" || !FILE) showCurves();
  if ($("filters") && !started.has("samples")) { started.add("samples"); startSamples(); }
  views[name]?.(params, ...rest);
}

async function showTimeline(params) {
  await loadIndex();
  if (!started.has("timeline")) {
    started.add("timeline");
    buildTimeline();
    buildLegend();
    startTimeline();
  }
  const g = data.byNumber.get(Number(params.get("group") ?? -1));
  if (g !== undefined) zoomToGroup(g);
  paintNow();
  if (!FILE && data.live) setTimeout(growTimeline, 3000);
}

// The timeline of a live run grows; a view that was moved stays where it is.
async function growTimeline() {
  const { from, to: until, home } = timeline, moved = from !== home[0] || until !== home[1];
  if (!document.hidden) {
    loadIndex.loading = null;
    await loadIndex();
    Object.assign(timeline, { cursor: null, ordered: null });
    shades.clear();
    buildTimeline();
    buildLegend();
    if (moved) Object.assign(timeline, { from, to: until });
    paintNow();
  }
  if (data.live) setTimeout(growTimeline, 3000);
}

// Live updates: the server sends the changed part of the page, which is patched in place, and new curves.
function follow() {
  const live = $("live");
  let stream = null, paused = false;
  const notice = (text) => Object.assign($("live-problem"), { textContent: text, hidden: !text });
  const open = () => {
    if (stream || paused || document.hidden) return;
    stream = new EventSource(to("events"));
    stream.addEventListener("facts", (event) => { notice(""); patch(live, event.data); });
    stream.addEventListener("curves", (event) => showCurves(JSON.parse(event.data)));
    stream.addEventListener("over", () => { close(); paused = true; live.dataset.live = "false"; });
    stream.addEventListener("problem", (event) => notice(`${event.data}; updates continue by themselves`)); // the browser connects again
    stream.addEventListener("error", () => $("live-problem").hidden && notice("The server of this page does not respond; updates continue by themselves."));
  };
  const close = () => { stream?.close(); stream = null; };
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  follow.toggle = () => {
    paused = !paused;
    if (paused) close();
    else open();
    $("pause")?.setAttribute("aria-pressed", String(paused));
  };
  live.addEventListener("click", (event) => { if (event.target.id === "pause") follow.toggle(); });
  open();
}

async function patch(target, text) {
  await htmx.swap({ target, sourceElement: target, text, swap: "innerMorph" });
  const { status } = target.querySelector("[data-status]").dataset, badge = document.querySelector("header .status");
  Object.assign(badge, { textContent: status, className: `status ${status}` });
  const done = (Number(document.documentElement.dataset.updates) || 0) + 1;
  document.documentElement.dataset.updates = done;
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const onList = Boolean($("list")?.offsetParent), by = { j: 1, k: -1 }[event.key];
  if (by && onList && list.rows.length) moveChoice(by);
  else if (event.key === "Enter" && onList && event.target === document.body) openChosen();
  else if (event.key === "f" && onList) $("filters").elements.status.focus();
  else if (event.key === "/" && onList) $("filters").elements.text.focus();
  else if (event.key === "c" && document.querySelector(".colour")) nextColour();
  else if (event.key === " " && follow.toggle && event.target === document.body) follow.toggle();
  else if ((event.key === "ArrowLeft" || event.key === "ArrowRight") && event.target === document.body) document.querySelector(`[rel=${event.key === "ArrowLeft" ? "prev" : "next"}]`)?.click();
  else return;
  event.preventDefault();
}

function nextColour() {
  const buttons = [...document.querySelectorAll(".colour button")];
  buttons[(buttons.findIndex((one) => one.dataset.by === group.by) + 1) % buttons.length].click();
}

// The form for SQL: Ctrl-Enter runs, a column's button inserts its name, Stop ends the question.
function startSql(form) {
  const text = form.elements.q, stop = $("stop");
  text.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit(); });
  document.addEventListener("click", (event) => {
    const name = event.target.dataset?.insert;
    event.target.closest?.(".cell")?.classList.toggle("open");
    if (name) { text.setRangeText(name, text.selectionStart, text.selectionEnd, "end"); text.focus(); }
  });
  form.addEventListener("htmx:before:request", () => { stop.disabled = false; $("result").replaceChildren(el("p", { className: "dim" }, "computing …")); });
  form.addEventListener("htmx:finally:request", () => { stop.disabled = true; });
  stop.addEventListener("click", () => { htmx.trigger(form, "htmx:abort"); $("result").replaceChildren(el("p", { className: "dim" }, "stopped")); });
}

function start() {
  if (FILE && typeof DecompressionStream === "undefined") throw new Error("this browser cannot inflate: use one of 2023 or later");
  route();
  if ($("live")?.dataset.live === "true") follow();
  if ($("sql")) startSql($("sql"));
  for (const control of [$("smooth"), $("spread")]) control?.addEventListener("input", () => showCurves(showCurves.last, true));
  document.addEventListener("keydown", keys);
  addEventListener("hashchange", route);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => showCurves(showCurves.last, true));
  document.documentElement.dataset.ready = performance.now().toFixed(0);
}

function fail(error) {
  document.documentElement.dataset.failed = error.message;
  document.querySelector("main").prepend(el("p", { className: "note", role: "alert" }, `This page could not be shown: ${error.message}`));
}

addEventListener("unhandledrejection", (event) => fail(event.reason));
// After the first paint: curves take longer than the text above them.
document.addEventListener("DOMContentLoaded", () => setTimeout(() => { try { start(); } catch (error) { fail(error); } }));
