// One group: its prompt and its samples in columns, tokens coloured by the selected value. Only the visible tokens are created.

const FIRST_TOKENS = 1500, FAINTEST = 6; // nat: tokens of that surprise and more have the full colour
const group = { number: -1, by: "logprob", sample: -1 };

// `quiet` leaves the address and the timeline as they are: the user has not selected the group.
async function openGroup(g, { sample = -1, scroll = false, quiet = false } = {}) {
  Object.assign(group, { g, sample });
  choose(g, quiet);
  if (!quiet) {
    timeline.chosen = g;
    paint();
    history.replaceState(null, "", `#g${data.g_number[g]}`);
  }
  const chunk = data.g_chunk[g];
  const [text, token, words] = chunk === NOTHING ? [null, null, null] : await Promise.all([textsOf(chunk), tokensOf(chunk), vocabularyOf()]);
  if (group.g !== g) return; // another was asked for meanwhile
  const slot = data.g_slot[g];
  const [prompt, columns, completions] = text ? text[slot] : [null, null, []];
  const detail = token && data.g_detail[g] ? token : null;
  $("group").replaceChildren(...heading(g, prompt, columns, text), ...sampleCards(g, completions, detail, words, text, answerOf(columns)));
  if (scroll) $("samples").scrollIntoView();
  if (sample >= 0) $("group").querySelector(".marked")?.scrollIntoView({ block: "nearest" });
}

function heading(g, prompt, columns, text) {
  const groupNumber = data.g_number[g], status = data.statuses[data.g_status[g]], reason = data.reasons[groupNumber];
  const fact = (name, value) => el("span", {}, `${name} `, el("b", {}, value));
  const show = el("button", { type: "button", title: "Zoom the timeline to this group" }, "on the timeline");
  show.addEventListener("click", () => { showGroup(g); $("timeline").scrollIntoView(); });
  const nodes = [
    el("div", { className: "head" }, el("h3", {}, `Group ${groupNumber}`), el("span", { className: "badge" }, swatch(`var(--${status})`), ` ${status}`), show),
    el("div", { className: "facts" }, data.g_step[g] >= 0 ? fact("trained in step", String(data.g_step[g])) : null, fact("mean reward", number(data.g_reward[g])),
      fact("admitted", moment(data.g_created[g])), fact("outcome", moment(data.g_scored[g])), data.g_scorer[g] === NOTHING ? null : fact("scored by", data.workers[data.g_scorer[g]].name)),
  ];
  if (reason) nodes.push(el("p", { className: "note" }, reason));
  if (prompt === null) nodes.push(el("p", { className: "note" }, text === null ? leftOut("texts and tokens", groupNumber) : ""), el("pre", { className: "prompt" }, data.prompts[data.g_prompt[g]]));
  else {
    nodes.push(el("pre", { className: "prompt", tabIndex: 0, ariaLabel: "Prompt" }, prompt));
    const answer = answerOf(columns);
    if (answer !== null) nodes.push(el("p", { className: "answer" }, el("span", { className: "dim" }, "answer "), answer));
    if (columns && columns !== "{}") nodes.push(el("details", {}, el("summary", {}, "the row's other columns"), el("pre", {}, pretty(columns))));
  }
  return nodes;
}

function leftOut(what, groupNumber) {
  return `This page has no ${what} of group ${groupNumber}, to stay small. \`penstock report ${data.run} --html PATH --tokens N\` takes more along; \`penstock sql ${data.run} "select * from samples where \\"group\\" = ${groupNumber}"\` has them.`;
}

// The reference answer in the row, null if it has no such column.
function answerOf(columns) {
  try { return String(JSON.parse(columns ?? "{}").answer ?? "") || null; } catch { return null; }
}

function pretty(columns) {
  try { return JSON.stringify(JSON.parse(columns), null, 2); } catch { return columns; }
}

const SHORT_ANSWER = 80;

function sampleCards(g, completions, detail, words, text, answer) {
  if (data.first[g] === data.first[g + 1]) return [el("p", { className: "dim" }, "It has no samples.")];
  const cards = el("div", { className: "cards" }), open = new Set(), beside = answer !== null && answer.length <= SHORT_ANSWER ? answer : null;
  const one = (k) => card(g, data.first[g] + k, k, completions[k], detail, words, beside);
  const fold = (alike) => {
    const node = one(alike[0]), more = el("button", { type: "button", title: "Show each of them" }, `× ${alike.length}`);
    more.addEventListener("click", () => { open.add(alike[0]); fill(); });
    node.querySelector("h4").insertBefore(more, node.querySelector("h4 .n"));
    return [node];
  };
  const fill = () => cards.replaceChildren(...alikes(g, completions).flatMap((alike) => (alike.length === 1 || open.has(alike[0]) ? alike.map(one) : fold(alike))));
  const nodes = [];
  if (detail) nodes.push(colourChoice(g, fill));
  else if (text) nodes.push(el("p", { className: "note" }, leftOut("tokens", data.g_number[g])));
  if (detail && !words && data.no_texts) nodes.push(el("p", { className: "note" }, `Tokens are shown by their ids: ${data.no_texts}.`));
  fill();
  return [...nodes, cards];
}

