// Curves over optimizer steps, plotted by uPlot. Charts of a page have one cursor and one zoom.

const plots = new Map();

function shownCurves() {
  const block = $("curves");
  return block ? JSON.parse(block.textContent) : null;
}

// Show all curves of a page, or bring those that exist up to date; `again` replaces them, in the colours of the scheme.
function showCurves(curves = shownCurves(), again = false) {
  if (!curves) return;
  showCurves.last = curves;
  if (again) for (const plot of plots.values()) plot.destroy();
  if (again) plots.clear();
  fill($("main-charts"), curves.main, 220);
  fill($("charts"), curves.charts, 130);
  const more = $("more-charts");
  if (more?.open) fill(more.querySelector(".charts"), curves.more, 130);
  if (more && !more.onclick) more.addEventListener("toggle", (more.onclick = () => showCurves(showCurves.last)));
  if ($("still")) $("still").textContent = curves.still.length ? `Not shown, as they never change: ${curves.still.join(", ")}.` : "";
}

function fill(box, charts, high) {
  if (!box) return;
  charts.forEach((chart, at) => {
    const key = `${box.id || "more"} ${chart.title}`, existing = plots.get(key);
    const columns = aligned(chart);
    if (existing?.root.isConnected && existing.series.length === columns.length) {
      const zoomed = existing.scales.x.min > existing.data[0][0] || existing.scales.x.max < existing.data[0][existing.data[0].length - 1];
      existing.setData(columns, !zoomed);
      existing.root.closest("figure").setAttribute("aria-label", spoken(chart));
      return;
    }
    existing?.root.closest("figure")?.remove();
    const figure = el("figure", { className: "chart", ariaLabel: spoken(chart) }, el("h3", {}, chart.title, " ", el("span", { className: "dim" }, chart.unit)));
    box.insertBefore(figure, box.children[at] ?? null);
    plots.set(key, plot(chart, columns, figure, high));
    figure.append(values(chart));
  });
}

// [x, y of each series, ...] over all places, smoothed, and with the mean and the range of seeds where that is selected.
function aligned(chart) {
  const smooth = Number($("smooth")?.value ?? 0);
  let columns = chart.series.length ? uPlot.join(chart.series.map((one) => [one.x, smooth ? smoothed(one.y, smooth) : one.y])) : [[]];
  if ($("spread")?.checked) {
    const rows = columns[0].map((_, at) => columns.slice(1).map((column) => column[at]).filter((value) => value !== null && value !== undefined));
    const of = (choose) => rows.map((row) => (row.length ? choose(row) : null));
    columns = [columns[0], of((row) => row.reduce((a, b) => a + b) / row.length), of((row) => Math.min(...row)), of((row) => Math.max(...row))];
  }
  return columns;
}

function smoothed(values, weight) {
  let mean = values[0];
  return values.map((value) => (mean = weight * mean + (1 - weight) * value));
}

function plot(chart, columns, figure, high) {
  const spread = $("spread")?.checked, labels = spread ? ["mean", "least", "greatest"] : chart.series.map((one) => one.label);
  const colourOf = (index) => colour(chart.series[index]?.colour ?? `curve${spread ? 0 : index % 8}`);
  const grid = { stroke: colour("line"), width: 1 }, axis = { stroke: colour("dim"), grid, ticks: { ...grid, size: 4 }, font: "11px system-ui", gap: 3 };
  const series = labels.map((label, index) => ({
    label, stroke: colourOf(index), width: spread && index ? 0.75 : 1.75, spanGaps: true,
    // Where a curve has no value, the legend has the one before.
    value: (made, value, index, at) => number(value ?? made.data[index].slice(0, at ?? 0).filter((earlier) => earlier !== null && earlier !== undefined).pop(), 4),
    points: { show: chart.dots || columns[0].length < 3, size: 6, fill: colourOf(index) }, dash: chart.series[index]?.label === "sampled" ? [4, 3] : undefined,
  }));
  const width = figure.clientWidth || 320;
  const options = {
    width, height: high, scales: { x: { time: false }, y: { range: (_, low, top) => room(low, top) } }, legend: { live: true }, cursor: { sync: { key: "curves" }, points: { size: 5 } },
    axes: [{ ...axis, size: 24, values: (_, ticks) => ticks.map((tick) => (chart.x === "time" ? clock(1000 * tick) : count(tick))) }, { ...axis, size: 46, space: 24, values: (_, ticks) => ticks.map((tick) => number(tick, 2)) }],
    series: [{ label: chart.x ?? "step", value: (_, x) => (x === null ? "" : chart.x === "time" ? clock(1000 * x) : count(x)) }, ...series],
  };
  // Without a pointer the legend has the last values.
  const atEnd = (made) => { if (made.cursor.idx === null || made.cursor.idx === undefined) made.setLegend({ idx: made.data[0].length - 1 }, false); };
  const made = new uPlot({ ...options, hooks: { ready: [atEnd], setData: [atEnd], setCursor: [atEnd] } }, columns, figure);
  new ResizeObserver(() => figure.clientWidth && made.width !== figure.clientWidth && made.setSize({ width: figure.clientWidth, height: high })).observe(figure);
  if (!chart.x) made.over.addEventListener("click", () => {
    const step = made.data[0][made.cursor.idx ?? -1];
    if (step !== undefined && made.select.width < 3) location.href = to(`samples?step=${step}`);
  });
  return made;
}

// The range of an axis: what never changes is in the middle.
function room(low, high) {
  if (low === null || low === undefined) return [0, 1];
  const more = 0.06 * (high - low) || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - more < 0 ? 0 : low - more, high + more];
}

function spoken(chart) {
  const parts = chart.series.map((one) => `${one.label} from ${number(one.y[0])} to ${number(one.y[one.y.length - 1])}`);
  return `${chart.title}: ${parts.join("; ") || "no values yet"}`;
}

// The values of a chart as a table, made when it is opened.
function values(chart) {
  const box = el("details", { className: "values" }, el("summary", {}, "values"));
  box.addEventListener("toggle", () => {
    const [xs, ...columns] = aligned(chart), cell = (value) => el("td", { className: "n" }, number(value, 4));
    const head = el("tr", {}, ...[chart.x ?? "step", ...chart.series.map((one) => one.label)].map((name) => el("th", { scope: "col" }, name)));
    box.querySelector(".scroll")?.remove();
    box.append(el("div", { className: "scroll", tabIndex: 0 }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...xs.map((x, at) => el("tr", {}, cell(x), ...columns.map((column) => cell(column[at]))))))));
  });
  return box;
}
