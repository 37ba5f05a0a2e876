// Where a page has its data from: the server, or the chunks of the one-file report, each inflated once, at its first use.

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
    return words.length ? Object.fromEntries(ids.map((id, index) => [id, words[index]])) : null;
  });
  return vocabulary;
}

let data = null;
function loadIndex() {
  loadIndex.loading ??= (FILE ? piece("index") : get("columns").then((reply) => reply.text()).then(inflate)).then((bytes) => {
    data = unpack(bytes);
    data.first = sums(data.g_size);
    data.groupOf = new Uint32Array(data.s_reward.length);
    for (let g = 0; g < data.g_size.length; g++) data.groupOf.fill(g, data.first[g], data.first[g + 1]);
    data.byNumber = new Map(Array.from(data.g_number, (number, index) => [number, index]));
  });
  return loadIndex.loading;
}

async function get(path, signal) {
  const reply = await fetch(to(path), { signal });
  if (!reply.ok) throw new Error((await reply.json().catch(() => ({}))).problem ?? `the server answered ${reply.status}`);
  return reply;
}

// Both sources: `groups(params, after, signal)` is a page of the list, `histograms(params)` counts its rewards and lengths, `group(number, sample)`
// has texts and tokens of one group.
const HttpSource = {
  groups: async (params, after, signal) => (await get(`groups?${params}&after=${after}`, signal)).json(),
  histograms: async (params, signal) => (await get(`groups/histograms?${params}`, signal)).json(),
  group: async (number, sample) => (await get(`g/${number}/data${sample === undefined ? "" : `?sample=${sample}`}`)).json(),
};

const between = (text) => {
  const [low, high] = text.includes("..") ? text.split("..") : [text, text];
  return [low === "" ? -Infinity : Number(low) - 1e-6, high === "" ? Infinity : Number(high) + 1e-6];
};

