"""The roles of a run in one table: order, colour, number of workers, topics read and written; also as a graph, and as Kafka permissions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.topics import catalogue

if TYPE_CHECKING:
    from penstock.pipeline.config.load import Config

Count = Callable[["Config"], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A kind of worker: its topics, rank in the order, and number of workers."""

    name: str
    does: str
    reads: Mapping[str, str]
    """Topic -> purpose of reading it."""
    writes: Mapping[str, str]
    """Topic -> records written to it."""
    extras: tuple[str, ...]
    """Extras of the wheel that its machine needs."""
    colour: str = ""
    """In the live view, as rich names it; empty for the terminal's own."""
    single: bool = True
    """True if a run has at most one; the others may join and leave in any number."""
    on_sample_path: bool = True
    """True if samples pass through it. The others are helpers: a run finishes without them, and they finish their work after its end."""
    keeps_offsets: bool = False
    """True if it has a consumer group, `RUN.NAME`."""
    writes_alone: bool = False
    """True if its workers write transactions; each under an id of its own, `RUN.WORKER`."""
    workers: Count = lambda _: 1
    """Workers that `penstock run` starts."""
    threads: Count = lambda _: 1
    """CPU threads of one worker."""
    gpus: Count = lambda _: 0
    """GPUs of one worker, if the configuration places GPUs."""
    in_ranks: bool = False
    """True if a worker may be several processes: one whose RANK is above 0 runs `follow` of the role's module instead of `main`."""

    @property
    def module(self) -> str:
        return f"penstock.workers.{self.name}.worker"

    def worker(self, slot: int) -> str:
        """Name of the worker with number `slot`, such as `rollout-1`."""
        return self.name if self.single else f"{self.name}-{slot}"


_METRICS = {"metrics": "status and metrics, once a second"}
_REPORTS = {**_METRICS, "dead-letters": "records that cannot be used"}
_JOINS = {"run": "the run's configuration", "penstock.runs": "that the run exists"}
_STARTS = {"dead-letters": "records that are dead letters already", **_JOINS}
_LEASE = "the owner of the writer lease"
_TAKES = "that this process holds the writer lease"
_FOLLOWS = {"ledger": "steps and the end of the run", "weights": "manifests of policy versions"}

