"""Bytes that a run moves through its brokers, by topic, for a number of rollout workers: network, disk, partitions, checkpoints."""

import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from penstock.infra.tensors.parameter_count import parameters
from penstock.pipeline.config.load import with_values
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.inspect.records.runs import size
from penstock.pipeline.launch.check.memory import adapter_bytes, shape_in
from penstock.pipeline.launch.check.sizes import Growth, delta_share
from penstock.pipeline.launch.planning.rendering import table
from penstock.pipeline.runtime.reporting.reporter import STATUS_EVERY_S
from penstock.pipeline.runtime.roles import ROLES
from penstock.topics import groups, ledger, metrics, prompts, rollouts
from penstock.topics.catalogue import topics_of
from penstock.topics.groups import Group, ScoredSample
from penstock.topics.ledger import Entry, Planned
from penstock.topics.metrics import TRAIN, WORKER, Measurement
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout
from penstock.topics.wire.headers import Headers

TOKEN_CHARACTERS = 4
"""Characters of text in a token."""
FRAME_BYTES = 150
"""Bytes that a record takes on the wire and on disk besides its headers and value: a batch header and the marker of a transaction."""
POSITION_BYTES = 20
"""Bytes that one partition's offset takes in the resume point of a step."""
NOW_NS = 1_800_000_000_000_000_000
RUN = "a-run-of-usual-name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Bytes of one topic, for one replica."""

    topic: str
    step: float
    """Bytes written per optimizer step."""
    second: float
    """Bytes written per second."""
    readers: float
    """Number of times that each byte is read."""
    disk: float
    """On disk at the end of the run."""


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """The load that a run with one step per `step_s` seconds puts on its brokers."""

    config: Config
    step_s: float
    machines: int
    """Machines with rollout workers: those of one machine share a copy of each version."""
    prompt_tokens: int
    tokens: int
    """Mean tokens of a completion."""
    dropped: float = 0.0
    """Share of groups that are not trained."""
    delta: float | None = None
    """Size of a delta relative to the full version; None estimates it."""

    @property
    def steps(self) -> int:
        """Number of steps; 1,000 if the configuration has epochs instead."""
        return self.config.run.steps or 1000

    @cached_property
    def growth(self) -> Growth | None:
        """Bytes of versions and checkpoints; None if the model's folder has no weights."""
        config, count = self.config, parameters(self.config.model_directory)
        share = delta_share(config.trainer.dtype, config.trainer.lr) if self.delta is None else self.delta
        if count is None:
            return None
        return Growth(config=config, count=count, share=share, adapters=adapter_bytes(config, shape_in(config.model_directory)))

    @property
    def version_bytes(self) -> float:
        """Average bytes of a version, over full snapshots and deltas."""
        if self.growth is None:
            return 0.0
        everything = replace(self.growth, config=with_values(self.config, "weights", keep="all"))
        return (everything.weights(1000 * self.config.schedule.steps_per_version) - everything.whole) / 1000

    @property
    def checkpoint_step(self) -> float:
        """Bytes of checkpoints per step."""
        every = self.config.trainer.checkpoint_every
        return 0.0 if self.growth is None or not every else self.growth.checkpoints(1) / every

    def loads(self) -> list[Load]:
        """Loads of the topics that grow with the run."""
        config, schedule = self.config, self.config.rules
        prompt, samples, outcome = self._group_records()
        admitted = schedule.prompts_per_step / (1 - self.dropped)
        workers = {role.name: role.workers(config) for role in ROLES.values()}
        entries = self._entry("step", plan=schedule.prompts_per_step) + self._entry("version", plan=0) / schedule.steps_per_version
        statuses = sum(count * self._status(role) for role, count in workers.items() if count) / STATUS_EVERY_S
        rows = [
            ("prompts", admitted * prompt, 0.0, 3),
            ("rollouts", admitted * samples, 0.0, 1),
            ("groups", admitted * outcome, 0.0, 3),
            ("weights", self.version_bytes / schedule.steps_per_version, 0.0, self.machines + workers["evaluator"] / config.eval.every),
            ("ledger", entries + POSITION_BYTES * config.partitions, 0.0, sum(workers.values())),
            ("metrics", 0.0, statuses, 2 + workers["scorer"]),
        ]
        return [
            Load(
                topic=topic, step=step, second=step / self.step_s + second, readers=readers,
                disk=self._disk(topic, step) + second * self.steps * self.step_s,
            )
            for topic, step, second, readers in rows
        ]  # fmt: skip

    def _disk(self, topic: str, step: float) -> float:
        """Bytes of a topic that remain on disk at the end, after retention."""
        keep, every = self.config.kafka.keep_steps, self.config.trainer.checkpoint_every
        if topic == "weights":
            return 0.0 if self.growth is None else float(self.growth.weights(self.steps))
        if keep is None or topic == "ledger":
            return step * self.steps
        return step * min(self.steps, keep + 2 * every) + self.config.partitions * (self.config.sample_segment_bytes or 0)

    def _group_records(self) -> tuple[float, float, float]:
        """Bytes of a group's prompt, of its samples in `rollouts`, and of its outcome."""
        schedule, text = self.config.rules, "x" * TOKEN_CHARACTERS
        count, functions = schedule.samples_per_prompt, tuple(self.config.reward.functions)
        ids = np.zeros(self.prompt_tokens, np.int32)
        prompt = Prompt(
            group=10**5, slot=10**5, min_version=10**3, samples_per_prompt=count, epoch=1, row=10**4, prompt=text * self.prompt_tokens,
            messages=None, token_ids=ids, columns=json.dumps({"answer": text}), created_ns=NOW_NS,
        )  # fmt: skip
        samples = [
            Rollout(
                group=prompt.group, sample=number, token_ids=np.zeros(self.tokens, np.int32),
                behaviour_logprobs=np.zeros(self.tokens, np.float32), loss_mask=np.ones(self.tokens, np.bool_),
                span_versions=np.array([10**3], np.int32), span_starts=np.array([0], np.int32), finish="stop", temperature=1.0, top_p=1.0,
                top_k=0, started_ns=NOW_NS, ended_ns=NOW_NS, worker="rollout-0",
            )
            for number in range(count)
        ]  # fmt: skip
        scored = [
            ScoredSample(rollout=sample, completion=text * self.tokens, reward=1.0, components=(1.0,) * len(functions))
            for sample in samples
        ]
        group = Group(
            group=prompt.group, outcome="scored", reason=None, slot=prompt.slot, min_version=prompt.min_version, samples_per_prompt=count,
            epoch=1, row=prompt.row, prompt=prompt.prompt, prompt_ids=ids, columns=prompt.columns, reward_names=functions,
            reward_weights=(1.0,) * len(functions), samples=tuple(scored), created_ns=NOW_NS, scored_ns=NOW_NS, reward_ns=10**6,
        )  # fmt: skip
        together = schedule.stale_in_hand == "continue" or not self.config.engine.continuous_batching
        batches = list(rollouts.batches(samples, max_samples=rollouts.MAX_SAMPLES if together else 1))
        return (
            _bytes(prompts.headers(prompt, run=RUN), prompts.encode(prompt)),
            sum(_bytes(rollouts.headers(*batch, run=RUN), rollouts.encode(*batch)) for batch in batches),
            sum(_bytes(headers, value) for headers, value in groups.encode_parts(group, run=RUN, worker="scorer-0")),
        )

    def _entry(self, kind: ledger.EntryKind, *, plan: int) -> float:
        """Bytes of a ledger entry with a plan of this number of groups."""
        planned = tuple(Planned(group=10**5, sha256="0" * 64, partition=1, offset=10**5) for _ in range(plan))
        figures = dict.fromkeys(TRAIN, 1.0) if plan else {}
        entry = Entry(seq=1, kind=kind, time_ns=NOW_NS, step=1, version=1, plan=planned, boundaries=(1,), digest="0" * 64, metrics=figures)
        return _bytes(ledger.headers(entry, run=RUN), ledger.encode(entry))

    def _status(self, role: str) -> float:
        """Bytes of a status record of a worker, with all metrics of its role."""
        own = {"rollout": ("rollout", "engine"), "environment": ("environments",)}.get(role, (role,))
        names = [name for name, text in WORKER.items() if ": " not in text or text.partition(":")[0] in own]
        status = Measurement(
            worker=f"{role}-0", role=role, incarnation="0" * 32, seq=1, kind="status", time_ns=NOW_NS, values=dict.fromkeys(names, 1.0),
            labels={"doing": "x" * 40, "activity": "busy", "host": "x" * 12, "pid": "12345"},
        )  # fmt: skip
        return _bytes(metrics.headers(status, run=RUN), metrics.encode(status))


