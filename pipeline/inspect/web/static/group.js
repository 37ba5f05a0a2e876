// One group: its prompt and its samples in columns, tokens coloured by the chosen value.

const FIRST_TOKENS = 1500, FAINTEST = 6; // nat: tokens of that surprise and more have the full colour
const SHOWN_TEXT = 20000;
const COLOURS = { logprob: "logprob", advantage: "advantage", version: "version", none: "none" };
const group = { shown: null, box: null, by: "logprob", sample: null, marked: "" };

// Show a group in a box; `link` leads to its own page, `marked` is a text to mark, `sample` the number of a sample to point out.
async function showGroup(box, groupNumber, { sample = null, link = false, marked = "" } = {}) {
  const mine = (showGroup.newest = Symbol());
  try {
    const loaded = await source.group(groupNumber);
    if (showGroup.newest !== mine) return; // another one was requested meanwhile
    if (loaded.group === undefined) throw new Error(`there is no group ${groupNumber}`);
    Object.assign(group, { shown: loaded, box, sample, marked: marked.toLowerCase() });
    const cards = el("div", { className: "cards samples" });
    box.replaceChildren(...heading(loaded, link), ...(loaded.samples.length ? [colourChoice(cards)] : [el("p", { className: "dim" }, "No sample of it is scored.")]), cards);
    fillCards(cards);
    box.querySelector(".marked")?.scrollIntoView({ block: "nearest" });
  } catch (error) {
    if (showGroup.newest === mine) box.replaceChildren(el("p", { className: "note", role: "alert" }, error.message));
  }
}

function heading(loaded, link) {
  const fact = (name, value) => el("span", {}, `${name} `, el("b", {}, value));
  const rewards = loaded.samples.map((sample) => sample.reward).filter((reward) => reward !== null);
  const mean = rewards.length ? rewards.reduce((a, b) => a + b) / rewards.length : null;
  const step = loaded.step === null || loaded.step === undefined ? null : el("a", { href: to(`samples?step=${loaded.step}`) }, `step ${loaded.step}`);
  const title = link ? el("a", { href: to(`g/${loaded.group}`) }, `Group ${loaded.group}`) : `Group ${loaded.group}`;
  const at = el("a", { href: to(`timeline?group=${loaded.group}`) }, "on the timeline");
  const near = link ? [] : [el("a", { href: to(`g/${Math.max(0, loaded.group - 1)}`), rel: "prev" }, "◂ previous"), el("a", { href: to(`g/${loaded.group + 1}`), rel: "next" }, "next ▸")];
  const nodes = [
    el("div", { className: "head" }, el("h2", {}, title), el("span", { className: `group-status ${loaded.status}` }, loaded.status), step, at, el("span", { className: "near" }, ...near)),
    el("div", { className: "facts" }, fact("mean reward", number(mean)), loaded.row === undefined ? null : el("span", {}, el("a", { href: to(`samples?row=${loaded.row}&sort=oldest`), title: "All groups of this prompt" }, `row ${loaded.row}`), `, epoch ${loaded.epoch}`), loaded.scored_ms && loaded.created_ms ? fact("admitted to scored", lasting(loaded.scored_ms - loaded.created_ms)) : null),
  ];
  if (loaded.reason) nodes.push(el("p", { className: "note" }, visible(loaded.reason)));
  if (loaded.left_out) nodes.push(el("p", { className: "note" }, `This page has no ${loaded.left_out} of this group, to stay small; \`penstock report ${loaded.run} --html PATH --tokens N\` takes more along.`));
  if (loaded.no_texts && !loaded.words) nodes.push(el("p", { className: "note" }, `Tokens are shown by their ids: ${loaded.no_texts}.`));
  nodes.push(el("pre", { className: "prompt", tabIndex: 0, ariaLabel: "Prompt" }, visible(loaded.prompt ?? "")));
  const reference = referenceOf(loaded.columns);
  if (reference !== null) nodes.push(el("p", { className: "answer" }, el("span", { className: "dim" }, "reference answer "), el("b", {}, visible(reference))));
  if (loaded.columns && loaded.columns !== "{}") nodes.push(el("details", {}, el("summary", {}, "columns of the row"), el("pre", { tabIndex: 0 }, visible(pretty(loaded.columns)))));
  return nodes;
}

function referenceOf(columns) {
  try { return String(JSON.parse(columns ?? "{}").answer ?? "") || null; } catch { return null; }
}

function pretty(columns) {
  try { return JSON.stringify(JSON.parse(columns), null, 2); } catch { return columns; }
}