// The samples of a group, by number, those with the same completion and reward together; a marked one stays alone.
function alikes(g, completions) {
  const byKey = new Map();
  for (let k = 0; k < data.first[g + 1] - data.first[g]; k++) {
    const s = data.first[g] + k, known = completions[k] !== null && completions[k] !== undefined && s !== group.sample;
    const key = known ? `${data.s_reward[s]} ${data.s_finish[s]} ${completions[k]}` : k;
    byKey.set(key, [...(byKey.get(key) ?? []), k]);
  }
  return [...byKey.values()];
}

function colourChoice(g, fill) {
  const names = { logprob: "behaviour logprob", advantage: "advantage", version: "policy version", none: "none" };
  const key = el("ul", { className: "legend", id: "token-legend" });
  const box = el("div", { className: "colour", role: "group", ariaLabel: "Colour tokens by" }, "tokens coloured by");
  const press = () => {
    for (const button of box.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.by === group.by));
    key.replaceChildren(...tokenLegend(g));
  };
  for (const [by, name] of Object.entries(names)) {
    const button = el("button", { type: "button", "data-by": by }, name);
    button.addEventListener("click", () => { group.by = by; press(); fill(); });
    box.append(button);
  }
  box.append(key);
  press();
  return box;
}

function tokenLegend(g) {
  const ramp = (from, to) => {
    const node = el("span", { className: "ramp", ariaHidden: "true" });
    node.style.background = `linear-gradient(90deg, ${from}, ${to})`;
    return node;
  };
  if (group.by === "logprob") return [el("li", {}, "0 nat (certain)", ramp(`rgba(var(--surprise), 0)`, `rgba(var(--surprise), .75)`), `−${FAINTEST} nat and less`)];
  if (group.by === "advantage") {
    const most = largest(g);
    return [el("li", {}, `−${number(most, 2)}`, ramp(`rgba(var(--low), .6)`, "transparent"), "0", ramp("transparent", `rgba(var(--high), .6)`), `+${number(most, 2)}`, data.advantage.why_not ? ` – not known: ${data.advantage.why_not}` : ` – ${data.advantage.name}, one for all tokens of a sample`)];
  }
  if (group.by === "version") return versionsOf(g).map((version) => el("li", {}, swatch(versionColour(version)), `version ${version}`));
  return [];
}

function largest(g) {
  let most = 0;
  for (let s = data.first[g]; s < data.first[g + 1]; s++) if (!Number.isNaN(data.s_advantage[s])) most = Math.max(most, Math.abs(data.s_advantage[s]));
  return most;
}

function versionsOf(g) {
  const versions = new Set();
  for (let s = data.first[g]; s < data.first[g + 1]; s++) for (let v = data.s_min[s]; v <= Math.min(data.s_max[s], data.s_min[s] + 12); v++) versions.add(v);
  return [...versions].sort((a, b) => a - b);
}

const VERSIONS = ["86, 180, 233", "230, 159, 0", "0, 158, 115", "204, 121, 167", "240, 228, 66", "0, 114, 178", "213, 94, 0"];
const versionColour = (version) => `rgba(${VERSIONS[((version % VERSIONS.length) + VERSIONS.length) % VERSIONS.length]}, .42)`;