def _bytes(headers: Headers, value: bytes) -> float:
    """Bytes of a record on the wire."""
    return FRAME_BYTES + len(value) + sum(len(name) + len(text) + 2 for name, text in headers.encode(value))


def as_json(plan: ClusterPlan) -> dict[str, Any]:
    """The plan as plain data; sizes in bytes."""
    config, loads = plan.config, plan.loads()
    specs = topics_of(RUN, partitions=config.partitions, weight_partitions=config.weight_partitions, turns=config.turns_by_log)
    written = sum(load.second for load in loads)
    return {
        "rollout_workers": config.rollout.workers,
        "machines": plan.machines,
        "steps": plan.steps,
        "step_s": plan.step_s,
        "topics": [asdict(load) for load in loads],
        "written_per_s": written,
        "read_per_s": sum(load.second * load.readers for load in loads),
        "read_by_machine_per_s": sum(load.second for load in loads if load.topic in ("weights", "ledger")),
        "replicas": (replicas := config.kafka.replication_factor or (1 if config.kafka.bootstrap == "embedded" else 3)),
        "copied_per_s": (replicas - 1) * written,
        "disk": replicas * sum(load.disk for load in loads),
        "partitions": replicas * sum(spec.partitions for spec in specs.values()),
        "checkpoints_per_s": plan.checkpoint_step / plan.step_s,
    }


