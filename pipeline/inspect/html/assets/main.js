// Builds the page: head, figures and flow, then the interactive parts. Ready means drawn and listening.

function buildHead() {
  const report = data.report, schedule = report.schedule ?? {};
  $("run").textContent = data.run;
  $("status").textContent = report.status;
  $("status").classList.add(report.status);
  $("verdict").append(...data.verdict.map((line) => el("p", {}, line)));
  const planned = report.steps_planned && report.steps_planned !== report.steps ? ` of ${count(report.steps_planned)}` : "";
  const loss = data.algorithm.loss ? ` · loss ${data.algorithm.loss}` : "";
  $("about").textContent = `${data.model ?? "no model"} · ${data.data ?? ""} · ${schedule.mode}, order ${schedule.order}, U = ${schedule.prompts_per_step}, K = ${schedule.samples_per_prompt}, S = ${schedule.steps_per_version ?? 1}, lag at most ${schedule.max_lag}${loss}`;
  $("made").textContent = `created ${utc(data.zero_ms)} · page made ${utc(data.made_ms)} by penstock ${data.penstock}`;
  if (report.reason && report.status !== "finished") $("notes").append(el("p", { className: "note" }, `${report.status}: ${report.reason}`));
  $("figures").append(...figures(report, planned));
  buildExamples(report.examples ?? []);
  for (const note of data.contents.left_out) $("notes").append(el("p", { className: "note" }, `${note} \`penstock report ${data.run} --html PATH --tokens N\` takes more along; penstock sql, penstock topics export and penstock topics show have all of it.`));
  $("everything").querySelector("pre").textContent = JSON.stringify(report, null, 2);
}

const WORK = { rollout: "rollout", scorer: "score", trainer: "train", evaluator: "eval" };

const utc = (when) => `${new Date(when).toISOString().slice(0, 16).replace("T", " ")} UTC`;

