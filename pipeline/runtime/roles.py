"""The DAG as a table: who acts, which topics each role reads and writes, and the same as text and as Mermaid.

The rule: this table is the only place that says which module a role is; a role's module is imported by whoever runs it, by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One kind of worker."""

    name: str
    module: str
    """Where its `main(session)` is."""
    does: str
    reads: Mapping[str, str]
    """Topic -> what for."""
    writes: Mapping[str, str]
    """Topic -> what."""
    single: bool
    """Whether a run has one of it at most; the others may join and leave in any number."""
    extras: tuple[str, ...]
    """Extras of the wheel that its machine needs."""


_REPORTS = {"metrics": "what it does, once a second", "dead-letters": "records it cannot use"}
_FOLLOWS = {"ledger": "steps and the end of the run", "weights": "manifests of policy versions"}


def _role(name: str, *, does: str, reads: Mapping[str, str], writes: Mapping[str, str], single: bool, extras: tuple[str, ...]) -> Role:
    return Role(
        name=name,
        module=f"penstock.workers.{name}.worker",
        does=does,
        reads=MappingProxyType(dict(reads)),
        writes=MappingProxyType(dict(writes)),
        single=single,
        extras=extras,
    )


_ROLES = (
    _role(
        "feeder",
        does="turns the data set into prompts, as fast as the rules admit them",
        reads={
            "prompts": "what was admitted before",
            "groups": "headers: which groups ended, which were dropped",
            **_FOLLOWS,
            "metrics": "free slots",
        },
        writes={"prompts": "one prompt group to sample", "metrics": _REPORTS["metrics"]},
        single=True,
        extras=("data",),
    ),
    _role(
        "rollout",
        does="samples completions under the newest policy that a prompt allows",
        reads={"prompts": "what to sample", "rollouts": "what exists already in partitions it takes over", **_FOLLOWS},
        writes={"rollouts": "one finished sample", **_REPORTS},
        single=False,
        extras=("rollout",),
    ),
    _role(
        "scorer",
        does="runs the reward functions and decides how each group ends",
        reads={
            "prompts": "which groups are open",
            "rollouts": "their samples",
            "groups": "what is finished",
            "ledger": "the end of the run",
        },
        writes={"groups": "one group's outcome", **_REPORTS},
        single=False,
        extras=("rewards",),
    ),
    _role(
        "trainer",
        does="trains on scored groups, publishes policy versions and writes the run's one story",
        reads={
            "groups": "samples with rewards",
            "ledger": "what was done before",
            "weights": "versions that exist already",
            "metrics": "an evaluator's wish to end the run",
            "prompts": "headers, at the end: which groups nobody used",
        },
        writes={
            "ledger": "steps, stale groups, versions, the end",
            "weights": "manifests and chunks",
            **_REPORTS,
            "penstock.runs": "the run's status",
        },
        single=True,
        extras=("trainer",),
    ),
    _role(
        "evaluator",
        does="measures chosen versions on held-out prompts",
        reads={"weights": "manifests and chunks", "ledger": "the end of the run", "metrics": "what was measured before"},
        writes={"metrics": "accuracy by version"},
        single=True,
        extras=("rollout", "rewards"),
    ),
    _role(
        "tracker",
        does="copies the story and the measurements to MLflow and metrics.jsonl",
        reads={"ledger": "steps and versions", "metrics": "measurements", "groups": "headers: rewards of all scored samples"},
        writes={"metrics": _REPORTS["metrics"], "dead-letters": _REPORTS["dead-letters"]},
        single=True,
        extras=("tracking",),
    ),
)

ROLES: Mapping[str, Role] = MappingProxyType({role.name: role for role in _ROLES})

TOPICS = ("prompts", "rollouts", "groups", "weights", "ledger", "metrics", "dead-letters", "penstock.runs")
"""In the order in which a sample's life passes them."""


def readers(topic: str) -> list[str]:
    """Names of the roles that read a topic."""
    return [role.name for role in ROLES.values() if topic in role.reads]


def writers(topic: str) -> list[str]:
    """Names of the roles that write a topic."""
    return [role.name for role in ROLES.values() if topic in role.writes]


def as_table() -> list[dict[str, object]]:
    """The DAG as plain data, for `penstock graph --json`."""
    return [
        {
            "role": role.name,
            "module": role.module,
            "does": role.does,
            "reads": dict(role.reads),
            "writes": dict(role.writes),
            "single": role.single,
            "extras": list(role.extras),
        }
        for role in ROLES.values()
    ]


def as_text() -> str:
    """The DAG for a terminal: a paragraph per role, then who writes and reads each topic."""
    lines: list[str] = []
    for role in ROLES.values():
        lines.append(f"{role.name} ({'one' if role.single else 'any number'}): {role.does}")
        lines += [f"    <- {topic:<13} {what}" for topic, what in role.reads.items()]
        lines += [f"    -> {topic:<13} {what}" for topic, what in role.writes.items()]
    lines.append("")
    rows = [(_who(topic, writers(topic)), topic, _audience(topic)) for topic in TOPICS]
    width = max(len(who) for who, _, _ in rows)
    lines += [f"{who:>{width}} --> {topic:<13} --> {audience}" for who, topic, audience in rows]
    return "\n".join(lines)


def _who(topic: str, names: list[str]) -> str:
    return {"metrics": "every role", "dead-letters": "who reads a topic", "penstock.runs": "launcher, trainer"}.get(topic, ", ".join(names))


def _audience(topic: str) -> str:
    return {"dead-letters": "people (penstock topics)", "penstock.runs": "every role, once"}.get(topic) or ", ".join(readers(topic))


def as_mermaid() -> str:
    """The DAG as a Mermaid flow chart: roles are boxes, topics are cylinders; reports of every role are left out."""
    lines = ["flowchart LR"]
    lines += [f"    {role.name}[{role.name}]" for role in ROLES.values()]
    shown = [topic for topic in TOPICS if topic != "dead-letters"]
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
