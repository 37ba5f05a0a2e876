"""Size of a run's page, time to build it, and time until it is ready in a browser.

The run is synthetic: its records are encoded into a log in memory, K samples a group, with lengths, logprobs and token ids like those of a
language model. The browser opens the file from disk in a new profile, with nothing cached.
"""

import json
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.command import parser_of, with_numbers
from penstock.infra.memory.log import MemoryLog
from penstock.infra.paths import write_complete
from penstock.pipeline.inspect.web.build import Limits, build
from penstock.topics import groups, ledger, metrics, prompts, rollouts, runs
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, topics_of
from penstock.topics.groups import Group, ScoredSample
from penstock.topics.ledger import Entry, Planned
from penstock.topics.metrics import Measurement
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout
from penstock.topics.runs import RunRecord
from penstock.topics.wire.record import Outgoing

RUN = "synthetic"
SAMPLES_PER_PROMPT, GROUPS_PER_STEP, PARTITIONS = 8, 16, 8
VOCABULARY = 150_000
BROWSER = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
BROWSER += ["--disable-component-update", "--disable-sync"]
MEASURED = {
    "timeline_ms": """(async () => { location.hash = "#/timeline"; await showTimeline(new URLSearchParams()); const t = performance.now();
      for (let i = 0; i < 10; i++) paintNow(); return (performance.now() - t) / 10; })()""",
    "group_ms": """(async () => { await loadIndex(); const t = performance.now(); await showGroup($("group"), data.g_number[0]);
      return performance.now() - t; })()""",
}
CREATED_NS = 1_700_000_000 * 10**9


def main(arguments: Sequence[str]) -> None:
    """Make the run, build its page, open it."""
    parser = parser_of(__name__, __doc__)
    with_numbers(parser, samples=20_000, workers=4)
    parser.add_argument("--tokens", type=int, default=100, help="mean completion tokens of a sample")
    parser.add_argument("--budget", type=int, default=Limits().tokens, help="`penstock report --tokens`")
    parser.add_argument("--opens", type=int, default=5, help="times that the page is opened")
    parser.add_argument("--out", type=Path, help="file to keep the page in")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    log = MemoryLog()
    log.create_topics({RUNS_TOPIC: RUNS_SPEC})
    log.create_topics(topics_of(RUN, partitions=PARTITIONS))
    producer = log.producer()
    for record in synthetic_run(samples=chosen.samples, mean=chosen.tokens, workers=chosen.workers):
        producer.send(record)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, cpu = time.monotonic(), time.process_time()
    page = build(log, RUN, limits=Limits().with_tokens(chosen.budget))
    figures: dict[str, Any] = {
        "samples": page.facts["samples"][1],
        "tokens": page.facts["tokens"][1],
        "tokens_in_page": page.facts["tokens"][0],
        "page_mb": round(page.facts["bytes"] / 1e6, 2),
        "build_s": round(time.monotonic() - started, 2),
        "build_cpu_s": round(time.process_time() - cpu, 2),
        "build_grew_by_mib": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1),
        "left_out": page.facts["left_out"],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = chosen.out or Path(folder) / "page.html"
        write_complete(path, page.html)
        opens = [opened(path) for _ in range(chosen.opens)]
    if opens:
        figures |= {f"{name}_median": round(statistics.median(each[name] for each in opens), 1) for name in opens[0]}
        figures["ready_ms"] = [each["ready_ms"] for each in opens]
    print(json.dumps(figures, indent=2) if chosen.json else "\n".join(f"{name:20} {value}" for name, value in figures.items()))


def opened(path: Path) -> dict[str, float]:
    """In a new browser, milliseconds from navigation until the page is ready, to redraw the timeline, and from a group to its samples."""
    from playwright.sync_api import sync_playwright

    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if binary is None:
        sys.exit("no Chromium: apt-get install --no-install-recommends chromium, or --opens 0")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=binary, args=BROWSER)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(path.resolve().as_uri(), wait_until="commit")
        page.wait_for_selector("html[data-ready]", state="attached", timeout=60_000)
        times = {"ready_ms": float(page.evaluate("document.documentElement.dataset.ready"))}
        times |= {name: float(page.evaluate(code)) for name, code in MEASURED.items()}
        browser.close()
    return times