const FileSource = {
  async groups(params, after, signal) {
    await loadIndex();
    const all = Array.from(data.g_number, (_, g) => g).filter(FileSource.filter(params)), sort = params.get("sort");
    const sign = sort === "best" ? -1 : 1, key = (g) => (Number.isNaN(data.g_reward[g]) ? Infinity : sign * data.g_reward[g]);
    if (sort !== "oldest") all.reverse();
    if (sort === "best" || sort === "worst") all.sort((a, b) => key(a) - key(b));
    const text = (params.get("text") ?? "").toLowerCase(), shown = [];
    let at = Number(after);
    for (; at < all.length && shown.length < 100 && !signal?.aborted; at++) if (!text || (await FileSource.has(all[at], text))) shown.push(all[at]);
    const matched = text ? null : all.length;
    return { rows: shown.map(FileSource.row), matched, searched: text ? at - after : 0, total: data.contents.groups[1], next: at < all.length ? at : null };
  },
  histograms(params) {
    const shown = Array.from(data.g_number, (_, g) => g).filter(FileSource.filter(params));
    const tokens = (g) => data.s_tokens.subarray(data.first[g], data.first[g + 1]).reduce((a, b) => a + b, 0) / (data.first[g + 1] - data.first[g]);
    return { reward: FileSource.histogram(shown.map((g) => data.g_reward[g])), length: FileSource.histogram(shown.map(tokens)) };
  },
  histogram(values) {
    const finite = values.filter(Number.isFinite), low = Math.min(...finite), high = Math.max(...finite), wide = (high - low || 1) / 24, counts = Array(24).fill(0);
    for (const value of finite) counts[Math.min(23, Math.floor((value - low) / wide))]++;
    return { counts, edges: Array.from({ length: 25 }, (_, at) => low + at * wide) };
  },
  filter(params) {
    const limits = (name) => (params.get(name) ? between(params.get(name)) : null);
    const reward = limits("reward"), step = limits("step"), version = limits("version");
    const status = params.get("status"), finish = params.get("finish"), worker = params.get("worker");
    const within = (range, value) => !range || (value >= range[0] && value <= range[1]);
    const some = (g, fits) => {
      for (let s = data.first[g]; s < data.first[g + 1]; s++) if (fits(s)) return true;
      return false;
    };
    return (g) => (!status || data.statuses[data.g_status[g]] === status) && within(reward, data.g_reward[g]) && (!step || (data.g_step[g] >= 0 && within(step, data.g_step[g]))) &&
      (!version || within(version, FileSource.version(g))) && (!(finish || worker) || some(g, (s) => (!finish || data.finishes[data.s_finish[s]] === finish) && (!worker || data.workers[data.s_worker[s]].name === worker)));
  },
  version: (g) => (data.first[g] === data.first[g + 1] ? NaN : data.s_min.subarray(data.first[g], data.first[g + 1]).reduce((a, b) => Math.min(a, b))),
  text: async (g) => (data.g_chunk[g] === NOTHING ? null : (await textsOf(data.g_chunk[g]))?.[data.g_slot[g]]),
  async has(g, text) {
    const [prompt, , completions] = (await FileSource.text(g)) ?? [data.prompts[data.g_prompt[g]], "", []];
    return prompt.toLowerCase().includes(text) || completions.some((completion) => completion?.toLowerCase().includes(text));
  },
  row(g) {
    const step = data.g_step[g], version = FileSource.version(g), reward = data.g_reward[g];
    return { group: data.g_number[g], status: data.statuses[data.g_status[g]], step: step < 0 ? null : step, reward: nothing(reward), version: nothing(version), rewards: Array.from(data.s_reward.subarray(data.first[g], data.first[g + 1]), nothing), prompt: data.prompts[data.g_prompt[g]] };
  },
  async group(number) {
    await loadIndex();
    const g = data.byNumber.get(number);
    if (g === undefined) throw new Error(`this page has no group ${number}; \`penstock explain ${data.run} ${number}\` shows it`);
    const text = await FileSource.text(g), detailed = text && data.g_detail[g] ? await tokensOf(data.g_chunk[g]) : null;
    const [prompt, columns, completions] = text ?? [data.prompts[data.g_prompt[g]], "{}", []];
    const samples = [];
    for (let s = data.first[g], k = 0; s < data.first[g + 1]; s++, k++) {
      samples.push({
        sample: data.s_number[s], reward: nothing(data.s_reward[s]), components: data.reward_names.map((_, index) => nothing(data[`s_component${index}`][s])), advantage: nothing(data.s_advantage[s]),
        completion: completions[k] ?? null, finish: data.finishes[data.s_finish[s]], worker: data.workers[data.s_worker[s]].name, tokens: data.s_tokens[s], versions: [data.s_min[s], data.s_max[s]],
        times: [data.s_start[s], data.s_end[s]].map((ticks) => data.zero_ms + ms(ticks)), detail: detailed ? FileSource.tokens(detailed, detailed.groupAt[data.g_slot[g]] + k) : null,
      });
    }
    return {
      group: number, status: data.statuses[data.g_status[g]], step: FileSource.row(g).step, run: data.run, reason: data.reasons[number] ?? null, prompt, columns, samples, reward_names: data.reward_names,
      reward_weights: data.reward_weights, advantage: data.advantage, words: await vocabularyOf(), no_texts: data.no_texts, created_ms: data.zero_ms + ms(data.g_created[g]), scored_ms: data.g_scored[g] === UNKNOWN ? null : data.zero_ms + ms(data.g_scored[g]),
      left_out: text === null || text === undefined ? "texts and tokens" : detailed ? null : "tokens",
    };
  },
  tokens(detailed, at) {
    const from = detailed.tokenAt[at], until = detailed.tokenAt[at + 1], spans = [];
    for (let span = detailed.spanAt[at]; span < detailed.spanAt[at + 1]; span++) spans.push([detailed.span_start[span], detailed.span_version[span]]);
    const masked = detailed.left_out ? Array.from(detailed.left_out.subarray(from, until).entries()).filter(([, out]) => out).map(([index]) => index) : [];
    return { ids: Array.from(detailed.id.subarray(from, until)), logprobs: Array.from(detailed.logprob.subarray(from, until), (steps) => (steps === NOTHING ? null : -steps * data.logprob_step)), spans, masked };
  },
};
const nothing = (value) => (Number.isNaN(value) ? null : value);
const source = FILE ? FileSource : HttpSource;
