"""Repeats a recorded optimizer step and compares it with the ledger bit for bit; tells whether its arithmetic has changed."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.infra.backends.base import Backend
from penstock.pipeline.config.load import Config
from penstock.pipeline.config.plugins import source_digest, split_options
from penstock.pipeline.learner.policy_trainer import PolicyTrainer, Weights
from penstock.pipeline.learner.train_step import StepOutcome, double_bits
from penstock.topics.groups import Group
from penstock.topics.ledger import Entry


def arithmetic_of(backend: Backend, config: Config) -> dict[str, str | int]:
    """The backend's fingerprint, with a digest of the source of each user function."""
    names = {"algorithm.loss": config.algorithm.loss, "algorithm.advantage": config.advantage}
    return backend.fingerprint() | {key: source_digest(split_options(name)[0])[:16] for key, name in names.items() if ":" in name}


def changed_arithmetic(entries: Sequence[Entry], now: Mapping[str, str | int]) -> dict[str, tuple[Any, Any]]:
    """Differences from the newest fingerprint in the ledger: name -> (recorded, now)."""
    details = [json.loads(entry.details or "{}") for entry in entries if entry.kind in ("run-opened", "rebased")]
    recorded: Mapping[str, Any] = details[-1].get("fingerprint", {}) if details else {}
    if recorded and "forward" in now:
        recorded = {"forward": "padded rows, logits whole", **recorded}  # the default of fingerprints without this key
    return {name: (recorded[name], now.get(name)) for name in recorded if recorded[name] != now.get(name)}


def rebases(config: Config, changed: Mapping[str, Any], now: Mapping[str, str | int]) -> bool:
    """True if a trainer continues after a repeated step differs: as configured, by default on GPUs and under changed arithmetic."""
    action = config.trainer.on_mismatch
    return action == "rebase" if action is not None else bool(changed) or now.get("device", "cpu") != "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A number of a repeated step that differs from the ledger."""

    name: str
    found: Any
    recorded: Any
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Result of a repeated step, with its differences from the ledger."""

    entry: Entry
    outcome: StepOutcome
    weights: Weights
    differences: tuple[Difference, ...]
    """Empty if every number has the recorded bits."""


def repeat(policy: PolicyTrainer, entry: Entry, groups: Iterable[Group]) -> Repetition:
    """Train on the groups of a recorded plan in the recorded micro-batches, and compare all numbers of the step with the ledger."""
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
        text = f"micro-batch boundaries {ends} instead of the recorded {expected}"
        differences.append(Difference(name="boundaries", found=ends, recorded=expected, text=text))
    return differences


def other_weights(digest: str, recorded: str) -> Difference:
    """The difference between two digests of the weights after a step."""
    text = f"weights {digest[:16]}…, recorded {recorded[:16]}…"
    return Difference(name="weights digest", found=digest, recorded=recorded, text=text)
