"""How large a run's page is, how long it takes to make, and how soon it is ready in a browser.

The run is made up: its records are written with the real codecs into a log in memory, K samples to a group, with the lengths, logprobs
and token ids of a language model's. The rule: the browser opens the file from disk, in a new profile, with nothing cached.
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

from benchmarks.support.command import parser_of
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.inspect.html.build import Limits, build, write
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
    "timeline_ms": "(() => { const t = performance.now(); for (let i = 0; i < 10; i++) draw(); return (performance.now() - t) / 10; })()",
    "group_ms": "(async () => { const t = performance.now(); await openGroup(0); return performance.now() - t; })()",
}
CREATED_NS = 1_700_000_000 * 10**9


def main(arguments: Sequence[str]) -> None:
    """Make the run, make its page, open it."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=100, help="mean completion tokens of a sample")
    parser.add_argument("--budget", type=int, default=Limits().tokens, help="`penstock report --tokens`")
    parser.add_argument("--opens", type=int, default=5, help="how often the page is opened")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", type=Path, help="keep the page here")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    log = MemoryLog()
    log.create_topics({RUNS_TOPIC: RUNS_SPEC})
    log.create_topics(topics_of(RUN, partitions=PARTITIONS))
    producer = log.producer()
    for record in story(samples=given.samples, mean=given.tokens, workers=given.workers):
        producer.send(record)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, cpu = time.monotonic(), time.process_time()
    page = build(log, RUN, limits=Limits().with_tokens(given.budget))
    found: dict[str, Any] = {
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
        path = given.out or Path(folder) / "page.html"
        write(page, path)
        seen = [opened(path) for _ in range(given.opens)]
    if seen:
        found |= {f"{name}_median": round(statistics.median(one[name] for one in seen), 1) for name in seen[0]}
        found["ready_ms"] = [one["ready_ms"] for one in seen]
    print(json.dumps(found, indent=2) if given.json else "\n".join(f"{name:20} {value}" for name, value in found.items()))


def opened(path: Path) -> dict[str, float]:
    """In a browser that was just started: milliseconds from navigation until the page says that everything is drawn, for drawing the
    whole timeline once more, and from the choice of a group to its samples."""
    from playwright.sync_api import sync_playwright

    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if binary is None:
        sys.exit("no Chromium here: apt-get install --no-install-recommends chromium, or --opens 0")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=binary, args=BROWSER)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(path.resolve().as_uri(), wait_until="commit")
        page.wait_for_selector("html[data-ready]", state="attached", timeout=60_000)
        found = {"ready_ms": float(page.evaluate("document.documentElement.dataset.ready"))}
        found |= {name: float(page.evaluate(code)) for name, code in MEASURED.items()}
        browser.close()
    return found


