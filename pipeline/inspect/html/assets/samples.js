// The list of groups: filters, search, and rows that are created when they are visible.

const ROW = 26;
const list = { shown: [], chosen: -1, search: 0 };

function startSamples() {
  const statuses = [...new Set(data.g_status)].sort();
  $("f-status").append(el("option", { value: "" }, "any"), ...statuses.map((status) => el("option", { value: status }, data.statuses[status])));
  const drawers = [...new Set(data.s_worker)].sort((a, b) => a - b);
  $("f-worker").append(el("option", { value: "" }, "any"), ...drawers.map((one) => el("option", { value: one }, data.workers[one].name)));
  let soon = 0;
  $("filters").addEventListener("input", () => { clearTimeout(soon); soon = setTimeout(filter, 120); });
  $("filters").addEventListener("reset", () => setTimeout(filter));
  $("filters").addEventListener("submit", (event) => { event.preventDefault(); filter(); });
  $("list").addEventListener("scroll", rows, { passive: true });
  $("list").addEventListener("click", (event) => {
    const row = event.target.closest("[data-g]");
    if (row) openGroup(Number(row.dataset.g));
  });
  $("list").addEventListener("keydown", move);
  new ResizeObserver(rows).observe($("list"));
  list.shown = ordered(Array.from(data.g_number, (_, g) => g));
  rows();
  tell("");
  const newest = list.shown.find((g) => data.g_step[g] >= 0) ?? list.shown[0];
  if (newest !== undefined) openGroup(newest, { quiet: true });
}

// Groups in the selected order; groups without a reward come last.
function ordered(groups) {
  const order = $("f-order").value, sign = order === "best" ? -1 : 1;
  if (order === "oldest") return groups.sort((a, b) => a - b);
  if (order === "newest") return groups.sort((a, b) => b - a);
  const key = (g) => (Number.isNaN(data.g_reward[g]) ? Infinity : sign * data.g_reward[g]);
  return groups.sort((a, b) => key(a) - key(b) || b - a);
}

function move(event) {
  const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -Infinity, End: Infinity }[event.key];
  if (by === undefined || !list.shown.length) return;
  event.preventDefault();
  const at = list.shown.indexOf(list.chosen);
  openGroup(list.shown[Math.min(list.shown.length - 1, Math.max(0, at + by))]);
}

function limits(name) {
  const low = $(`f-${name}-min`).value, high = $(`f-${name}-max`).value;
  return low === "" && high === "" ? null : [low === "" ? -Infinity : Number(low), high === "" ? Infinity : Number(high)];
}

// True if a group passes the filters other than the text search.
function asked() {
  const status = $("f-status").value, worker = $("f-worker").value, reward = limits("reward"), version = limits("version"), step = limits("step");
  const anySample = (g, fits) => {
    for (let s = data.first[g]; s < data.first[g + 1]; s++) if (fits(s)) return true;
    return false;
  };
  return (g) =>
    (status === "" || data.g_status[g] === Number(status)) &&
    (!step || (data.g_step[g] >= 0 && data.g_step[g] >= step[0] && data.g_step[g] <= step[1])) &&
    (!reward || (data.g_reward[g] >= reward[0] - 1e-6 && data.g_reward[g] <= reward[1] + 1e-6)) &&
    (!version || anySample(g, (s) => data.s_max[s] >= version[0] && data.s_min[s] <= version[1])) &&
    (worker === "" || anySample(g, (s) => data.s_worker[s] === Number(worker)));
}

async function filter() {
  const mine = ++list.search, fits = asked(), wanted = $("f-text").value.toLowerCase();
  const all = Array.from(data.g_number, (_, g) => g).filter(fits);
  if (!wanted) {
    put(ordered(all));
    return tell("");
  }
  const chunks = Map.groupBy ? Map.groupBy(all, (g) => data.g_chunk[g]) : grouped(all);
  const groups = [];
  let unread = 0, done = 0;
  for (const [chunk, members] of chunks) {
    const some = chunk === NOTHING ? null : await textsOf(chunk);
    if (mine !== list.search) return; // a newer search has started
    if (!some) unread += members.length;
    groups.push(...members.filter((g) => (some ? has(some[data.g_slot[g]], wanted) : data.prompts[data.g_prompt[g]].toLowerCase().includes(wanted))));
    if (++done % 4 === 0) tell(`searching, ${Math.round((100 * done) / chunks.size)} %`);
  }
  put(ordered(groups));
  tell(unread ? `of ${count(unread)} older groups only the prompt's beginning was searched` : "");
}

function grouped(all) {
  const byChunk = new Map();
  for (const g of all) byChunk.set(data.g_chunk[g], [...(byChunk.get(data.g_chunk[g]) ?? []), g]);
  return byChunk;
}

function has([prompt, , completions], wanted) {
  return prompt.toLowerCase().includes(wanted) || completions.some((text) => text !== null && text.toLowerCase().includes(wanted));
}

function put(shown) {
  list.shown = shown;
  $("list").scrollTop = 0;
  rows();
}

function tell(more) {
  const of = data.contents.groups;
  $("found").textContent = `${count(list.shown.length)} of ${count(of[1])} groups${more ? ` · ${more}` : ""}`;
  $("found").dataset.shown = list.shown.length;
}

// Create the visible rows.
function rows() {
  const box = $("list"), first = Math.max(0, Math.floor(box.scrollTop / ROW) - 6), last = Math.min(list.shown.length, first + Math.ceil(box.clientHeight / ROW) + 14);
  $("rows").style.height = `${list.shown.length * ROW}px`;
  $("rows").replaceChildren(...list.shown.slice(first, last).map((g, index) => row(g, first + index)));
  if (!list.shown.length) $("rows").append(el("p", { className: "dim row" }, "no group is like that"));
}

function row(g, index) {
  const status = data.statuses[data.g_status[g]], first = data.first[g], last = data.first[g + 1];
  let low = Infinity, high = -Infinity;
  for (let s = first; s < last; s++) {
    low = Math.min(low, data.s_min[s]);
    high = Math.max(high, data.s_max[s]);
  }
  const node = el("div", { className: "row", role: "option", id: `row-${g}`, "data-g": g, "aria-selected": String(g === list.chosen), "aria-posinset": index + 1, "aria-setsize": list.shown.length },
    el("span", { className: "n" }, String(data.g_number[g])), el("span", {}, swatch(`var(--${status})`), status),
    el("span", { className: "n" }, data.g_step[g] < 0 ? "–" : String(data.g_step[g])), el("span", { className: "n" }, fixed(data.g_reward[g])),
    el("span", { className: "n" }, first === last ? "–" : range(low, high)), el("span", {}, oneLine(data.prompts[data.g_prompt[g]])));
  node.style.top = `${index * ROW}px`;
  return node;
}

const oneLine = (text) => text.replace(/\s+/g, " ");

function choose(g, quiet) {
  list.chosen = g;
  const at = list.shown.indexOf(g), box = $("list");
  if (!quiet && at >= 0 && (at * ROW < box.scrollTop || (at + 1) * ROW > box.scrollTop + box.clientHeight)) box.scrollTop = Math.max(0, at * ROW - box.clientHeight / 3);
  rows();
  if (at >= 0) box.setAttribute("aria-activedescendant", `row-${g}`);
}