function figures(report, planned) {
  const change = (one) => (one && one.first !== null ? `${fixed(one.first)} → ${fixed(one.last)}` : "–");
  const evals = report.eval ?? [], last = evals[evals.length - 1];
  const share = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(0)} %`);
  const shown = [
    ["reward", change(report.reward), "all scored samples, first → last tenth of the steps"],
    ["reward trained", change(report.reward_trained), "samples that were trained"],
    last ? ["evaluation", fixed(last.greedy_reward ?? last.greedy_accuracy), `greedy, at version ${last.version}, ${share(last.greedy_accuracy)} solved; sampled ${fixed(last.sampled_reward ?? last.sampled_accuracy)}`] : null,
    ["steps", `${count(report.steps)}${planned}`, `${count(report.versions)} versions, ${count(report.groups.trained)} of ${count(report.groups.admitted)} groups trained`],
    ["generated", `${count(report.samples)} samples`, `${count(report.tokens)} tokens, ${number(report.length.admitted)} a sample`],
    ["throughput", report.throughput.tokens_per_s ? `${count(report.throughput.tokens_per_s)} tokens/s` : "–", report.throughput.samples_per_s ? `${number(report.throughput.samples_per_s)} samples/s` : ""],
    ["time", report.time.train_s ? lasting(1000 * report.time.train_s) : "–", `first sample to last step; ${report.time.wall_s ? lasting(1000 * report.time.wall_s) : "–"} in all`],
    ["trainer waited", share(report.time.trainer_waiting_ratio), `${number(report.time.trainer_wait_s)} s; computed ${number(report.time.trainer_compute_s)} s, other work ${number(report.time.trainer_other_s)} s`],
    ["lag", report.lag.mean === null ? "–" : `${fixed(report.lag.mean, 2)} mean`, report.lag.mean === null ? "" : `at most ${report.lag.max} versions; ESS ${fixed(report.ess.mean)}`],
    ["refused", count(report.dead_letters.total), `dead letters; ${count(report.duplicates)} duplicates ignored`],
    ["weights", (report.weights.digest ?? "none").slice(0, 10), `digest; ${count(report.weights.versions)} versions, ${bytes(report.weights.bytes)}`],
  ];
  return shown.filter((one) => one).map(([name, value, more]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, el("small", {}, more))));
}

function buildExamples(examples) {
  if (!examples.length) return;
  const answer = ({ completion, reward }) => [completion, reward === null ? "–" : number(reward)];
  const { before, after } = examples[0];
  const columns = [["prompt"], [`greedy, version ${before.version}`], ["reward", "n"], [`greedy, version ${after.version}`], ["reward", "n"]];
  $("examples").append(el("h3", {}, "Held-out prompts, before and after"), el("div", { className: "scroll", tabIndex: 0 }, table(columns, examples.map((one) => [one.prompt, ...answer(one.before), ...answer(one.after)]))));
}

function buildFlow() {
  const groups = data.report.groups, all = Math.max(1, groups.admitted);
  const rows = data.statuses.filter((status) => groups[status]).map((status) => [el("span", {}, swatch(`var(--${status})`), ` ${status}`), count(groups[status]), `${((100 * groups[status]) / all).toFixed(1)} %`, el("span", { className: "bar" }, bar(groups[status] / all, status))]);
  $("statuses").append(table([["status"], ["groups", "n"], ["share", "n"], ["", "bar"]], rows));
  $("waiting").append(spentTable(), el("p", { className: "dim small" }, "Each second of a worker counts for one use; they add up to its time, as in the report."));
  if (!data.report.dead_letters.total) return;
  const letters = data.letters.map(([kind, topic, partition, offset, worker, when, reason]) => [kind, `${topic}/${partition}/${offset}`, worker, `${((when - data.zero_ms) / 1000).toFixed(1)} s`, reason]);
  const more = data.report.dead_letters.total > letters.length ? `, the first ${letters.length} of them` : "";
  $("letters").append(el("h3", {}, `Dead letters: ${count(data.report.dead_letters.total)} unreadable records${more}`), el("div", { className: "scroll", tabIndex: 0 }, table([["kind"], ["record"], ["written by"], ["at", "n"], ["reason"]], letters)));
}

function spentTable() {
  const totals = new Map(), order = data.roles;
  for (const one of data.time_spent) totals.set(one.role, (totals.get(one.role) ?? 0) + one.seconds);
  const sorted = [...data.time_spent].sort((a, b) => order.indexOf(a.role) - order.indexOf(b.role) || b.seconds - a.seconds);
  let role = null;
  const rows = sorted.filter((one) => one.seconds / totals.get(one.role) >= 0.005).map((one) => {
    const share = one.seconds / totals.get(one.role), shown = one.role === role ? "" : one.role;
    role = one.role;
    return [shown, one.doing, one.kind === "work" ? "" : one.kind, lasting(1000 * one.seconds), `${(100 * share).toFixed(0)} %`, el("span", { className: "bar" }, bar(share, one.kind === "work" ? WORK[one.role] ?? "open" : one.kind))];
  });
  return table([["role"], ["time spent on"], ["counts as"], ["time", "n"], ["share", "n"], ["", "bar"]], rows);
}

function buildLegend() {
  const used = new Set(data.i_kind);
  const present = data.kinds.filter((kind, index) => used.has(index) || (index === 0 && data.s_start.length) || (index === 1 && data.g_scorer.some((one) => one !== NOTHING)));
  const words = { rollout: "rollout (fainter under odd versions)", load: "load weights", start: "start up" };
  $("legend").append(...present.map((kind) => el("li", {}, swatch(`var(--${kind})`), words[kind] ?? kind)));
  if (timeline.lanes.some((lane) => lane.strip.length)) $("legend").append(el("li", {}, "thin lines: what a worker said it did"));
}

function openFromAddress() {
  const match = /^#g(\d+)$/.exec(location.hash);
  if (match && data.byNumber.has(Number(match[1]))) openGroup(data.byNumber.get(Number(match[1])), { scroll: true });
}

async function main() {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser cannot inflate: use one of 2023 or later");
  await loadIndex();
  document.title = `${data.run} · Penstock`;
  buildHead();
  buildTimeline();
  buildLegend();
  startTimeline();
  buildCurves();
  buildFlow();
  startSamples();
  await buildPicked();
  draw();
  addEventListener("hashchange", openFromAddress);
  openFromAddress();
  requestAnimationFrame(() => setTimeout(() => { document.documentElement.dataset.ready = performance.now().toFixed(0); }));
}

main().catch((error) => {
  $("trouble").textContent = `This page could not be drawn: ${error.message}`;
  $("trouble").hidden = false;
  document.documentElement.dataset.failed = error.message;
});
