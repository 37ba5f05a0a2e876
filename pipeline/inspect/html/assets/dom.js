// Helpers for the document. A text of the run only becomes a text node, never markup.

const $ = (id) => document.getElementById(id);

// An element with properties and children; strings become text nodes.
function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node && !name.includes("-")) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function swatch(colour) {
  const node = el("i", { className: "swatch", ariaHidden: "true" });
  node.style.background = colour;
  return node;
}

const counted = new Intl.NumberFormat("en-US");
const count = (value) => counted.format(Math.round(value));

const minus = (text) => text.replace(/-/g, "−");

// A number in at most so many significant digits; a dash for none.
function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return minus(value.toExponential(digits - 1));
  if (size >= 1000) return minus(count(value));
  return minus(value.toFixed(Math.max(0, digits - 1 - Math.floor(Math.log10(size)))));
}

function fixed(value, digits = 3) {
  return value === null || value === undefined || Number.isNaN(value) ? "–" : minus(value.toFixed(digits));
}

function bytes(value) {
  return value >= 1e6 ? `${(value / 1e6).toFixed(1)} MB` : `${(value / 1e3).toFixed(0)} kB`;
}

// Milliseconds for people: 12 ms, 3.42 s, 2:05.
function lasting(ms) {
  if (ms < 1) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 100000) return `${(ms / 1000).toFixed(2)} s`;
  return clock(ms);
}

// A moment of the run: seconds since it was created.
function clock(ms, digits = 0) {
  const sign = ms < 0 ? "−" : "";
  const whole = Math.abs(ms) / 1000;
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  const seconds = (whole % 60).toFixed(digits).padStart(digits ? digits + 3 : 2, "0");
  return hours ? `${sign}${hours}:${String(minutes).padStart(2, "0")}:${seconds}` : `${sign}${minutes}:${seconds}`;
}

const ms = (ticks) => ticks * data.tick_ms;
const moment = (ticks) => (ticks === UNKNOWN ? "–" : `${(ms(ticks) / 1000).toFixed(2)} s`);

// Ranges of versions: 3 or 3–5.
function range(low, high) {
  return low === high ? String(low) : `${low}–${high}`;
}

const colours = new Map();
function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

function showTip(text, x, y) {
  const tip = $("tip");
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
}

function hideTip() {
  $("tip").hidden = true;
}

function table(names, rows) {
  const head = el("tr", {}, ...names.map(([name, kind]) => el("th", { className: kind ?? "", scope: "col" }, name)));
  const body = rows.map((row) => el("tr", {}, ...row.map((cell, index) => el("td", { className: names[index][1] ?? "" }, cell))));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
}

// A bar that is that share of its cell.
function bar(share, colourName) {
  const node = el("i", { ariaHidden: "true" });
  node.style.width = `${(100 * share).toFixed(1)}%`;
  node.style.background = `var(--${colourName})`;
  return node;
}
