// Curves over optimizer steps. Points are not interpolated; of very many, the extremes of each range are drawn.

const MOST_POINTS = 700, WIDE = 350, HIGH = 136, EDGE = { left: 50, right: 8, top: 8, bottom: 18 };

const STILL = 1e-6; // what never leaves this band is rounding, or constant

function buildCurves() {
  const box = $("charts"), used = new Set(), still = [];
  const byStep = (name, label, short = label) => {
    used.add(name);
    return { label, short, points: data[`m_${name}`] ? Array.from(data.m_step, (step, index) => [step, data[`m_${name}`][index]]) : [] };
  };
  const statuses = data.status_shares.length < 2 ? [] : data.statuses.map((status) => ({ label: status, colour: `var(--${status})`, points: data.status_shares.filter((row) => row[1][status] !== undefined).map(([step, shares]) => [step, shares[status]]) }));
  const components = data.reward_names.length > 1 ? data.component_means.map((points, index) => ({ label: data.reward_names[index], points })) : [];
  const charts = [
    ["Reward", "mean", [{ label: "all scored samples, by version", short: "all", points: data.rewards.map(([step, , mean]) => [step, mean]) }, byStep("reward_trained", "trained")]],
    ["Final status of the groups", "share, by version", statuses],
    ["Reward by function", "mean of the trained, unweighted", components],
    ["Evaluation", `${data.eval_measure}, held-out`, [{ label: "greedy", points: data.evals.map(([step, , greedy]) => [step, greedy]) }, { label: "sampled", points: data.evals.map(([step, , , sampled]) => [step, sampled]) }], { dots: true }],
    ["Spread of rewards", "standard deviation", [byStep("reward_std", "all samples", "all"), byStep("reward_group_std", "within a group", "group")]],
    ["Entropy", "nat a token", [byStep("entropy", "entropy")]],
    ["Completion length", "tokens, mean", [byStep("completion_tokens_mean", "mean")]],
    ["Truncated", "share of the samples", [byStep("truncated_share", "truncated")]],
    ["Lag", "versions", [byStep("lag_mean", "mean"), byStep("lag_max", "max")]],
    ["Effective sample size", "1 is on-policy", [byStep("ess", "ESS")]],
    ["KL", "nat a token, k3", [byStep("kl_behaviour_k3", "behaviour to current", "behaviour"), byStep("kl_reference", "to reference", "reference")]],
    ["Loss", "", [byStep("loss", "loss")]],
    ["Gradient norm", "before clipping", [byStep("grad_norm", "norm")]],
    ["Time of a step", "s", [byStep("compute_s", "computed"), byStep("wait_s", "waited for groups", "waited")], { cut: true }],
  ];
  for (const [title, unit, series, how] of charts) {
    const points = series.flatMap((one) => one.points).filter(([, y]) => y !== null && Number.isFinite(y)), [low, high] = extent(points);
    if (points.length > series.filter((one) => one.points.length).length && high - low < STILL) still.push(`${title} ${Math.abs(high) < STILL ? 0 : number(high)}`);
    else box.append(...[chart(title, unit, series, how)].filter((node) => node));
  }
  if (!box.children.length) box.append(el("p", { className: "dim" }, "No step was committed yet."));
  if (still.length) box.after(el("p", { className: "dim small", id: "still" }, `Not drawn, as they never change: ${still.join(" · ")}.`));
  const rest = Object.keys(data).filter((name) => name.startsWith("m_") && !["m_step", "m_version", "m_time"].includes(name)).map((name) => name.slice(2)).filter((name) => !used.has(name));
  if (!rest.length) return;
  const more = el("details", { id: "more-curves" }, el("summary", {}, `${rest.length} more of each step's measures`));
  more.addEventListener("toggle", () => {
    if (more.children.length > 1) return;
    more.append(el("div", { className: "charts" }, ...rest.map((name) => chart(name, "", [byStep(name, name)])).filter((node) => node)));
  });
  ($("still") ?? box).after(more);
}

