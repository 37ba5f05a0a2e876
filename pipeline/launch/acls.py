"""Kafka permissions that each role of a run needs, from the table of roles.

Each role gets only what it needs. Reading and writing imply DESCRIBE; an idempotent producer needs no permission of its own.
"""

from dataclasses import dataclass

from penstock.pipeline.runtime.roles import ROLES, TOPICS, Role
from penstock.topics.catalogue import RUNS_TOPIC

LAUNCHER, READER = "launcher", "reader"
"""Users who create and start runs, and users who only read, with every command of each."""


@dataclass(frozen=True, slots=True, order=True)
class Rule:
    """One operation that is allowed on one resource."""

    resource: str
    """topic, group or transactional-id."""
    name: str
    pattern: str
    """literal, or prefixed: every name with this prefix."""
    operation: str


def rules_of(role: Role, run: str) -> list[Rule]:
    """The rules of one role of a run."""
    grants = [Rule("topic", _kafka_name(run, topic), "literal", "READ") for topic in role.reads]
    grants.append(Rule("topic", f"{run}.", "prefixed", "DESCRIBE"))  # where topics end, so as to read all of them up to one moment
    grants += [Rule("topic", _kafka_name(run, topic), "literal", "WRITE") for topic in role.writes]
    if role.keeps_offsets:
        grants.append(Rule("group", f"{run}.{role.name}", "literal", "READ"))
    if role.writes_alone:  # a role of many workers has an id for each
        pattern = "literal" if role.single else "prefixed"
        grants.append(Rule("transactional-id", f"{run}.{role.name}", pattern, "WRITE"))
    return sorted(grants)


def all_rules(run: str) -> dict[str, list[Rule]]:
    """The rules of every role, of who launches, and of who looks."""
    own = f"{run}."
    looks = [Rule("topic", own, "prefixed", "READ"), Rule("topic", RUNS_TOPIC, "literal", "READ")]
    # librdkafka, which exports and audits, describes its group although it joins none.
    looks += [Rule("group", name, "literal", "DESCRIBE") for name in (f"{run}.audit", "penstock-bulk")]
    launches = [Rule("topic", own, "prefixed", operation) for operation in ("CREATE", "DESCRIBE_CONFIGS")]
    launches += [Rule("topic", RUNS_TOPIC, "literal", operation) for operation in ("CREATE", "DESCRIBE_CONFIGS", "WRITE")]
    launches += [Rule("topic", f"{run}.{topic}", "literal", "WRITE") for topic in ("run", "control-launcher")]
    launches += [Rule("transactional-id", f"{run}.{LAUNCHER}", "literal", "WRITE")]
    grants = {role.name: rules_of(role, run) for role in ROLES.values()}
    return {LAUNCHER: sorted([*looks, *launches]), **grants, READER: sorted(looks)}


def as_command(rule: Rule, *, user: str) -> str:
    """The arguments of Kafka's own tool that add a rule."""
    name = f"--{rule.resource} '{rule.name}' --resource-pattern-type {rule.pattern}"
    return f"kafka-acls.sh --add --allow-principal 'User:{user}' --operation {rule.operation} {name}"


def _kafka_name(run: str, topic: str) -> str:
    assert topic in TOPICS, topic
    return topic if topic == RUNS_TOPIC else f"{run}.{topic}"
