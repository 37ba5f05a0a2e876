"""`penstock replay train`: recomputes recorded steps from the log and compares them bit for bit with the ledger. Read-only.

The first difference is reported in detail: numbers, tensors, groups and samples. A missing record counts as a difference.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.infra.errors import LogError
from penstock.infra.tensors.stream import ITEM_BYTES, TensorBytes
from penstock.pipeline.learner.policy_trainer import Notify, PolicyTrainer, Repetition, other_weights, repeat
from penstock.pipeline.replay.recording import PlanMember, Recording, ranges, require_retained
from penstock.pipeline.replay.restore_policy import advance_to, apply_rebase, arithmetic, open_policy, weights_of
from penstock.pipeline.replay.steps import ReplayRequest, Result, await_weights, check_steps, replay_steps
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.topics.ledger import Entry
from penstock.topics.rollouts import Rollout

FLOATS: Mapping[str, np.dtype[Any]] = {"float64": np.dtype("<f8"), "float32": np.dtype("<f4"), "float16": np.dtype("<f2")}
SHOWN = 8
"""Largest number of listed differences per sample, of listed tensors, and of listed distances."""


def published_as(recording: Recording, repetition: Repetition) -> bool:
    """True if no other weights were published after the step than the recomputed ones, except by a rebase."""
    manifest = recording.published_after((repetition.entry.step or 0) + 1)
    if manifest is None:
        return True
    rebased = any(entry.kind == "rebased" and (entry.step, entry.digest) == (manifest.step, manifest.digest) for entry in recording.entries)
    return rebased or manifest.digest == repetition.weights.digest


def difference(recording: Recording, entry: Entry, altered: list[PlanMember], repetition: Repetition | None) -> dict[str, Any]:
    """Describe the first step that differs as plain data: numbers, tensors, and the altered groups or else all groups of the step.

    `altered` are groups that are missing or not the planned ones; `repetition` is None if the step could not be trained.
    """
    manifest = recording.published_after((entry.step or 0) + 1)
    numbers = [] if repetition is None else list(repetition.differences)
    if repetition is not None and manifest is not None and not any(number.name == "weights digest" for number in numbers):
        digest = repetition.weights.digest
        numbers += [other_weights(digest, manifest.digest)] if manifest.digest != digest else []
    tensors, note = [], None
    if repetition is not None and numbers:
        if manifest is None:
            note = "no version was published after this step, so tensors cannot be compared"
        else:
            try:
                tensors = differing_tensors(repetition.weights.tensors, weights_of(recording, manifest.version))
            except LogError as error:
                note = f"the tensors cannot be compared: {error}"
    concerned = {member.planned.group: member for member in altered}
    return {
        "step": entry.step,
        "version": entry.version,
        "cause": "records" if altered else "arithmetic",
        "numbers": [{name: getattr(number, name) for name in ("name", "recomputed", "recorded", "text")} for number in numbers],
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
    """Return a row per tensor that differs (name, elements, number of differing ones, largest difference), largest difference first."""
    before = {tensor.name: tensor for tensor in recorded}
    rows = []
    for tensor in weights:
        other = before.pop(tensor.name, None)
        if other is None or (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            was = "missing" if other is None else f"{other.dtype}{list(other.shape)}"
            rows.append({"name": tensor.name, "problem": f"{tensor.dtype}{list(tensor.shape)}, recorded {was}", "max_abs": float("inf")})
            continue
        bits = _bits(tensor) != _bits(other)
        if count := int(bits.sum()):
            distance = np.abs(values(tensor) - values(other))
            rows.append({"name": tensor.name, "elements": len(bits), "differing": count, "max_abs": float(np.nanmax(distance))})
    rows += [{"name": name, "problem": "missing", "max_abs": float("inf")} for name in before]
    return sorted(rows, key=lambda row: -row["max_abs"])


def drift(weights: Iterable[TensorBytes], recorded: Iterable[TensorBytes]) -> dict[str, float]:
    """Return the distance of weights from the recorded ones: `max_abs`, and `relative` (norm of the difference over recorded norm)."""
    before = {tensor.name: values(tensor) for tensor in recorded}
    largest = squares = norm = 0.0
    for tensor in weights:
        distance = values(tensor) - before[tensor.name]
        largest = max(largest, float(np.abs(distance).max(initial=0.0)))
        squares += float(distance @ distance)
        norm += float(before[tensor.name] @ before[tensor.name])
    return {"max_abs": largest, "relative": (squares / norm) ** 0.5 if norm else 0.0}


def values(tensor: TensorBytes) -> npt.NDArray[np.float64]:
    """Return the elements of a tensor as a flat float64 array."""
    if tensor.dtype == "bfloat16":
        high = np.frombuffer(tensor.data, np.dtype("<u2")).astype(np.uint32) << 16
        return high.view(np.float32).astype(np.float64)
    return np.frombuffer(tensor.data, FLOATS.get(tensor.dtype, np.dtype("u1"))).astype(np.float64)


def _differing_samples(recording: Recording, member: PlanMember) -> list[dict[str, Any]]:
    """Return, per sample of a group, the fields that differ from its record in `rollouts`. Samples without a record are skipped."""
    if (group := member.group) is None:
        return []
    reads = RunReader(recording.log, recording.run).samples(only={group.group}, partitions=[member.planned.partition])
    recorded = {read.payload.sample: read.payload for read in reads if read.payload is not None}
    rows = []
    for scored in group.samples:
        original = recorded.get(scored.rollout.sample)
        if original is not None and (differences := list(_differing_fields(scored.rollout, original))):
            rows.append({"sample": original.sample, "differences": differences})
    return rows


def _differing_fields(scored: Rollout, recorded: Rollout) -> Iterator[Mapping[str, Any]]:
    """Yield a row per field (of arrays per token, at most `SHOWN`) in which a sample in `groups` differs from its record in `rollouts`."""
    for name in ("token_ids", "behaviour_logprobs", "loss_mask", "span_versions", "span_starts"):
        now, then = np.asarray(getattr(scored, name)), np.asarray(getattr(recorded, name))
        if now.shape != then.shape:
            yield {"field": name, "in_groups": f"{len(now)} values", "in_rollouts": f"{len(then)} values"}
            continue
        same = (now == then) | (np.isnan(now) & np.isnan(then)) if now.dtype.kind == "f" else now == then
        for token in np.flatnonzero(~same)[:SHOWN].tolist():
            yield {"field": name, "token": token, "in_groups": now[token].item(), "in_rollouts": then[token].item()}
    for name in ("finish", "temperature"):
        if getattr(scored, name) != getattr(recorded, name):
            yield {"field": name, "in_groups": getattr(scored, name), "in_rollouts": getattr(recorded, name)}


def _bits(tensor: TensorBytes) -> npt.NDArray[Any]:
    return np.frombuffer(tensor.data, np.dtype(f"<u{ITEM_BYTES[tensor.dtype]}"))


@dataclass(slots=True)
class ReplayResult(Result):
    """Result of an exact replay, filled while steps are recomputed."""

    steps: int = 0
    matching: int = 0
    digests: int = 0
    first: dict[str, Any] | None = None
    """Details of the first step that differs; None if all are equal."""
    drift: list[dict[str, float]] = field(default_factory=list)
    """Distances of the weights from the published ones after the first difference; see `drift`."""
    compute_s: float = 0.0
    recorded_busy_s: float = 0.0
    """Time that the recorded trainer was busy with these steps."""

    def as_json(self) -> dict[str, Any]:
        common = Result.as_json(self)
        ratio = self.times.busy_s / self.recorded_busy_s if self.recorded_busy_s else None
        return common | {
            "kind": "exact",
            "steps": self.steps,
            "matching_steps": self.matching,
            "first_difference": self.first,
            "digests_compared": self.digests,
            "drift": self.drift,
            "times": {**common["times"], "compute_s": self.compute_s, "recorded_busy_s": self.recorded_busy_s, "ratio": ratio},
        }


def replay(recording: Recording, request: ReplayRequest, *, result: ReplayResult, notify: Notify) -> None:
    """Recompute the requested steps into `result`, which stays usable after an interruption. Raises `ConfigError`, `PenstockError`."""
    start = time.monotonic()
    check_steps(recording, request)
    await_weights(recording, request)
    with open_policy(recording, recording.config, notify=notify) as policy:
        result.fingerprint = arithmetic(recording, policy)
        report_arithmetic(result.fingerprint, notify)
        result.start = advance_to(policy, recording, request.from_step, notify=notify)
        require_retained(recording, recording.steps[policy.steps_done : None if request.to_step is None else request.to_step + 1])
        result.times.start_s = time.monotonic() - start
        try:
            _train(policy, recording, request, result, notify)
        finally:
            result.recorded_busy_s = busy_s(recording, recording.steps[request.from_step : request.from_step + result.steps])


def report_arithmetic(changes: list[dict[str, object]], notify: Notify) -> None:
    """Notify the user if hardware, libraries or threads differ from the run's, so that results may not be bit-identical."""
    if changes:
        text = ", ".join(f"{row['name']} {row['recorded']} -> {row['here']}" for row in changes)
        recorded = {str(row["name"]): row["recorded"] for row in changes}
        hint = "cpu_capability" in recorded and f"; ATEN_CPU_CAPABILITY={str(recorded['cpu_capability']).lower()} may give the same bits"
        notify(f"hardware or libraries differ from the run's, so results may not be bit-identical: {text}{hint or ''}")


