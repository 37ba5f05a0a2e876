"""The first step of a replay that is not the recorded one: in which numbers, in which tensors, on which groups and samples.

The rule: two numbers are the same when their bits are, and differences are counted before they are measured. What the log has no more is
said to be missing, never taken for equal.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.infra.errors import LogError
from penstock.infra.tensors.stream import ITEM_BYTES, TensorBytes
from penstock.pipeline.learner.repeat_step import Repetition, other_weights
from penstock.pipeline.replay.plan_reader import Found
from penstock.pipeline.replay.recording import Recording
from penstock.pipeline.replay.restore_policy import weights_of
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.pipeline.scheduling import rules
from penstock.topics.ledger import Entry
from penstock.topics.rollouts import Rollout

FLOATS: Mapping[str, np.dtype[Any]] = {"float64": np.dtype("<f8"), "float32": np.dtype("<f4"), "float16": np.dtype("<f2")}
SHOWN = 8
"""Places named of a sample that differs in many."""


def published_version(recording: Recording, entry: Entry) -> int | None:
    """The version that was published after a step, if one was."""
    done = (entry.step or 0) + 1
    per_version, steps = recording.config.schedule.steps_per_version, recording.planned_steps
    count = rules.versions_of if done == steps else rules.version_after
    version = count(done, steps_per_version=per_version)
    manifest = recording.ledger_state.manifests.get(version)
    return version if manifest is not None and manifest.step == done else None


def published_as(recording: Recording, repetition: Repetition) -> bool:
    """True if the weights are those of the version published after the step, or none was, or it was published after a rebase there."""
    version = published_version(recording, repetition.entry)
    if version is None:
        return True
    manifest = recording.ledger_state.manifests[version]
    rebased = any(entry.kind == "rebased" and (entry.step, entry.digest) == (manifest.step, manifest.digest) for entry in recording.entries)
    return rebased or manifest.digest == repetition.weights.digest


def difference(recording: Recording, entry: Entry, altered: list[Found], repetition: Repetition | None) -> dict[str, Any]:
    """All there is to say of the first step that differs."""
    version = published_version(recording, entry)
    numbers = [] if repetition is None else list(repetition.differences)
    if repetition is not None and version is not None and not any(number.name == "weights digest" for number in numbers):
        recorded = recording.ledger_state.manifests[version].digest
        numbers += [other_weights(repetition.weights.digest, recorded)] if recorded != repetition.weights.digest else []
    tensors, note = [], None
    if repetition is not None and numbers:
        if version is None:
            note = "no version was published after this step: its tensors cannot be compared"
        else:
            try:
                tensors = differing_tensors(repetition.weights.tensors, weights_of(recording, version))
            except LogError as error:
                note = f"the tensors cannot be compared: {error}"
    concerned = {member.planned.group: member for member in altered}
    return {
        "step": entry.step,
        "version": entry.version,
        "cause": "records" if altered else "arithmetic",
        "numbers": [{name: getattr(number, name) for name in ("name", "found", "recorded", "text")} for number in numbers],
        "tensors": tensors,
        "note": note,
        "groups": [
            {
                "group": planned.group,
                "partition": planned.partition,
                "offset": planned.offset,
                "problem": concerned[planned.group].problem if altered else None,
                "samples": _differing_samples(recording, concerned[planned.group]) if altered else [],
            }
            for planned in entry.plan
            if not altered or planned.group in concerned
        ],
    }


def differing_tensors(weights: Iterable[TensorBytes], recorded: Iterable[TensorBytes]) -> list[dict[str, Any]]:
    """The tensors that differ, the furthest from the recorded first: name, elements, how many differ, by how much at most."""
    before = {tensor.name: tensor for tensor in recorded}
    rows = []
    for tensor in weights:
        other = before.pop(tensor.name, None)
        if other is None or (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            was = "not there" if other is None else f"{other.dtype}{list(other.shape)}"
            rows.append({"name": tensor.name, "problem": f"{tensor.dtype}{list(tensor.shape)}, recorded {was}", "max_abs": float("inf")})
            continue
        bits = _bits(tensor) != _bits(other)
        if count := int(bits.sum()):
            distance = np.abs(values(tensor) - values(other))
            rows.append({"name": tensor.name, "elements": len(bits), "differing": count, "max_abs": float(np.nanmax(distance))})
    rows += [{"name": name, "problem": "not there", "max_abs": float("inf")} for name in before]
    return sorted(rows, key=lambda row: -row["max_abs"])


def drift(weights: Iterable[TensorBytes], recorded: Iterable[TensorBytes]) -> dict[str, float]:
    """How far all weights together are from the recorded ones: the largest difference, and the distance over the recorded norm."""
    before = {tensor.name: values(tensor) for tensor in recorded}
    largest = squares = norm = 0.0
    for tensor in weights:
        distance = values(tensor) - before[tensor.name]
        largest = max(largest, float(np.abs(distance).max(initial=0.0)))
        squares += float(distance @ distance)
        norm += float(before[tensor.name] @ before[tensor.name])
    return {"max_abs": largest, "relative": (squares / norm) ** 0.5 if norm else 0.0}


def values(tensor: TensorBytes) -> npt.NDArray[np.float64]:
    """A tensor's elements as float64, in one row."""
    if tensor.dtype == "bfloat16":
        high = np.frombuffer(tensor.data, np.dtype("<u2")).astype(np.uint32) << 16
        return high.view(np.float32).astype(np.float64)
    return np.frombuffer(tensor.data, FLOATS.get(tensor.dtype, np.dtype("u1"))).astype(np.float64)


def _differing_samples(recording: Recording, member: Found) -> list[dict[str, Any]]:
    """The fields in which a group's samples differ from their records in `rollouts`; samples not kept there are left out."""
    if (group := member.group) is None:
        return []
    reads = RunReader(recording.log, recording.run).samples(only={group.group}, partitions=[member.planned.partition])
    drawn = {read.payload.sample: read.payload for read in reads if read.payload is not None}
    rows = []
    for scored in group.samples:
        original = drawn.get(scored.rollout.sample)
        if original is not None and (differences := list(_differing_fields(scored.rollout, original))):
            rows.append({"sample": original.sample, "differences": differences})
    return rows


def _differing_fields(scored: Rollout, drawn: Rollout) -> Iterator[Mapping[str, Any]]:
    for name in ("token_ids", "behaviour_logprobs", "loss_mask", "span_versions", "span_starts"):
        now, then = np.asarray(getattr(scored, name)), np.asarray(getattr(drawn, name))
        if now.shape != then.shape:
            yield {"field": name, "found": f"{len(now)} values", "drawn": f"{len(then)} values"}
            continue
        same = (now == then) | (np.isnan(now) & np.isnan(then)) if now.dtype.kind == "f" else now == then
        for place in np.flatnonzero(~same)[:SHOWN].tolist():
            yield {"field": name, "token": place, "found": now[place].item(), "drawn": then[place].item()}
    for name in ("finish", "temperature"):
        if getattr(scored, name) != getattr(drawn, name):
            yield {"field": name, "found": getattr(scored, name), "drawn": getattr(drawn, name)}


def _bits(tensor: TensorBytes) -> npt.NDArray[Any]:
    return np.frombuffer(tensor.data, np.dtype(f"<u{ITEM_BYTES[tensor.dtype]}"))
