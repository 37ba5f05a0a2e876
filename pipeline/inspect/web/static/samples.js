// The list of groups and its reading pane. The filters are the address; rows are read a page at a time as the list is scrolled.

const list = { rows: [], next: null, searched: 0, chosen: -1, reading: null };
const NAMES = ["status", "reward", "step", "version", "finish", "worker", "row", "text", "sort"];

function startSamples() {
  const form = $("filters"), box = $("list");
  let soon = 0;
  const changed = () => { clearTimeout(soon); soon = setTimeout(() => { remember(filters()); readGroups(); }, 200); };
  form.addEventListener("input", changed);
  form.addEventListener("reset", () => setTimeout(changed));
  form.addEventListener("submit", (event) => { event.preventDefault(); changed(); });
  box.addEventListener("scroll", () => { if (box.scrollTop + box.clientHeight > box.scrollHeight - 400) readGroups(true); }, { passive: true });
  box.addEventListener("click", (event) => { const row = event.target.closest("[data-at]"); if (row) chooseRow(Number(row.dataset.at)); });
  box.addEventListener("dblclick", () => openChosen());
  box.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Enter") openChosen();
    else if (by !== undefined && list.rows.length) { event.preventDefault(); moveChoice(by); }
  });
}

function showSamples(params) {
  for (const name of NAMES) if ($("filters").elements[name]) $("filters").elements[name].value = params.get(name) ?? "";
  readGroups();
}

function filters() {
  const params = new URLSearchParams();
  for (const name of NAMES) if ($("filters").elements[name]?.value) params.set(name, $("filters").elements[name].value);
  return params;
}

// Read the first page of the list, or with `more` the next one.
async function readGroups(more = false) {
  if (more && (list.next === null || list.reading)) return;
  list.reading?.abort();
  const mine = (list.reading = new AbortController()), params = filters();
  try {
    const page = await source.groups(params, more ? list.next : "", mine.signal);
    if (mine.signal.aborted) return;
    if (!more) { Object.assign(list, { rows: [], searched: 0 }); $("list").replaceChildren(); $("list").scrollTop = 0; }
    const from = list.rows.length;
    list.rows.push(...page.rows);
    Object.assign(list, { next: page.next, searched: list.searched + page.searched });
    $("list").append(...page.rows.map((row, index) => groupRow(row, from + index)));
    if (!list.rows.length) $("list").append(el("p", { className: "dim row" }, page.next === null ? "No group is like that." : "None yet; scroll to search on."));
    $("matching").textContent = page.matched === null ? `${count(list.rows.length)} matching, ${count(list.searched)} of ${count(page.total)} groups searched` : `${count(page.matched)} of ${count(page.total)} groups`;
    $("matching").dataset.shown = page.matched ?? list.rows.length;
    if (!more && list.rows.length) chooseRow(0, true);
    if (!more) showSpread(params, mine.signal).catch((error) => { if (error.name !== "AbortError") throw error; });
    if (page.next !== null && page.matched === null && list.rows.length < 20) setTimeout(() => readGroups(true));
  } catch (error) {
    if (error.name !== "AbortError") $("matching").textContent = error.message;
  } finally {
    if (list.reading === mine) list.reading = null;
  }
}

function groupRow(row, at) {
  const cell = (text, name = "") => el("span", { className: name }, text);
  return el("div", { className: "row", role: "option", id: `row-${at}`, "data-at": at, "aria-selected": "false" },
    cell(String(row.group), "n"), cell(row.status, `group-status ${row.status}`), cell(row.step === null ? "–" : String(row.step), "n"), cell(row.reward === null ? "–" : fixed(row.reward), "n"), bars(row.rewards), cell(visible(row.prompt).replace(/\s+/g, " ")));
}

// The rewards of a group's samples, least first, as bars.
function bars(rewards) {
  const known = rewards.filter((reward) => reward !== null).sort((a, b) => a - b), low = Math.min(0, ...known), high = Math.max(1, ...known);
  return el("span", { className: "bars", title: known.map((reward) => number(reward)).join(", ") }, picture(known.map((reward) => (reward - low) / (high - low)), 0.6));
}

// Shares of 1 as bars; the least height is that of 0.
function picture(shares, least = 0) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg"), path = document.createElementNS(made.namespaceURI, "path");
  path.setAttribute("d", shares.map((share, at) => `M${at} 8h.8v${-least - (8 - least) * share}h-.8z`).join(""));
  made.setAttribute("viewBox", `0 0 ${Math.max(8, shares.length)} 8`);
  made.setAttribute("preserveAspectRatio", "none");
  made.append(path);
  return made;
}

// How mean rewards and lengths of the listed groups are spread; a click on a reward filters by it.
async function showSpread(params, signal) {
  const box = $("spread"), links = $("downloads")?.querySelectorAll("a") ?? [];
  for (const link of links) link.search = params;
  box.hidden = ["finish", "worker", "text"].some((name) => params.has(name)); // only payloads have these
  if (box.hidden) return;
  const { reward, length } = await source.histograms(params, signal), shown = [["mean reward", reward], ["tokens a sample", length]].filter(([, { counts }]) => counts.some(Boolean));
  box.replaceChildren(...shown.map(([name, { counts, edges }]) => {
    const most = Math.max(...counts), histogram = picture(counts.map((count) => (count ? 0.06 + 0.94 * count / most : 0)));
    histogram.addEventListener("pointermove", (event) => { const at = bin(event, counts); showTip(`${count(counts[at])} groups with ${name} ${number(edges[at])} to ${number(edges[at + 1])}`, event.clientX, event.clientY); });
    histogram.addEventListener("pointerleave", hideTip);
    if (name === "mean reward") histogram.addEventListener("click", (event) => { const at = bin(event, counts), form = $("filters"); form.elements.reward.value = `${edges[at].toPrecision(4)}..${edges[at + 1].toPrecision(4)}`; form.dispatchEvent(new Event("input")); });
    return el("span", { "data-filter": name, role: "img", ariaLabel: `${name}: most groups between ${number(edges[counts.indexOf(most)])} and ${number(edges[counts.indexOf(most) + 1])}` }, `${name} ${number(edges[0])}`, el("span", { className: "bars" }, histogram), number(edges[edges.length - 1]));
  }));
}

const bin = (event, counts) => Math.min(counts.length - 1, Math.max(0, Math.floor((event.offsetX / event.currentTarget.clientWidth) * counts.length)));

function moveChoice(by) {
  chooseRow(Math.min(list.rows.length - 1, Math.max(0, list.chosen + by)));
  if (list.chosen > list.rows.length - 10) readGroups(true);
}

async function chooseRow(at, quiet = false) {
  $(`row-${list.chosen}`)?.setAttribute("aria-selected", "false");
  list.chosen = at;
  const row = $(`row-${at}`), chosen = list.rows[at];
  row.setAttribute("aria-selected", "true");
  $("list").setAttribute("aria-activedescendant", row.id);
  if (!quiet) row.scrollIntoView({ block: "nearest" });
  await showGroup($("pane"), chosen.group, { link: true, marked: $("filters").elements.text.value });
}

function openChosen() {
  if (list.rows[list.chosen]) location.href = to(`g/${list.rows[list.chosen].group}`);
}