def _train(policy: PolicyTrainer, recording: Recording, request: ReplayRequest, result: ReplayResult, notify: Notify) -> None:
    """Recompute the requested steps and compare each with the ledger; stop at the first difference unless the request keeps going."""
    progress = lambda: notify(_progress(result, recording))  # noqa: E731
    with closing(replay_steps(recording, request, times=result.times, progress=progress, notify=notify)) as steps:
        for step in steps:
            entry = step.recorded
            assert entry is not None
            apply_rebase(policy, recording, notify=notify)
            altered = [member for member in step.members if member.problem]
            if unreadable := [member for member in altered if member.group is None]:
                result.first = result.first or difference(recording, entry, altered, None)
                notify(f"step {entry.step} cannot be trained: {unreadable[0].problem}")
                return
            repetition = repeat(policy, entry, [member.group for member in step.members if member.group is not None])
            result.steps += 1
            manifest = recording.published_after((entry.step or 0) + 1)
            if entry.digest is not None or manifest is not None:
                result.digests, result.digest = result.digests + 1, repetition.weights.digest
            result.compute_s += repetition.outcome.metrics["compute_s"]
            if altered or repetition.differences or not published_as(recording, repetition):
                result.first = result.first or difference(recording, entry, altered, repetition)
                if not request.keep_going:
                    return
            else:
                result.matching += 1
            if result.first is not None and manifest is not None:
                distance = drift(repetition.weights.tensors, weights_of(recording, manifest.version))
                result.drift.append({"step": entry.step or 0, **distance})
    result.whole = True