_TABLE = (
    Role(
        name="feeder",
        does="turns the data set into prompts, as fast as the rules admit them",
        colour="cyan",
        keeps_offsets=True,
        writes_alone=True,
        extras=("data",),
        reads={
            "prompts": "what was admitted before",
            "groups": "headers: which groups ended, which were dropped",
            **_FOLLOWS,
            "metrics": "free slots",
            "control-feeder": _LEASE,
            **_STARTS,
        },
        writes={"prompts": "one prompt group to sample", "control-feeder": f"{_TAKES}, that all prompts are admitted", **_REPORTS},
    ),
    Role(
        name="environment",
        does="runs episodes of several turns, and requests the policy's turns from the rollout workers",
        colour="bright_magenta",
        keeps_offsets=True,
        extras=("data", "agents"),
        single=False,
        workers=lambda config: config.environment_workers,
        reads={
            "prompts": "what to play",
            "replies": "the completion of a turn",
            "rollouts": "what exists already in partitions it takes over",
            **_FOLLOWS,
            **_STARTS,
        },
        writes={"calls": "one turn to generate", "rollouts": "finished trajectories", **_REPORTS},
    ),
    Role(
        name="rollout",
        does="samples completions, or turns of trajectories, under the newest policy that a prompt allows",
        colour="magenta",
        keeps_offsets=True,
        extras=("rollout",),
        single=False,
        workers=lambda config: config.rollout.workers,
        threads=lambda config: config.rollout.threads,
        gpus=lambda config: config.rollout.gpus_per_worker,
        reads={
            "prompts": "what to sample",
            "calls": "turns to generate, if environments have workers of their own",
            "rollouts": "what exists already in partitions it takes over",
            "replies": "existing replies in partitions it takes over",
            **_FOLLOWS,
            "metrics": "earlier evaluations, if they use its engine",
            "control-rollout": "how accurate that was",
            **_STARTS,
        },
        writes={
            "rollouts": "finished samples",
            "replies": "the completion of a turn",
            "control-rollout": "accuracy by version, the request to end the run",
            **_REPORTS,
        },
    ),
    Role(
        name="scorer",
        does="runs the reward functions and decides how each group ends",
        colour="yellow",
        keeps_offsets=True,
        writes_alone=True,
        extras=("rewards",),
        single=False,
        workers=lambda config: config.scorer.workers,
        reads={
            "prompts": "which groups are open",
            "rollouts": "their samples",
            "groups": "what is finished",
            **_FOLLOWS,
            "metrics": "whether rollout workers report",
            "control-scorer": _LEASE,
            **_STARTS,
        },
        writes={"groups": "one group's outcome", "control-scorer": _TAKES, **_REPORTS},
    ),
    Role(
        name="trainer",
        does="trains on scored groups, publishes policy versions and writes the ledger",
        colour="green",
        writes_alone=True,
        in_ranks=True,
        extras=("trainer",),
        threads=lambda config: config.trainer.threads,
        gpus=lambda config: config.trainer.gpus,
        reads={
            "groups": "samples with rewards",
            "ledger": "what was done before",
            "weights": "versions that exist already",
            "control-feeder": "that all prompts are admitted",
            "control-evaluator": "which version is best, the request to end the run",
            "control-rollout": "the same, if evaluations use a rollout worker's engine",
            "control-trainer": _LEASE,
            **_STARTS,
        },
        writes={
            "ledger": "steps, stale groups, versions, the end",
            "weights": "manifests and chunks",
            "control-trainer": _TAKES,
            **_REPORTS,
            "penstock.runs": "the run's status",
        },
    ),
    Role(
        name="evaluator",
        does="measures chosen versions on held-out prompts",
        colour="blue",
        extras=("rollout", "rewards"),
        on_sample_path=False,
        workers=lambda config: int(bool(config.eval_sources) and not config.evaluates_on_rollout_engine),
        gpus=lambda config: config.rollout.gpus_per_worker,
        reads={
            "rollouts": "the first samples",
            "weights": "manifests and chunks",
            "ledger": "the end of the run",
            "metrics": "what was measured before",
            "control-evaluator": "how accurate that was",
            **_JOINS,
        },
        writes={"metrics": "accuracy by version", "control-evaluator": "the same, the request to end the run"},
    ),
    Role(
        name="tracker",
        does="copies the ledger and the measurements to MLflow and metrics.jsonl; at the end, writes the report",
        extras=("tracking",),
        on_sample_path=False,
        reads={
            "ledger": "steps and versions",
            "metrics": "measurements",
            "groups": "headers: rewards of all scored samples",
            "prompts": "headers: which groups are open",
            "rollouts": "at the end, for the report",
            "dead-letters": "the number of dead letters",
            **_JOINS,
        },
        writes={"state": "what the run's topics add up to", **_REPORTS},
    ),
)

ROLES: Mapping[str, Role] = {role.name: role for role in _TABLE}
"""In the order in which a sample passes them, helpers last: also the order in which a run's workers are shown, started and stopped."""

HELPERS = tuple(role.name for role in _TABLE if not role.on_sample_path)

TOPICS = (*catalogue.TOPICS, *catalogue.TURNS, *catalogue.CONTROL, catalogue.STATE, catalogue.RUNS_TOPIC)
"""In the order in which a sample's life passes them."""


def order(role: str) -> int:
    """Sort key of a role: its index in the table, unknown roles last."""
    return [*ROLES, role].index(role)


def readers(topic: str) -> list[str]:
    return [role.name for role in ROLES.values() if topic in role.reads]


def writers(topic: str) -> list[str]:
    return [role.name for role in ROLES.values() if topic in role.writes]


def generating_roles() -> list[str]:
    """Names of the roles whose workers take prompts and publish samples."""
    return writers("rollouts")


def as_table() -> list[dict[str, object]]:
    """The graph of roles and topics as plain data, for `penstock graph --json`."""
    names = ("module", "does", "reads", "writes", "single")
    return [
        {"role": role.name, **{name: getattr(role, name) for name in names}, "extras": role.extras, "on_sample_path": role.on_sample_path}
        for role in ROLES.values()
    ]


def as_text() -> str:
    """The graph for a terminal: a paragraph per role, then the writers and readers of each topic."""
    lines: list[str] = []
    for role in ROLES.values():
        lines.append(f"{role.name} ({'one' if role.single else 'any number'}): {role.does}")
        lines += [f"    <- {topic:<13} {what}" for topic, what in role.reads.items()]
        lines += [f"    -> {topic:<13} {what}" for topic, what in role.writes.items()]
    lines.append("")
    rows = [(_WRITERS.get(topic, ", ".join(writers(topic))), topic, _READERS.get(topic) or ", ".join(readers(topic))) for topic in TOPICS]
    width = max(len(who) for who, _, _ in rows)
    lines += [f"{who:>{width}} --> {topic:<13} --> {audience}" for who, topic, audience in rows]
    return "\n".join(lines)


