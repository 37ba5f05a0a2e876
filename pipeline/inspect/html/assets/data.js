// Unpacks the page's data. A chunk is inflated once, at its first use, and from this file alone.

const ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array, i8: BigInt64Array, f4: Float32Array, f8: Float64Array };
const NOTHING = 0xffff;
const UNKNOWN = -2147483647; // an unknown time
const pieces = new Map();
const parsed = new Promise((done) => {
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", () => done(), { once: true });
  else done();
});

async function inflate(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// The bytes of a chunk, null if the page has none of that name.
function piece(name) {
  if (!pieces.has(name)) pieces.set(name, fetchPiece(name));
  return pieces.get(name);
}

async function fetchPiece(name) {
  let block = document.getElementById(name);
  if (!block || !block.nextElementSibling) { // the parser is not past it yet
    await parsed;
    block = document.getElementById(name);
  }
  if (!block) return null;
  const bytes = await inflate(block.textContent);
  if (name !== "index") block.textContent = "";
  return bytes;
}

function fromJson(bytes) {
  return JSON.parse(new TextDecoder().decode(bytes));
}

// A length, JSON, then columns: first bytes of all numbers, then their second bytes, and so on.
function unpack(bytes) {
  const length = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
  const head = fromJson(bytes.subarray(4, 4 + length));
  const columns = {};
  let index = 4 + length;
  for (const [name, kind, count] of head.columns) {
    const width = Number(kind[1]);
    const out = new Uint8Array(count * width);
    for (let plane = 0; plane < width; plane++) {
      for (let i = 0, at = plane; i < count; i++, at += width) out[at] = bytes[index++];
    }
    columns[name] = new ARRAYS[kind](out.buffer);
  }
  return { ...head.facts, ...columns };
}

const texts = new Map();
const tokens = new Map();

// [prompt, columns, completions] of every group of a chunk.
function textsOf(chunk) {
  if (!texts.has(chunk)) texts.set(chunk, piece(`x${chunk}`).then((bytes) => bytes && fromJson(bytes)));
  return texts.get(chunk);
}

// Columns of a chunk's tokens, with the start index of each group's samples and each sample's tokens and spans.
function tokensOf(chunk) {
  if (!tokens.has(chunk)) tokens.set(chunk, piece(`k${chunk}`).then((bytes) => bytes && placed(unpack(bytes))));
  return tokens.get(chunk);
}

function placed(tokens) {
  tokens.groupAt = sums(tokens.samples);
  tokens.tokenAt = sums(tokens.length);
  tokens.spanAt = sums(tokens.spans);
  return tokens;
}

function sums(counts) {
  const sum = new Uint32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) sum[i + 1] = sum[i] + counts[i];
  return sum;
}

let vocabulary = null;
function vocabularyOf() {
  vocabulary ??= piece("vocabulary").then((bytes) => {
    const [ids, words] = fromJson(bytes);
    return words.length ? new Map(ids.map((id, index) => [id, words[index]])) : null;
  });
  return vocabulary;
}

let data = null;
async function loadIndex() {
  data = unpack(await piece("index"));
  data.first = sums(data.g_size);
  data.groupOf = new Uint32Array(data.s_reward.length);
  for (let g = 0; g < data.g_size.length; g++) data.groupOf.fill(g, data.first[g], data.first[g + 1]);
  data.byNumber = new Map(Array.from(data.g_number, (number, index) => [number, index]));
}