def busy_s(recording: Recording, steps: list[Entry]) -> float:
    """Return the seconds that the recorded trainer spent computing these steps, hashing their weights and publishing versions."""
    numbers = {entry.step for entry in steps}
    published = (
        entry.metrics.get("publish_s", 0.0) for entry in recording.entries if entry.kind == "version" and (entry.step or 0) - 1 in numbers
    )
    return sum(entry.metrics.get("compute_s", 0.0) + entry.metrics.get("digest_s", 0.0) for entry in steps) + sum(published)


def _progress(result: ReplayResult, recording: Recording) -> str:
    done = f"{result.steps} of {recording.planned_steps} steps recomputed, {result.matching} bit-identical"
    return done + (f", weights differ by {result.drift[-1]['relative']:.2e} of their norm" if result.drift else "")


def as_text(result: ReplayResult) -> str:
    """Format the result of an exact replay for a terminal."""
    times = result.as_json()["times"]
    timing = f"{times['replay_s']:.1f} s, start-up {times['start_s']:.1f} s"
    if times["ratio"] is not None:
        timing += f"; the recorded trainer was busy for {times['recorded_busy_s']:.1f} s, ratio {times['ratio']:.2f}"
    if result.first is None:
        digest = f"; weights {result.digest[:16]}…" if result.digest else ""
        return f"{result.run}: all {result.steps} steps are bit-identical, {result.digests} weight digests compared{digest}\n{timing}"
    return "\n".join(
        [*_lines_of(result.first, run=result.run), *_drift(result), f"{result.matching} of {result.steps} steps are bit-identical", timing]
    )


def _lines_of(first: Mapping[str, Any], *, run: str) -> Iterator[str]:
    """Yield lines for the terminal about the first step that differs, which `difference` describes."""
    cause = "groups in the log are not the planned ones" if first["cause"] == "records" else "the same groups give other numbers"
    yield f"{run}: step {first['step']} is the first that differs: {cause}"
    for group in first["groups"] if first["cause"] == "records" else []:
        yield f"  group {group['group']} (partition {group['partition']}, offset {group['offset']}): {group['problem']}"
        for sample in group["samples"]:
            for row in sample["differences"]:
                where = f"token {row['token']} " if "token" in row else ""
                values = f"{row['in_groups']} in `groups`, {row['in_rollouts']} in `rollouts`"
                yield f"    sample {sample['sample']} {where}{row['field']}: {values}"
    if first["cause"] != "records":
        yield "  groups of the step: " + ranges(group["group"] for group in first["groups"])
    yield from (f"  {number['text']}" for number in first["numbers"])
    for tensor in first["tensors"][:SHOWN]:
        text = tensor.get("problem") or f"{tensor['differing']} of {tensor['elements']} elements, by at most {tensor['max_abs']:.3g}"
        yield f"  tensor {tensor['name']}: {text}"
    if (more := len(first["tensors"]) - SHOWN) > 0:
        yield f"  and {more} more tensors"
    if first["note"]:
        yield f"  {first['note']}"


def _drift(result: ReplayResult) -> Iterator[str]:
    """Yield lines with the distance of the weights from the recorded ones, for about `SHOWN` steps."""
    stride = max(1, -(-len(result.drift) // SHOWN))
    for row in result.drift[::stride]:
        yield f"  after step {row['step']:.0f} the weights differ by {row['relative']:.3g} of their norm, at most {row['max_abs']:.3g} each"
