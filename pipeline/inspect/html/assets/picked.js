// The best, the median and the worst sample of the newest step, shown before any figure.

const PICKS = ["best", "median", "worst"];

// Samples with a reward of the newest trained groups, or, before the first step, of the newest ones that were scored.
function newestSamples() {
  const newest = data.g_step.reduce((most, step) => Math.max(most, step), -1), samples = [];
  for (let g = data.g_number.length - 1; g >= 0 && (newest >= 0 || samples.length < 64); g--) {
    if (newest >= 0 && data.g_step[g] !== newest) continue;
    for (let s = data.first[g]; s < data.first[g + 1]; s++) if (!Number.isNaN(data.s_reward[s])) samples.push({ g, s, k: s - data.first[g] });
  }
  return { newest, samples: samples.sort((a, b) => data.s_reward[b.s] - data.s_reward[a.s]) };
}

async function buildPicked() {
  const { newest, samples } = newestSamples();
  if (!samples.length) return;
  const indices = [0, samples.length >> 1, samples.length - 1].filter((index, at, all) => all.indexOf(index) === at);
  const cards = await Promise.all(indices.map((index, at) => pickedCard(indices.length === PICKS.length ? PICKS[at] : "", samples[index])));
  $("picked").append(el("h2", {}, newest >= 0 ? `Samples of step ${newest}` : "Newest samples"), el("div", { className: "cards" }, ...cards));
  $("picked").hidden = false;
  for (const prompt of $("picked").querySelectorAll(".prompt")) prompt.scrollTop = prompt.scrollHeight; // a question stands at its prompt's end
}

async function pickedCard(which, { g, s, k }) {
  const chunk = data.g_chunk[g], text = chunk === NOTHING ? null : (await textsOf(chunk))?.[data.g_slot[g]];
  const [prompt, columns, completions] = text ?? [data.prompts[data.g_prompt[g]], "{}", []];
  const open = el("button", { type: "button" }, `group ${data.g_number[g]}`);
  open.addEventListener("click", () => openGroup(g, { sample: s, scroll: true }));
  const answer = answerOf(columns), completion = completions[k];
  return el("article", { className: "card", ariaLabel: `${which} sample` },
    el("h4", {}, which, el("span", {}, `reward ${number(data.s_reward[s])}`), el("span", { className: "n" }, open)),
    el("pre", { className: "prompt", tabIndex: 0, ariaLabel: "Prompt" }, prompt),
    answer === null ? null : el("p", { className: "answer" }, el("span", { className: "dim" }, "answer "), answer),
    el("pre", { className: "text", tabIndex: 0, ariaLabel: "Completion" }, completion ?? "(this page has no text of it, to stay small)"));
}
