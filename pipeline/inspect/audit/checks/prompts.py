"""Checks on admission and on sample versions. Clocks are compared on one machine only."""

from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from itertools import groupby

from penstock.pipeline.inspect.audit.check import Violation, check
from penstock.pipeline.inspect.audit.checks.retention import Retention
from penstock.pipeline.inspect.audit.facts import Facts
from penstock.pipeline.inspect.audit.rules import DROPS


@check("prompt-numbers", "groups are numbered without gap, one prompt each", prompts=lambda facts: len(facts.prompts))
def numbers(facts: Facts) -> Iterator[Violation]:
    """Admitted groups are numbered without gaps, and each has one prompt."""
    first = facts.prompts.first
    for prompt in facts.prompts.later():
        text = f"group {prompt.group} has another prompt at {first[prompt.group].where}"
        yield Violation(text=text, group=prompt.group, where=prompt.where)
    # While the run is active, partitions end at different times: a group with an outcome was admitted well before.
    last = max(facts.outcomes.first if facts.closed is None else first, default=-1)
    low = min(Retention(facts).prompts_below, last + 1)
    retained = first.groups[bisect_left(first.groups, low) :]
    missing = next((number for number, group in enumerate(retained, start=low) if number != group), low + len(retained))
    if missing < last:
        yield Violation(text=f"no prompt of group {missing}, although group {last} was admitted", group=missing)


@check("prompt-arithmetic", "slot, oldest version and K follow from the schedule", prompts=lambda facts: len(facts.prompts.first))
def arithmetic(facts: Facts) -> Iterator[Violation]:
    """Slot and oldest version follow from the groups dropped so far, K from the configuration."""
    terms, stale, outcomes, retention = facts.terms, facts.stale(), facts.outcomes.first, Retention(facts)
    before, droppable, following = 0, 0, 0

    def may_be_dropped(group: int) -> bool:
        outcome = outcomes.get(group)
        return group in stale or (outcome is not None and outcome.outcome in DROPS) or retention.drop(group)

    for group, prompt in facts.prompts.first.items():
        droppable += sum(map(may_be_dropped, range(following, min(group, retention.prompts_below))))
        following = group + 1
        counted = group - prompt.slot
        violation = partial(Violation, group=group, where=prompt.where)
        # While the run is active, drops may be after the ends that were read: a group with an outcome was admitted well before.
        if counted > droppable and (facts.closed is not None or group in outcomes):
            yield violation(text=f"slot {prompt.slot} counts {counted} dropped groups, at most {droppable} were")
        elif counted < before:
            yield violation(text=f"slot {prompt.slot} counts {counted} dropped groups, an earlier prompt counted {before}")
        else:
            before = counted
        droppable += may_be_dropped(group)
        if prompt.min_version != (oldest := terms.min_version(prompt.slot)):
            yield violation(text=f"oldest version {prompt.min_version}, expected {oldest} for slot {prompt.slot}")
        if prompt.samples != terms.samples_per_prompt:
            yield violation(text=f"{prompt.samples} samples requested, the run has {terms.samples_per_prompt}")


@check("backpressure", "no prompt before the version that admits it", prompts=lambda facts: len(facts.prompts.first))
def backpressure(facts: Facts) -> Iterator[Violation]:
    """No prompt is admitted before the version that admits its slot, and none beyond the slots of the run's steps."""
    terms, published = facts.terms, facts.published_ns()
    needed_slots, comparable, retention = terms.steps * terms.prompts_per_step, one_clock(facts), Retention(facts)
    for group, prompt in facts.prompts.first.items():
        violation = partial(Violation, group=group, where=prompt.where)
        needed = terms.needed_version(prompt.slot)
        if prompt.slot >= needed_slots:
            yield violation(text=f"slot {prompt.slot}, the run's steps need {needed_slots} groups")
        elif needed >= 0 and needed not in published:
            if retention.version(needed):
                continue
            yield violation(text=f"admitted for slot {prompt.slot} of version {needed}, which was never published")
        elif needed >= 0 and comparable and prompt.created_ns < published[needed]:
            early = (published[needed] - prompt.created_ns) / 1e9
            text = f"admitted {early:.3f} s before version {needed} was written, which admits slot {prompt.slot}"
            yield violation(text=text, version=needed)


def one_clock(facts: Facts) -> bool:
    """True if feeder and trainer ran on one machine, so that their times can be compared."""
    if facts.truncated("metrics"):
        return False  # measurements of other workers may have been deleted
    hosts = {role: {worker.host for worker in facts.workers.values() if worker.role == role} for role in ("feeder", "trainer")}
    return len(hosts["feeder"]) == 1 and hosts["feeder"] == hosts["trainer"] and None not in hosts["feeder"]


@check("sample-versions", "samples come from versions that exist and their prompt allows", samples=lambda facts: len(facts.samples))
def versions(facts: Facts) -> Iterator[Violation]:
    """Samples are generated under versions that exist and that their prompt allows."""
    manifests, retention = facts.first_manifests(), Retention(facts)
    for group, samples in groupby(facts.samples, key=lambda sample: sample.group):
        prompt = facts.prompts.first.get(group)
        for sample in samples:
            violation = partial(Violation, group=group, where=sample.where)
            if prompt is not None and sample.version_min < prompt.min_version:
                text = (
                    f"sample {sample.sample} generated under version {sample.version_min}, its prompt allows {prompt.min_version} and later"
                )
                yield violation(text=text, version=sample.version_min)
            for version in {sample.version_min, sample.version_max} - manifests.keys():
                if not retention.version(version):
                    text = f"sample {sample.sample} generated under version {version}, which was never published"
                    yield violation(text=text, version=version)


CHECKS = (numbers, arithmetic, backpressure, versions)