def as_text(plan: ClusterPlan) -> str:
    """The plan as text: a table of topics, and the load on brokers and disks."""
    figures = as_json(plan)
    rows = [
        (
            load.topic, size(load.step), f"{size(load.second)}/s", f"{load.readers:g}", f"{size(load.second * load.readers)}/s",
            size(load.disk),
        )
        for load in plan.loads()
    ]  # fmt: skip
    copies = f"{figures['replicas']} replica{'s' if figures['replicas'] > 1 else ''}"
    lines = [
        f"{figures['rollout_workers']} rollout workers on {plan.machines} machines; {plan.steps} steps, one every {plan.step_s:g} s; "
        f"completions of {plan.tokens} tokens on average, prompts of {plan.prompt_tokens}",
        table(("topic", "a step", "written", "readers", "read", "on disk"), rows),
        f"brokers: {size(figures['written_per_s'])}/s in from workers, {size(figures['copied_per_s'])}/s between brokers, "
        f"{size(figures['read_per_s'])}/s out to workers, of that {size(figures['read_by_machine_per_s'])}/s to each machine",
        f"disk: {size(figures['disk'])} with {copies} after {plan.steps} steps; partitions: {figures['partitions']:,} with {copies}",
        f"checkpoints: {size(figures['checkpoints_per_s'])}/s on average to trainer.checkpoint_dir",
    ]
    if plan.growth is None:
        lines.append("weights and checkpoints are missing here: the model's folder has no safetensors file")
    return "\n".join(lines) + "\n"