def synthetic_run(*, samples: int, mean: int, workers: int) -> Iterator[Outgoing]:
    """All records of the run: a step every 2 seconds, groups generated during the previous step."""
    rng = np.random.default_rng(0)
    count = -(-samples // SAMPLES_PER_PROMPT)
    steps = -(-count // GROUPS_PER_STEP)
    config = {
        "run": {"name": "synthetic", "steps": steps},
        "model": {"path": "/models/none"},
        "data": {"source": "made"},
        "schedule": {"mode": "one_step_off", "prompts_per_step": GROUPS_PER_STEP, "samples_per_prompt": SAMPLES_PER_PROMPT},
    }
    texts = {"config": json.dumps(config), "info": json.dumps({"steps": steps})}
    record = RunRecord(run=RUN, status="finished", created_ns=CREATED_NS, updated_ns=CREATED_NS, **texts)
    value = runs.encode(record)
    yield Outgoing(topic=RUNS_TOPIC, partition=0, key=RUN.encode(), headers=runs.headers(record).encode(value), value=value)
    seq = 0
    for seq, entry in enumerate(_ledger(rng, config, steps=steps, count=count)):
        yield _entry(entry, seq)
    yield from _statuses(rng, seconds=2 * steps + 4, workers=workers)
    for number in range(count):
        yield from _group(rng, number, mean=mean, workers=workers)


def _ledger(rng: np.random.Generator, config: dict[str, Any], *, steps: int, count: int) -> Iterator[Entry]:
    yield Entry(seq=0, kind="run-opened", time_ns=CREATED_NS + 10**9, details=json.dumps({"config": config, "info": {"steps": steps}}))
    yield Entry(seq=0, kind="version", time_ns=CREATED_NS + 2 * 10**9, version=0, step=0, metrics={"bytes": 1e6, "publish_s": 0.05})
    for step in range(steps):
        ended = CREATED_NS + (6 + 2 * step) * 10**9
        members = range(step * GROUPS_PER_STEP, min(count, (step + 1) * GROUPS_PER_STEP))
        done = step / max(1, steps - 1)
        samples = float(SAMPLES_PER_PROMPT * len(members))
        measured = {
            "loss": float(rng.normal(0, 0.01)), "grad_norm": float(rng.gamma(4, 0.1)),
            "reward_trained": float(0.2 + 0.6 * done + rng.normal(0, 0.05)), "completion_tokens_mean": float(100 + 20 * done),
            "lag_mean": 0.6, "lag_max": 1.0, "ess": float(1 - rng.gamma(1, 0.01)), "kl_behaviour_k3": float(rng.gamma(2, 1e-4)),
            "wait_s": 0.6, "compute_s": 1.2, "samples": samples, "groups": float(len(members)), "tokens": 100.0 * samples,
            "started_at": ended / 1e9 - 1.9, "first_backward_at": ended / 1e9 - 1.3,
            "first_sample_at": ended / 1e9 - 4, "last_sample_at": ended / 1e9 - 0.5,
        }  # fmt: skip
        plan = tuple(Planned(group=group, sha256="0" * 64, partition=group % PARTITIONS, offset=group // PARTITIONS) for group in members)
        yield Entry(seq=0, kind="step", time_ns=ended, step=step, version=step, plan=plan, metrics=measured)
        published = {"bytes": 1e6, "publish_s": 0.05}
        yield Entry(seq=0, kind="version", time_ns=ended + 60_000_000, version=step + 1, step=step + 1, metrics=published)
    yield Entry(seq=0, kind="run-closed", time_ns=CREATED_NS + (8 + 2 * steps) * 10**9, details=json.dumps({"status": "finished"}))


def _statuses(rng: np.random.Generator, *, seconds: int, workers: int) -> Iterator[Outgoing]:
    activities = {
        "trainer": [("training step 3", "compute"), ("step 3: 2 of 16 groups are here", "no_group")],
        "scorer-0": [("scoring", "busy"), ("waiting for samples", "no_samples")],
        "feeder": [("waiting for new weights", "full_window")],
        **{f"rollout-{number}": [("generating", "busy"), ("waiting for prompts", "no_prompts")] for number in range(workers)},
    }
    for second in range(seconds):
        loaded = {"version": float(second // 2), "load_s": 0.02 * (second // 2)}
        for worker, labels in activities.items():
            status = Measurement(
                worker=worker, role=worker.partition("-")[0], incarnation="a", seq=second, kind="status",
                time_ns=CREATED_NS + second * 10**9, values={"startup_s": 1.0} | (loaded if worker.startswith("rollout") else {}),
                labels=dict(zip(("doing", "activity"), labels[int(rng.integers(len(labels)))], strict=True)),
            )  # fmt: skip
            value = metrics.encode(status)
            headers = metrics.headers(status, run=RUN).encode(value)
            yield Outgoing(topic=f"{RUN}.metrics", partition=0, key=worker.encode(), headers=headers, value=value)


def _group(rng: np.random.Generator, number: int, *, mean: int, workers: int) -> Iterator[Outgoing]:
    step = number // GROUPS_PER_STEP
    began = CREATED_NS + (2 + 2 * step) * 10**9 + (number % GROUPS_PER_STEP) // workers * 450_000_000
    prompt_ids = _ids(rng, 60)
    text, columns = f"Problem {number}: " + _text(prompt_ids), json.dumps({"answer": str(number)})
    common: dict[str, Any] = {"group": number, "slot": number, "min_version": step, "samples_per_prompt": SAMPLES_PER_PROMPT, "epoch": 0}
    common |= {"row": number, "prompt": text, "columns": columns, "created_ns": began - 100_000_000}
    prompt = Prompt(messages=None, token_ids=prompt_ids, **common)
    common_to_samples = {"step": step, "began": began, "mean": mean, "worker": number % workers}
    samples = [_rollout(rng, number, sample, **common_to_samples) for sample in range(SAMPLES_PER_PROMPT)]
    rewards = (rng.random(SAMPLES_PER_PROMPT) < 0.2 + 0.001 * step).astype(float)
    same = bool((rewards == rewards[0]).all())
    scored = tuple(
        ScoredSample(rollout=rollout, completion=_text(rollout.token_ids), reward=float(reward) + 0.1, components=(float(reward), 0.2))
        for rollout, reward in zip(samples, rewards, strict=True)
    )
    group = Group(
        outcome="filtered" if same else "scored", reason="every sample has the same reward" if same else None, prompt_ids=prompt_ids,
        reward_names=("exact_match", "format"), reward_weights=(1.0, 0.5), samples=scored,
        scored_ns=max(rollout.ended_ns for rollout in samples) + 40_000_000, **common,
    )  # fmt: skip
    value = prompts.encode(prompt)
    yield _of_group("prompts", number, prompts.headers(prompt, run=RUN).encode(value), value)
    for rollout in samples:
        value = rollouts.encode(rollout)
        yield _of_group("rollouts", number, rollouts.headers(rollout, run=RUN).encode(value), value)
    for headers, value in groups.encode_parts(group, run=RUN, worker="scorer-0"):
        yield _of_group("groups", number, headers.encode(value), value)


def _rollout(rng: np.random.Generator, group: int, sample: int, *, step: int, began: int, mean: int, worker: int) -> Rollout:
    tokens = int(np.clip(rng.gamma(4, mean / 4), 4, 8 * mean))
    # Most tokens are nearly certain, some are not: half below 0.05 nat, a tail to 8.
    logprobs = -np.minimum(rng.gamma(0.35, 1.2, tokens), 20.0)
    spans = [step] if step == 0 or rng.random() < 0.7 else [step - 1, step]
    return Rollout(
        group=group, sample=sample, token_ids=_ids(rng, tokens), behaviour_logprobs=logprobs.astype(np.float32),
        loss_mask=np.ones(tokens, np.bool_), span_versions=np.array(spans, np.int32),
        span_starts=np.array([0, tokens // 3][: len(spans)], np.int32), finish="stop", temperature=1.0, top_p=1.0, top_k=0,
        started_ns=began, ended_ns=began + int(tokens * 2e6 + rng.integers(50_000_000)), worker=f"rollout-{worker}",
    )  # fmt: skip


def _ids(rng: np.random.Generator, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Token ids whose ranks follow Zipf's law, as words do."""
    ranks = np.exp(rng.random(count) * np.log(VOCABULARY)).astype(np.int64)
    return (ranks * 7919 % VOCABULARY).astype(np.int32)


def _text(ids: np.ndarray[Any, Any]) -> str:
    """A word for each id, always the same."""
    return " ".join(format(int(each) * 2654435761 % 2**32 % 26**4, "x")[: 2 + int(each) % 5] for each in ids)


def _entry(entry: Entry, seq: int) -> Outgoing:
    numbered = replace(entry, seq=seq)
    value = ledger.encode(numbered)
    return Outgoing(topic=f"{RUN}.ledger", partition=0, key=None, headers=ledger.headers(numbered, run=RUN).encode(value), value=value)


def _of_group(topic: str, number: int, headers: Any, value: bytes) -> Outgoing:
    return Outgoing(topic=f"{RUN}.{topic}", partition=number % PARTITIONS, key=str(number).encode(), headers=headers, value=value)
