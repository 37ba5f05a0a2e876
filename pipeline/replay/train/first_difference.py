"""The first step of a replay that is not the recorded one: in which numbers, in which tensors, on which groups.

The rule: what the log still has is looked up; what it has no more is said to be missing, never taken for equal.
"""

from typing import Any

from penstock.infra.errors import LogError
from penstock.pipeline.learner.repeat_step import Repetition, other_weights
from penstock.pipeline.replay.plan_reader import Found
from penstock.pipeline.replay.recording import Recording
from penstock.pipeline.replay.restore_policy import weights_of
from penstock.pipeline.replay.train import differing
from penstock.pipeline.scheduling import rules
from penstock.topics.ledger import Entry


def published_version(recording: Recording, entry: Entry) -> int | None:
    """The version that was published after a step, if one was."""
    done = (entry.step or 0) + 1
    per_version, steps = recording.config.schedule.steps_per_version, recording.planned_steps
    count = rules.versions_of if done == steps else rules.version_after
    version = count(done, steps_per_version=per_version)
    manifest = recording.story.manifests.get(version)
    return version if manifest is not None and manifest.step == done else None


def published_as(recording: Recording, repetition: Repetition) -> bool:
    """Whether the weights are those of the version that follows the step; True where there is none."""
    version = published_version(recording, repetition.entry)
    return version is None or recording.story.manifests[version].digest == repetition.weights.digest


def difference(recording: Recording, entry: Entry, altered: list[Found], repetition: Repetition | None) -> dict[str, Any]:
    """All there is to say of the first step that differs."""
    version = published_version(recording, entry)
    numbers = [] if repetition is None else list(repetition.differences)
    if repetition is not None and version is not None and not any(one.name == "weights digest" for one in numbers):
        recorded = recording.story.manifests[version].digest
        numbers += [other_weights(repetition.weights.digest, recorded)] if recorded != repetition.weights.digest else []
    tensors, note = [], None
    if repetition is not None and numbers:
        if version is None:
            note = "no version was published after this step: its tensors cannot be compared"
        else:
            try:
                tensors = differing.tensors(repetition.weights.tensors, weights_of(recording, version))
            except LogError as error:
                note = f"the tensors cannot be compared: {error}"
    concerned = {one.planned.group: one for one in altered}
    return {
        "step": entry.step,
        "version": entry.version,
        "cause": "records" if altered else "arithmetic",
        "numbers": [{"name": one.name, "found": one.found, "recorded": one.recorded, "text": one.text} for one in numbers],
        "tensors": tensors,
        "note": note,
        "groups": [
            {
                "group": planned.group,
                "partition": planned.partition,
                "offset": planned.offset,
                "problem": concerned[planned.group].problem if altered else None,
                "samples": _samples(recording, concerned[planned.group]) if altered else [],
            }
            for planned in entry.plan
            if not altered or planned.group in concerned
        ],
    }


def _samples(recording: Recording, found: Found) -> list[dict[str, Any]]:
    if found.group is None:
        return []
    return differing.samples(recording.log, recording.run, found.group, partition=found.planned.partition)
