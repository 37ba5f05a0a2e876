"""Repeats a recorded optimizer step and compares it with the ledger bit for bit."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock.pipeline.learner.policy_trainer import PolicyTrainer, Weights
from penstock.pipeline.learner.train_step import StepOutcome, double_bits
from penstock.topics.groups import Group
from penstock.topics.ledger import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A number of a repeated step that differs from the recorded one."""

    name: str
    found: Any
    recorded: Any
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """A repeated step."""

    entry: Entry
    outcome: StepOutcome
    weights: Weights
    differences: tuple[Difference, ...]
    """Empty if every number has the recorded bits."""


def repeat(policy: PolicyTrainer, entry: Entry, groups: Iterable[Group]) -> Repetition:
    """Train the groups of a recorded plan in the recorded micro-batches and compare every number of the step with the ledger."""
    step, planned = policy.step(recorded_ends=entry.boundaries), {member.group: member for member in entry.plan}
    for group in groups:
        step.add(group, planned.get(group.group))
    outcome = step.finish(learner_version=entry.version or 0)
    policy.steps_done += 1
    weights, differences = policy.weights(), compare(outcome, entry)
    if entry.digest is not None and weights.digest != entry.digest:
        differences.append(other_weights(weights.digest, entry.digest))
    return Repetition(entry=entry, outcome=outcome, weights=weights, differences=tuple(differences))


def compare(outcome: StepOutcome, entry: Entry) -> list[Difference]:
    """The numbers in which a repeated step differs from the recorded one; empty if all bits are equal."""
    pairs = {"loss": (outcome.loss, entry.loss_bits), "gradient norm": (outcome.grad_norm, entry.grad_norm_bits)}
    recorded = {"loss": entry.metrics.get("loss"), "gradient norm": entry.metrics.get("grad_norm")}
    differences = []
    for name, (number, bits) in pairs.items():
        if double_bits(number) != bits:
            text = f"{name} {number!r}, recorded {recorded[name]!r} (bits {double_bits(number)} and {bits})"
            differences.append(Difference(name=name, found=number, recorded=recorded[name], text=text))
    if outcome.boundaries != entry.boundaries:
        ends, expected = list(outcome.boundaries), list(entry.boundaries)
        text = f"micro-batches that end at {ends}, recorded {expected}"
        differences.append(Difference(name="boundaries", found=ends, recorded=expected, text=text))
    return differences


def other_weights(digest: str, recorded: str) -> Difference:
    """The difference between the digests of the weights after a step."""
    text = f"weights {digest[:16]}…, recorded {recorded[:16]}…"
    return Difference(name="weights digest", found=digest, recorded=recorded, text=text)
