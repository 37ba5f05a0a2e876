"""A trainer by itself: its groups are in the log before it starts, so that a run takes a second and is the same every time."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.infra.log import Log
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.inspect.report.summary import collect
from penstock.pipeline.launch.create import create
from penstock.topics import ledger, prompts, weights
from penstock.topics.groups import Group, ScoredSample
from penstock.topics.wire.record import Outgoing
from tests.support import examples, page_records
from tests.support.a_run import outgoing, with_group
from tests.support.deaths import dying_at
from tests.support.examples import prompt_of, sample_of
from tests.support.least_config import merged
from tests.support.worker_set import LogLocation, WorkerSet, config_of

SAMPLES = 2
TOKENS = 6
PROMPT = np.array([10, 11, 12], np.int32)


def config_for(model: Path, directory: Path, **sections: Mapping[str, Any]) -> Config:
    """Six steps of two small groups, with a checkpoint after every second one."""
    defaults: dict[str, dict[str, Any]] = {
        "run": {"steps": 6, "seed": 7},
        "schedule": {"mode": "one_step_off", "prompts_per_step": 2, "samples_per_prompt": SAMPLES},
        "sampling": {"max_new_tokens": 8},
        "trainer": {"checkpoint_every": 2},
        "kafka": {"partitions": 2},
    }
    return config_of(model, directory, **merged(defaults, sections))


def group_of(number: int, *, version: int, outcome: str = "scored", tokens: int = TOKENS) -> Group:
    """A group whose tokens and rewards follow from its number."""
    drawn = np.random.default_rng(number)
    samples = []
    for sample in range(SAMPLES):
        ids, logprobs = drawn.integers(4, 90, tokens), np.full(tokens, -4.5, np.float32)
        rollout = sample_of(number, sample, ids, version=version, behaviour_logprobs=logprobs, finish="length")
        reward = 0.5 if outcome == "filtered" else float(sample + drawn.random())
        samples.append(ScoredSample(rollout=rollout, completion="?", reward=reward, components=(reward,)))
    prompt = prompt_of(number, samples_per_prompt=SAMPLES, prompt="1+2=", token_ids=PROMPT)
    reason = None if outcome == "scored" else "zero variance"
    return examples.group_of(prompt, samples, outcome=outcome, reason=reason, reward_names=("share",))


def write_groups(log: Log, run: str, found: Sequence[Group], *, partitions: int) -> None:
    """What a feeder and a scorer would have written of these groups."""
    sent: list[Outgoing] = []
    for group in found:
        prompt = prompt_of(
            group.group, slot=group.slot, min_version=group.min_version, samples_per_prompt=SAMPLES, row=group.row, prompt=group.prompt,
            token_ids=PROMPT,
        )  # fmt: skip
        first = outgoing(prompts, prompt, run=run, partition=group.group % partitions, key=str(group.group).encode())
        sent += [first, *with_group(replace(first, topic=f"{run}.groups"), group, run=run)]
    page_records.write(log, sent)


def written(log: Log, run: str, config: Config, found: Sequence[Group]) -> None:
    """Create a run with these groups."""
    create(config, log=log, run_id=run, notify=lambda _: None)
    write_groups(log, run, found, partitions=config.partitions)


def killed(place: LogLocation, run: str, fault: str) -> None:
    """Run a trainer until it dies at a fault point."""
    with WorkerSet(place, run) as worker_set, dying_at(fault) as dead:
        worker_set.start("trainer")
        worker_set.wait(dead.is_set)
        worker_set.abandon("trainer")


def stopped_after(place: LogLocation, run: str, *, steps: int) -> None:
    """Run a trainer until so many steps are done, and stop it."""
    with WorkerSet(place, run) as worker_set:
        worker_set.start("trainer")
        worker_set.wait(lambda: worker_set.report()["steps"] == steps)


def trained(place: LogLocation, run: str, *deaths: str) -> dict[str, Any]:
    """Run trainers to the end of the run, after one died at each of these fault points; returns what the run came to."""
    for fault in deaths:
        killed(place, run, fault)
    with WorkerSet(place, run) as worker_set:
        worker_set.start("trainer")
        worker_set.wait()
        return outcome_of(worker_set.log, run)


def outcome_of(log: Log, run: str) -> dict[str, Any]:
    """What a run came to, without anything that depends on clocks."""
    report = collect(log, run)
    tail = log.tail({(f"{run}.ledger", 0): "earliest", (f"{run}.weights", 0): "earliest"})
    records = tail.read_to_end(30.0)
    tail.close()
    entries = [ledger.read(record, run=run)[1] for record in records if record.topic.endswith("ledger")]
    digests = [ledger.digest(record.value) for record in records if record.topic.endswith("ledger")]
    assert [entry.previous for entry in entries] == [None, *digests[:-1]]
    manifests = [weights.read(record, run=run)[1] for record in records if record.topic.endswith("weights")]
    of_step = [(entry.step, entry.loss_bits, entry.grad_norm_bits, entry.metrics["dropped"]) for entry in entries if entry.kind == "step"]
    opened = next((entry.details for entry in entries if entry.kind == "run-opened"), None)
    return {
        "status": report["status"],
        "forward": json.loads(opened or "{}").get("fingerprint", {}).get("forward"),
        "digest": report["weights"]["digest"],
        "groups": report["groups"],
        "steps": of_step,
        "plans": [[planned.group for planned in entry.plan] for entry in entries if entry.kind == "step"],
        "stale": [group for entry in entries if entry.kind == "stale" for group in entry.groups],
        "versions": [(manifest.version, manifest.digest) for manifest in manifests],
        "kinds": Counter(entry.kind for entry in entries if entry.kind != "checkpoint"),
        "numbers": [entry.seq for entry in entries] == list(range(len(entries))),
    }


def digest_of(directory: Path) -> str:
    """One digest over all files below a directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()
