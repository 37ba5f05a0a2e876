// Helpers for the document. A text of the run only becomes a text node, never markup, and its hidden characters are shown as escapes.

"use strict";

const FILE = "file" in document.documentElement.dataset;
// The address of a page of the run: below the server's token, or behind the file's #.
const to = (path) => (FILE ? `#/${path}` : `${document.documentElement.dataset.base}/r/${document.documentElement.dataset.run}/${path}`);

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

function swatch(colour) {
  const node = el("i", { className: "swatch", ariaHidden: "true" });
  node.style.background = colour;
  return node;
}

const counted = new Intl.NumberFormat("en-US");
const count = (value) => counted.format(Math.round(value));

const HIDDEN = /[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff9-\ufffb\u{e0000}-\u{e0fff}]/gu;
const escaped = (character) => `\\u${character.codePointAt(0).toString(16).padStart(4, "0")}`;
// A text with its hidden characters as escapes, as `penstock.topics.wire.visible` shows them.
const visible = (text) => text.replace(HIDDEN, escaped);

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

// Milliseconds for people: 12 ms, 3.42 s, 1:05.
function lasting(ms) {
  if (ms < 1) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60000) return `${(ms / 1000).toFixed(2)} s`;
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

// A colour of the scheme that is in use.
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

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