function card(g, s, k, completion, detail, words, answer) {
  const reward = data.s_reward[s], advantage = data.s_advantage[s];
  const node = el("article", { className: `card${s === group.sample ? " marked" : ""}`, ariaLabel: `Sample ${data.s_number[s]}` },
    el("h4", {}, `sample ${data.s_number[s]}`, el("span", { className: "n" }, Number.isNaN(reward) ? "not scored" : `reward ${number(reward)}`)));
  const known = completion !== null && completion !== undefined;
  if (known && !(detail && words)) node.append(el("pre", { className: "text" }, ...marked(completion))); // without words ids follow the text
  if (detail) node.append(tokenText(g, s, k, detail, words));
  const facts = [
    ...(answer === null ? [] : [["answer", answer]]),
    ...data.reward_names.map((name, index) => [`${name}${data.reward_weights[index] === 1 ? "" : ` × ${data.reward_weights[index]}`}`, number(data[`s_component${index}`][s])]),
    ["advantage", Number.isNaN(advantage) ? "–" : (advantage > 0 ? "+" : "") + number(advantage)],
    ["length", `${count(data.s_tokens[s])} tokens`], ["finish", data.finishes[data.s_finish[s]]], ["versions", range(data.s_min[s], data.s_max[s])],
    ["generated by", data.workers[data.s_worker[s]].name], ["when", `${moment(data.s_start[s])} – ${moment(data.s_end[s])}`],
  ];
  node.append(el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
  return node;
}

// Text with the search matches marked.
function marked(text) {
  const wanted = $("f-text").value.toLowerCase(), low = text.toLowerCase(), parts = [];
  if (!wanted || low.length !== text.length) return [text];
  let from = 0;
  for (let at = low.indexOf(wanted); at >= 0; at = low.indexOf(wanted, from)) {
    parts.push(text.slice(from, at), el("mark", {}, text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  return [...parts, text.slice(from)];
}

function tokenText(g, s, k, detail, words) {
  const at = detail.groupAt[data.g_slot[g]] + k, from = detail.tokenAt[at], length = detail.length[at];
  const box = el("pre", { className: "text", tabIndex: 0, ariaLabel: `Tokens of sample ${data.s_number[s]}; arrow keys go from token to token` });
  const most = largest(g), tinted = (token, index) => tint(token, index, s, most, versionAt(detail, at, index), detail);
  const put = (until) => {
    for (let index = box.made ?? 0; index < until; index++) {
      const id = detail.id[from + index], text = words ? words.get(id) ?? `⟨${id}⟩` : `${id} `;
      const node = el("span", { className: words ? "" : "other" }, text === "" ? "∅" : text);
      node.dataset.index = index;
      if (detail.left_out?.[from + index]) node.classList.add("left-out");
      node.style.background = tinted(from + index, index);
      box.append(node);
    }
    box.made = until;
    markTokens(box);
  };
  put(Math.min(length, FIRST_TOKENS));
  if (!length) box.append(el("span", { className: "dim" }, "no token"));
  const say = (index, x, y) => showTip(tokenFacts(detail, at, from + index, index, words, s), x, y);
  box.addEventListener("pointermove", (event) => {
    const index = event.target.dataset.index;
    if (index === undefined) hideTip();
    else say(Number(index), event.clientX, event.clientY);
  });
  box.addEventListener("pointerleave", hideTip);
  box.addEventListener("blur", () => { box.querySelector(".at")?.classList.remove("at"); hideTip(); });
  box.addEventListener("keydown", (event) => stepTokens(event, box, say));
  if (length <= FIRST_TOKENS) return box;
  const more = el("button", { type: "button" }, `all ${count(length)} tokens`);
  more.addEventListener("click", () => { put(length); more.remove(); });
  return el("div", {}, box, more);
}

// Mark the tokens that contain a search match.
function markTokens(box) {
  const wanted = $("f-text").value.toLowerCase(), nodes = [...box.children];
  if (!wanted) return;
  const whole = nodes.map((node) => node.textContent).join("").toLowerCase();
  for (let at = whole.indexOf(wanted); at >= 0; at = whole.indexOf(wanted, at + wanted.length)) {
    let from = 0;
    for (const node of nodes) {
      const to = from + node.textContent.length;
      if (from < at + wanted.length && to > at) node.classList.add("hit");
      from = to;
    }
  }
}

function stepTokens(event, box, say) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by || !box.made) return;
  event.preventDefault();
  const at = box.querySelector(".at"), index = Math.min(box.made - 1, Math.max(0, (at ? Number(at.dataset.index) : -1) + by));
  at?.classList.remove("at");
  const now = box.querySelector(`[data-index="${index}"]`);
  now.classList.add("at");
  now.scrollIntoView({ block: "nearest" });
  const where = now.getBoundingClientRect();
  say(index, where.left, where.bottom - 10);
}

function versionAt(detail, at, index) {
  let version = detail.span_version[detail.spanAt[at]];
  for (let span = detail.spanAt[at]; span < detail.spanAt[at + 1] && detail.span_start[span] <= index; span++) version = detail.span_version[span];
  return version;
}

function tint(token, index, s, most, version, detail) {
  if (group.by === "version") return versionColour(version);
  if (group.by === "advantage") {
    const advantage = data.s_advantage[s];
    return !most || Number.isNaN(advantage) || detail.left_out?.[token] ? "" : `rgba(var(--${advantage < 0 ? "low" : "high"}), ${((0.6 * Math.abs(advantage)) / most).toFixed(3)})`;
  }
  const logprob = detail.logprob[token];
  if (group.by === "none" || logprob === NOTHING) return "";
  return `rgba(var(--surprise), ${(0.75 * Math.min(1, (logprob * data.logprob_step) / FAINTEST)).toFixed(3)})`;
}

function tokenFacts(detail, at, token, index, words, s) {
  const id = detail.id[token], logprob = detail.logprob[token];
  const lines = [`token ${index}: id ${id}${words ? `, ${JSON.stringify(words.get(id) ?? "")}` : ""}`];
  if (logprob === NOTHING) lines.push("not generated by the model: it has no logprob");
  else lines.push(`logprob ${(-logprob * data.logprob_step).toFixed(3)} nat, probability ${number(Math.exp(-logprob * data.logprob_step))}`);
  lines.push(`policy version ${versionAt(detail, at, index)}`);
  if (detail.left_out?.[token]) lines.push("left out of the loss");
  else if (!Number.isNaN(data.s_advantage[s])) lines.push(`advantage ${number(data.s_advantage[s])}`);
  return lines.join("\n");
}