// Cards in the order of rewards, equal completions as one card until it is opened.
function fillCards(cards, open = new Set()) {
  const alike = new Map(), reference = referenceOf(group.shown.columns);
  for (const sample of group.shown.samples) {
    const key = sample.completion === null || sample.sample === group.sample ? sample.sample : `${sample.reward} ${sample.finish} ${sample.completion}`;
    alike.set(key, [...(alike.get(key) ?? []), sample]);
  }
  const ordered = [...alike.entries()].sort(([, [a]], [, [b]]) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || a.sample - b.sample);
  cards.replaceChildren(...ordered.flatMap(([key, samples]) => {
    if (samples.length === 1 || open.has(key)) return samples.map((sample) => sampleCard(sample, reference));
    const more = el("button", { type: "button", title: "Show each of them" }, `× ${samples.length}`);
    more.addEventListener("click", () => fillCards(cards, open.add(key)));
    return [sampleCard(samples[0], reference, more)];
  }));
}

function sampleCard(sample, reference, more = null) {
  const right = reference !== null && sample.completion?.trim() === reference.trim() ? " ✓" : "", cut = sample.finish === "length" ? el("span", { className: "warn" }, "⚠ truncated") : null;
  const facts = [`adv ${sample.advantage === null ? "–" : (sample.advantage > 0 ? "+" : "") + number(sample.advantage)}`, `${count(sample.tokens)} tokens`, sample.finish, `v${range(...sample.versions)}`];
  const details = [...sample.components.map((value, index) => [`${group.shown.reward_names[index]} × ${group.shown.reward_weights[index]}`, number(value)]), ["worker", sample.worker], ["generated in", lasting(sample.times[1] - sample.times[0])], ...(sample.turns ? [["turns", sample.turns.map(([by]) => by).join(", ")]] : []), ...(sample.error ? [["error", sample.error]] : [])];
  return el("article", { className: `card${sample.sample === group.sample ? " marked" : ""}`, ariaLabel: `Sample ${sample.sample}` },
    el("h3", {}, `#${sample.sample}`, more, el("b", {}, `${sample.reward === null ? "not scored" : number(sample.reward)}${right}`), cut, el("span", { className: "dim" }, facts.join(" · "))),
    sample.detail && group.shown.words ? tokenText(sample) : plainText(sample),
    sample.detail && !group.shown.words ? tokenText(sample) : null,
    el("details", {}, el("summary", {}, "rewards, worker, times"), el("dl", {}, ...details.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, visible(value))]))));
}

function plainText(sample) {
  if (sample.completion === null) return el("p", { className: "dim" }, "no text");
  const text = visible(sample.completion), box = el("pre", { className: "text", tabIndex: 0, ariaLabel: `Completion of sample ${sample.sample}` }, ...marked(text.slice(0, SHOWN_TEXT)));
  const nodes = [box];
  if (text.length > SHOWN_TEXT) nodes.push(button(`all ${count(text.length)} characters`, (made) => { box.replaceChildren(...marked(text)); made.remove(); }));
  if (!sample.detail && !group.shown.left_out) nodes.push(button("tokens", async (made) => {
    const loaded = await source.group(group.shown.group, sample.sample);
    Object.assign(group.shown.words ?? {}, loaded.words);
    made.parentElement.replaceWith(tokenText(loaded.samples.find(({ detail }) => detail)));
  }));
  return el("div", {}, ...nodes);
}

function button(text, act) {
  const made = el("button", { type: "button" }, text);
  made.addEventListener("click", () => act(made));
  return made;
}

// Text with the search matches marked.
function marked(text) {
  const low = text.toLowerCase(), parts = [];
  if (!group.marked || low.length !== text.length) return [text];
  let from = 0;
  for (let at = low.indexOf(group.marked); at >= 0; at = low.indexOf(group.marked, from)) {
    parts.push(text.slice(from, at), el("mark", {}, text.slice(at, at + group.marked.length)));
    from = at + group.marked.length;
  }
  return [...parts, text.slice(from)];
}

function colourChoice(cards) {
  const key = el("span", { className: "legend", id: "token-legend" }), box = el("div", { className: "colour", role: "group", ariaLabel: "Colour of tokens" }, "colour ");
  const press = () => {
    for (const made of box.querySelectorAll("button")) made.setAttribute("aria-pressed", String(made.dataset.by === group.by));
    key.replaceChildren(...tokenLegend());
  };
  for (const [by, name] of Object.entries(COLOURS)) {
    const made = button(name, () => { group.by = by; press(); for (const text of cards.querySelectorAll(".tokens")) text.tint(); });
    made.dataset.by = by;
    box.append(made);
  }
  box.append(key);
  press();
  return box;
}

function tokenLegend() {
  const ramp = (name) => el("i", { className: `ramp ${name}`, ariaHidden: "true" });
  if (group.by === "logprob") return ["0 ", ramp("surprise"), ` −${FAINTEST} nat`];
  if (group.by === "advantage") return [`−${number(largest(), 2)} `, ramp("signed"), ` +${number(largest(), 2)}, ${group.shown.advantage?.why_not ?? group.shown.advantage?.name ?? ""}`];
  if (group.by === "version") return versions().map((version) => el("span", {}, el("i", { className: `swatch v${version % 6}` }), ` ${version} `));
  return [];
}