// One chart; null without data. With `cut` a few extreme points end at the edge and do not flatten the others.
function chart(title, unit, series, { dots = false, cut = false } = {}) {
  const known = series.map((one) => ({ ...one, points: one.points.filter(([, y]) => y !== null && Number.isFinite(y)) })).filter((one) => one.points.length);
  if (!known.length) return null;
  const xs = known.flatMap((one) => [one.points[0][0], one.points[one.points.length - 1][0]]);
  const ys = known.flatMap((one) => extent(cut ? ordinary(one.points) : one.points));
  const x = { low: Math.min(...xs), high: Math.max(...xs) }, y = niceRange(Math.min(...ys), Math.max(...ys));
  const atX = (value) => EDGE.left + ((value - x.low) / (x.high - x.low || 1)) * (WIDE - EDGE.left - EDGE.right);
  const atY = (value) => HIGH - EDGE.bottom - ((Math.min(value, y.high) - y.low) / (y.high - y.low)) * (HIGH - EDGE.top - EDGE.bottom);
  const picture = svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": spoken(title, known) });
  for (const tick of y.ticks) {
    picture.append(svg("line", { class: "grid", x1: EDGE.left, x2: WIDE - EDGE.right, y1: atY(tick), y2: atY(tick) }));
    picture.append(svg("text", { x: EDGE.left - 6, y: atY(tick) + 3.5, "text-anchor": "end" }, y.write(tick)));
  }
  picture.append(svg("text", { x: EDGE.left, y: HIGH - 4 }, count(x.low)), svg("text", { x: WIDE - EDGE.right, y: HIGH - 4, "text-anchor": "end" }, count(x.high)));
  known.forEach((one, index) => {
    const path = thin(one.points).map(([px, py], at) => `${at ? "L" : "M"}${atX(px).toFixed(1)} ${atY(py).toFixed(1)}`).join("");
    const line = svg("path", { class: `c${index}`, d: path, "vector-effect": "non-scaling-stroke" });
    const points = dots || one.points.length === 1 ? one.points.map(([px, py]) => svg("circle", { class: `c${index}`, cx: atX(px), cy: atY(py), r: 2.5 })) : [];
    if (one.colour) line.style.stroke = one.colour;
    if (one.colour) for (const point of points) point.style.fill = one.colour;
    picture.append(line, ...points);
  });
  const said = el("output"), units = el("span", {}, unit), hair = svg("line", { class: "hair", y1: EDGE.top, y2: HIGH - EDGE.bottom, visibility: "hidden" });
  picture.append(hair);
  const point = (share) => {
    const step = x.low + share * (x.high - x.low);
    const near = known.map((one) => nearest(one.points, step));
    const at = near.reduce((best, one) => (Math.abs(one[0] - step) < Math.abs(best[0] - step) ? one : best));
    for (const name of ["x1", "x2"]) hair.setAttribute(name, atX(at[0]));
    hair.setAttribute("visibility", "visible");
    units.hidden = true; // the values need the room
    said.textContent = `step ${count(at[0])}: ${known.map((one, index) => (known.length > 1 ? `${one.short ?? one.label} ` : "") + number(near[index][1], 4)).join(" · ")}`;
  };
  const rest = () => {
    hair.setAttribute("visibility", "hidden");
    units.hidden = false;
    said.textContent = known.map((one) => (known.length > 1 ? "" : "last ") + number(one.points[one.points.length - 1][1], 4)).join(" · ");
  };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect(), left = (EDGE.left / WIDE) * box.width, wide = box.width - left - (EDGE.right / WIDE) * box.width;
    point(Math.min(1, Math.max(0, (event.clientX - box.left - left) / wide)));
  });
  picture.addEventListener("pointerleave", rest);
  rest();
  const key = known.length > 1 ? el("div", { className: "key" }, ...known.map((one, index) => el("span", { className: `c${index}` }, keyLine(one.colour), one.label))) : null;
  return el("figure", { className: "chart" }, el("h3", {}, title, units, said), picture, key);
}

function keyLine(colour) {
  const node = el("i");
  if (colour) node.style.background = colour;
  return node;
}

// The points without those above three times their 90 % quantile.
function ordinary(points) {
  const values = points.map(([, y]) => y).sort((a, b) => a - b), most = 3 * values[Math.floor(0.9 * (values.length - 1))];
  return most > 0 ? points.filter(([, y]) => y <= most) : points;
}

const extent = (points) => points.reduce(([low, high], [, y]) => [Math.min(low, y), Math.max(high, y)], [Infinity, -Infinity]);

function spoken(title, known) {
  return `${title}: ${known.map((one) => `${one.label} from ${number(one.points[0][1])} to ${number(one.points[one.points.length - 1][1])}`).join("; ")}`;
}

function niceRange(low, high) {
  if (low === high) [low, high] = low === 0 ? [0, 1] : [Math.min(low, 0), Math.max(high, 0)];
  const raw = (high - low) / 3, size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * size).find((one) => one >= raw);
  const from = Math.floor(low / step) * step, ticks = [];
  for (let at = from, i = 0; i < 8; i++, at = from + i * step) {
    ticks.push(Math.abs(at) < step / 1e6 ? 0 : at);
    if (at >= high - step / 1e6) break;
  }
  const digits = Math.max(0, -Math.floor(Math.log10(step)) + (step / 10 ** Math.floor(Math.log10(step)) === 2.5 ? 1 : 0));
  const write = (tick) => (digits > 5 || step >= 1e5 ? number(tick, 2).replace(".0e", "e") : fixed(tick, digits));
  return { low: from, high: ticks[ticks.length - 1], ticks, write };
}

// Of more points than pixels the lowest and the highest of each range.
function thin(points) {
  if (points.length <= MOST_POINTS) return points;
  const extremes = [], long = Math.ceil(points.length / (MOST_POINTS / 2));
  for (let at = 0; at < points.length; at += long) {
    const some = points.slice(at, at + long).sort((a, b) => a[1] - b[1]);
    extremes.push(...[some[0], some[some.length - 1]].sort((a, b) => a[0] - b[0]));
  }
  return extremes;
}

function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle + 1;
    else high = middle;
  }
  return low && step - points[low - 1][0] < points[low][0] - step ? points[low - 1] : points[low];
}