def story(*, samples: int, mean: int, workers: int) -> Iterator[Outgoing]:
    """All records of the run: a step every 2 seconds, groups drawn while the step before is trained."""
    draw = np.random.default_rng(0)
    count = -(-samples // SAMPLES_PER_PROMPT)
    steps = -(-count // GROUPS_PER_STEP)
    config = {
        "run": {"name": "synthetic", "steps": steps},
        "model": {"path": "/models/none"},
        "data": {"source": "made"},
        "schedule": {"mode": "one_step_off", "prompts_per_step": GROUPS_PER_STEP, "samples_per_prompt": SAMPLES_PER_PROMPT},
    }
    record = RunRecord(
        run=RUN,
        status="finished",
        config=json.dumps(config),
        info=json.dumps({"steps": steps}),
        created_ns=CREATED_NS,
        updated_ns=CREATED_NS,
    )
    value = runs.encode(record)
    yield Outgoing(topic=RUNS_TOPIC, partition=0, key=RUN.encode(), headers=runs.headers(record).encode(value), value=value)
    seq = 0
    for seq, entry in enumerate(_ledger(draw, config, steps=steps, count=count)):
        yield _entry(entry, seq)
    yield from _statuses(draw, seconds=2 * steps + 4, workers=workers)
    for number in range(count):
        yield from _group(draw, number, mean=mean, workers=workers)


def _ledger(draw: np.random.Generator, config: dict[str, Any], *, steps: int, count: int) -> Iterator[Entry]:
    yield Entry(seq=0, kind="run-opened", time_ns=CREATED_NS + 10**9, details=json.dumps({"config": config, "info": {"steps": steps}}))
    yield Entry(seq=0, kind="version", time_ns=CREATED_NS + 2 * 10**9, version=0, step=0, metrics={"bytes": 1e6, "publish_s": 0.05})
    for step in range(steps):
        ended = CREATED_NS + (6 + 2 * step) * 10**9
        members = range(step * GROUPS_PER_STEP, min(count, (step + 1) * GROUPS_PER_STEP))
        done = step / max(1, steps - 1)
        measured = {
            "loss": float(draw.normal(0, 0.01)),
            "grad_norm": float(draw.gamma(4, 0.1)),
            "reward_trained": float(0.2 + 0.6 * done + draw.normal(0, 0.05)),
            "completion_tokens_mean": float(100 + 20 * done),
            "lag_mean": 0.6,
            "lag_max": 1.0,
            "ess": float(1 - draw.gamma(1, 0.01)),
            "kl_behaviour_k3": float(draw.gamma(2, 1e-4)),
            "wait_s": 0.6,
            "compute_s": 1.2,
            "samples": float(SAMPLES_PER_PROMPT * len(members)),
            "groups": float(len(members)),
            "tokens": 100.0 * SAMPLES_PER_PROMPT * len(members),
            "started_at": ended / 1e9 - 1.9,
            "first_backward_at": ended / 1e9 - 1.3,
            "first_sample_at": ended / 1e9 - 4,
            "last_sample_at": ended / 1e9 - 0.5,
        }
        plan = tuple(Planned(group=group, sha256="0" * 64, partition=group % PARTITIONS, offset=group // PARTITIONS) for group in members)
        yield Entry(seq=0, kind="step", time_ns=ended, step=step, version=step, plan=plan, metrics=measured)
        yield Entry(
            seq=0, kind="version", time_ns=ended + 60_000_000, version=step + 1, step=step + 1, metrics={"bytes": 1e6, "publish_s": 0.05}
        )
    yield Entry(seq=0, kind="run-closed", time_ns=CREATED_NS + (8 + 2 * steps) * 10**9, details=json.dumps({"status": "finished"}))


def _statuses(draw: np.random.Generator, *, seconds: int, workers: int) -> Iterator[Outgoing]:
    says = {
        "trainer": [("training step 3", "compute"), ("step 3: 2 of 16 groups are here", "no_group")],
        "scorer-0": [("scoring", "busy"), ("waiting for samples", "no_samples")],
        "feeder": [("waiting for new weights", "full_window")],
        **{f"rollout-{number}": [("generating", "busy"), ("waiting for prompts", "no_prompts")] for number in range(workers)},
    }
    for second in range(seconds):
        loaded = {"version": float(second // 2), "load_s": 0.02 * (second // 2)}
        for worker, labels in says.items():
            found = Measurement(
                worker=worker,
                role=worker.partition("-")[0],
                incarnation="a",
                seq=second,
                kind="status",
                time_ns=CREATED_NS + second * 10**9,
                values={"startup_s": 1.0} | (loaded if worker.startswith("rollout") else {}),
                labels=dict(zip(("doing", "activity"), labels[int(draw.integers(len(labels)))], strict=True)),
            )
            value = metrics.encode(found)
            headers = metrics.headers(found, run=RUN).encode(value)
            yield Outgoing(topic=f"{RUN}.metrics", partition=0, key=worker.encode(), headers=headers, value=value)


def _group(draw: np.random.Generator, number: int, *, mean: int, workers: int) -> Iterator[Outgoing]:
    step = number // GROUPS_PER_STEP
    began = CREATED_NS + (2 + 2 * step) * 10**9 + (number % GROUPS_PER_STEP) // workers * 450_000_000
    prompt_ids = _ids(draw, 60)
    text, columns = f"Problem {number}: " + _text(prompt_ids), json.dumps({"answer": str(number)})
    common: dict[str, Any] = {"group": number, "slot": number, "min_version": step, "samples_per_prompt": SAMPLES_PER_PROMPT, "epoch": 0}
    common |= {"row": number, "prompt": text, "columns": columns, "created_ns": began - 100_000_000}
    prompt = Prompt(messages=None, token_ids=prompt_ids, **common)
    drawn = [
        _rollout(draw, number, sample, step=step, began=began, mean=mean, worker=number % workers) for sample in range(SAMPLES_PER_PROMPT)
    ]
    rewards = (draw.random(SAMPLES_PER_PROMPT) < 0.2 + 0.001 * step).astype(float)
    same = bool((rewards == rewards[0]).all())
    scored = tuple(
        ScoredSample(rollout=rollout, completion=_text(rollout.token_ids), reward=float(reward) + 0.1, components=(float(reward), 0.2))
        for rollout, reward in zip(drawn, rewards, strict=True)
    )
    group = Group(
        outcome="filtered" if same else "scored",
        reason="every sample has the same reward" if same else None,
        prompt_ids=prompt_ids,
        reward_names=("exact_match", "format"),
        reward_weights=(1.0, 0.5),
        samples=scored,
        scored_ns=max(rollout.ended_ns for rollout in drawn) + 40_000_000,
        **common,
    )
    value = prompts.encode(prompt)
    yield _of_group("prompts", number, prompts.headers(prompt, run=RUN).encode(value), value)
    for rollout in drawn:
        value = rollouts.encode(rollout)
        yield _of_group("rollouts", number, rollouts.headers(rollout, run=RUN).encode(value), value)
    for headers, value in groups.encode_parts(group, run=RUN, worker="scorer-0"):
        yield _of_group("groups", number, headers.encode(value), value)


def _rollout(draw: np.random.Generator, group: int, sample: int, *, step: int, began: int, mean: int, worker: int) -> Rollout:
    tokens = int(np.clip(draw.gamma(4, mean / 4), 4, 8 * mean))
    # Most tokens are nearly certain, some are not: half below 0.05 nat, a tail to 8.
    logprobs = -np.minimum(draw.gamma(0.35, 1.2, tokens), 20.0)
    spans = [step] if step == 0 or draw.random() < 0.7 else [step - 1, step]
    return Rollout(
        group=group,
        sample=sample,
        token_ids=_ids(draw, tokens),
        behaviour_logprobs=logprobs.astype(np.float32),
        loss_mask=np.ones(tokens, np.bool_),
        span_versions=np.array(spans, np.int32),
        span_starts=np.array([0, tokens // 3][: len(spans)], np.int32),
        finish="stop",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        started_ns=began,
        ended_ns=began + int(tokens * 2e6 + draw.integers(50_000_000)),
        worker=f"rollout-{worker}",
    )


def _ids(draw: np.random.Generator, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Token ids whose ranks follow Zipf's law, as words do."""
    ranks = np.exp(draw.random(count) * np.log(VOCABULARY)).astype(np.int64)
    return (ranks * 7919 % VOCABULARY).astype(np.int32)


def _text(ids: np.ndarray[Any, Any]) -> str:
    """A word of some letters for each id, always the same one."""
    return " ".join(format(int(one) * 2654435761 % 2**32 % 26**4, "x")[: 2 + int(one) % 5] for one in ids)


def _entry(entry: Entry, seq: int) -> Outgoing:
    told = replace(entry, seq=seq)
    value = ledger.encode(told)
    return Outgoing(topic=f"{RUN}.ledger", partition=0, key=None, headers=ledger.headers(told, run=RUN).encode(value), value=value)


def _of_group(topic: str, number: int, headers: Any, value: bytes) -> Outgoing:
    return Outgoing(topic=f"{RUN}.{topic}", partition=number % PARTITIONS, key=str(number).encode(), headers=headers, value=value)