const largest = () => Math.max(0, ...group.shown.samples.map((sample) => Math.abs(sample.advantage ?? 0)));
const versions = () => [...new Set(group.shown.samples.flatMap((sample) => sample.detail?.spans.map(([, version]) => version) ?? sample.versions))].sort((a, b) => a - b).slice(0, 24);

function versionAt(detail, index) {
  return detail.spans.reduce((version, [start, own]) => (start <= index ? own : version), detail.spans[0]?.[1]);
}

function tokenText(sample) {
  const { detail } = sample, { words } = group.shown, masked = new Set(detail.masked), length = detail.ids.length;
  const box = el("pre", { className: "text tokens", tabIndex: 0, ariaLabel: `Tokens of sample ${sample.sample}; arrow keys go from token to token` });
  const put = (until) => {
    for (let index = box.childElementCount; index < until; index++) {
      const id = detail.ids[index], text = words ? words[id] ?? `⟨${id}⟩` : `${id} `;
      box.append(el("span", { className: masked.has(index) ? "masked" : "", "data-index": index }, text === "" ? "∅" : visible(text)));
    }
    box.tint();
  };
  box.tint = () => { for (const node of box.children) if (node.dataset.index !== undefined) tint(node, sample, Number(node.dataset.index)); };
  put(Math.min(length, FIRST_TOKENS));
  if (!length) box.append(el("span", { className: "dim" }, "no token"));
  const say = (index, x, y) => showTip(tokenFacts(sample, index), x, y);
  box.addEventListener("pointermove", (event) => {
    if (event.target.dataset.index === undefined) hideTip();
    else say(Number(event.target.dataset.index), event.clientX, event.clientY);
  });
  box.addEventListener("pointerleave", hideTip);
  box.addEventListener("blur", () => { box.querySelector(".at")?.classList.remove("at"); hideTip(); });
  box.addEventListener("keydown", (event) => stepTokens(event, box, say));
  markTokens(box);
  return length <= FIRST_TOKENS ? box : el("div", {}, box, button(`all ${count(length)} tokens`, (made) => { put(length); made.remove(); }));
}

function stepTokens(event, box, say) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key], nodes = box.querySelectorAll("[data-index]");
  if (!by || !nodes.length) return;
  event.preventDefault();
  const at = box.querySelector(".at"), index = Math.min(nodes.length - 1, Math.max(0, (at ? Number(at.dataset.index) : -1) + by));
  at?.classList.remove("at");
  nodes[index].classList.add("at");
  nodes[index].scrollIntoView({ block: "nearest" });
  const where = nodes[index].getBoundingClientRect();
  say(index, where.left, where.bottom - 10);
}

// Mark the tokens that contain a search match.
function markTokens(box) {
  const nodes = [...box.children], whole = nodes.map((node) => node.textContent).join("").toLowerCase();
  for (let at = group.marked ? whole.indexOf(group.marked) : -1; at >= 0; at = whole.indexOf(group.marked, at + group.marked.length)) {
    let from = 0;
    for (const node of nodes) {
      const until = from + node.textContent.length;
      if (from < at + group.marked.length && until > at) node.classList.add("hit");
      from = until;
    }
  }
}

function tint(node, sample, index) {
  const { detail, advantage } = sample, most = largest();
  node.style.removeProperty("--strength");
  node.classList.remove("surprise", "low", "high", "v0", "v1", "v2", "v3", "v4", "v5");
  if (group.by === "version") node.classList.add(`v${versionAt(detail, index) % 6}`);
  else if (group.by === "advantage" && most && advantage !== null && !node.classList.contains("masked")) {
    node.classList.add(advantage < 0 ? "low" : "high");
    node.style.setProperty("--strength", (Math.abs(advantage) / most).toFixed(3));
  } else if (group.by === "logprob" && detail.logprobs[index] !== null) {
    node.classList.add("surprise");
    node.style.setProperty("--strength", Math.min(1, -detail.logprobs[index] / FAINTEST).toFixed(3));
  }
}

function tokenFacts(sample, index) {
  const { detail } = sample, id = detail.ids[index], logprob = detail.logprobs[index];
  const lines = [`token ${index}: id ${id}${group.shown.words ? `, ${JSON.stringify(group.shown.words[id] ?? "")}` : ""}`];
  lines.push(logprob === null ? "not generated by the policy: it has no logprob" : `logprob ${logprob.toFixed(3)} nat, probability ${number(Math.exp(logprob))}`);
  lines.push(`policy version ${versionAt(detail, index)}`);
  if (detail.masked.includes(index)) lines.push("not in the loss");
  else if (sample.advantage !== null) lines.push(`advantage ${number(sample.advantage)}`);
  return lines.join("\n");
}