_WRITERS = {
    "run": "launcher",
    "metrics": "every role",
    "control-launcher": "launcher",
    "dead-letters": "who reads a topic",
    "penstock.runs": "launcher, trainer",
}
_READERS = {
    "run": "every role, once",
    "control-launcher": "launcher",
    "state": "people (penstock status)",
    "dead-letters": "people (penstock topics)",
    "penstock.runs": "every role, once",
}


def as_mermaid() -> str:
    """The graph as a Mermaid flow chart: roles are boxes, topics are cylinders; topics that every role reports to are omitted."""
    lines = ["flowchart LR"]
    lines += [f"    {role.name}[{role.name}]" for role in ROLES.values()]
    shown = [topic for topic in TOPICS if topic not in ("dead-letters", *catalogue.CONTROL, catalogue.STATE)]
    lines += [f"    {_node(topic)}[({topic})]" for topic in shown]
    for role in ROLES.values():
        # Every role reports to metrics: one arrow from each would hide the flow, the evaluator's is its result.
        lines += [
            f"    {role.name} --> {_node(topic)}"
            for topic in role.writes
            if topic in shown and (topic != "metrics" or role.name == "evaluator")
        ]
        lines += [f"    {_node(topic)} --> {role.name}" for topic in role.reads if topic in shown]
    return "\n".join(lines)


def _node(topic: str) -> str:
    return f"t_{topic.replace('-', '_').replace('.', '_')}"


LAUNCHER, READER = "launcher", "reader"
"""Users who create and start runs, and users who only read, with every command of each."""


@dataclass(frozen=True, slots=True, order=True)
class AclRule:
    """An operation that a user may perform on a resource; READ and WRITE imply DESCRIBE, an idempotent producer needs no other."""

    resource: str
    """topic, group or transactional-id."""
    name: str
    pattern: str
    """literal, or prefixed: every name with this prefix."""
    operation: str


def _acl_rules_of(role: Role, run: str) -> list[AclRule]:
    """The permissions that the workers of a role need."""
    grants = [AclRule("topic", _kafka_name(run, topic), "literal", "READ") for topic in role.reads]
    grants.append(AclRule("topic", f"{run}.", "prefixed", "DESCRIBE"))  # where topics end, so as to read all of them up to one moment
    grants += [AclRule("topic", _kafka_name(run, topic), "literal", "WRITE") for topic in role.writes]
    if role.keeps_offsets:
        grants.append(AclRule("group", f"{run}.{role.name}", "literal", "READ"))
    if role.writes_alone:  # a role of many workers has an id for each
        pattern = "literal" if role.single else "prefixed"
        grants.append(AclRule("transactional-id", f"{run}.{role.name}", pattern, "WRITE"))
    return sorted(grants)


def acl_rules(run: str) -> dict[str, list[AclRule]]:
    """Name of a role, `LAUNCHER` or `READER` -> the permissions that its workers or users need for this run."""
    own = f"{run}."
    looks = [AclRule("topic", own, "prefixed", "READ"), AclRule("topic", catalogue.RUNS_TOPIC, "literal", "READ")]
    # librdkafka, which exports and audits, describes its group although it joins none.
    looks += [AclRule("group", name, "literal", "DESCRIBE") for name in (f"{run}.audit", "penstock-bulk")]
    launches = [AclRule("topic", own, "prefixed", operation) for operation in ("CREATE", "DESCRIBE_CONFIGS")]
    launches += [AclRule("topic", catalogue.RUNS_TOPIC, "literal", operation) for operation in ("CREATE", "DESCRIBE_CONFIGS", "WRITE")]
    launches += [AclRule("topic", f"{run}.{topic}", "literal", "WRITE") for topic in ("run", "control-launcher")]
    launches += [AclRule("transactional-id", f"{run}.{LAUNCHER}", "literal", "WRITE")]
    grants = {role.name: _acl_rules_of(role, run) for role in ROLES.values()}
    return {LAUNCHER: sorted([*looks, *launches]), **grants, READER: sorted(looks)}


def as_acl_command(rule: AclRule, *, user: str) -> str:
    """The command of Kafka's own tool that adds a rule."""
    name = f"--{rule.resource} '{rule.name}' --resource-pattern-type {rule.pattern}"
    return f"kafka-acls.sh --add --allow-principal 'User:{user}' --operation {rule.operation} {name}"


def _kafka_name(run: str, topic: str) -> str:
    assert topic in TOPICS, topic
    return topic if topic == catalogue.RUNS_TOPIC else f"{run}.{topic}"
