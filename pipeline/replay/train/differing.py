"""What exactly differs: between two sets of weights, and between a group and the samples it was made of.

The rule: two numbers are the same when their bits are; differences are counted before they are measured.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.infra.log import Log
from penstock.infra.tensors.stream import ITEM_BYTES, TensorBytes
from penstock.pipeline.runtime.topic_reader import scan
from penstock.topics import rollouts
from penstock.topics.groups import Group
from penstock.topics.samples import Rollout
from penstock.topics.wire.errors import Unusable

FLOATS: Mapping[str, np.dtype[Any]] = {"float64": np.dtype("<f8"), "float32": np.dtype("<f4"), "float16": np.dtype("<f2")}
SHOWN = 8
"""Places named of a sample that differs in many."""


def tensors(found: Iterable[TensorBytes], recorded: Iterable[TensorBytes]) -> list[dict[str, Any]]:
    """The tensors that differ, the furthest from the recorded first: name, elements, how many differ, by how much at most."""
    before = {tensor.name: tensor for tensor in recorded}
    rows = []
    for tensor in found:
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


def drift(found: Iterable[TensorBytes], recorded: Iterable[TensorBytes]) -> dict[str, float]:
    """How far all weights together are from the recorded ones: the largest difference, and the distance over the recorded norm."""
    before = {tensor.name: values(tensor) for tensor in recorded}
    largest = squares = norm = 0.0
    for tensor in found:
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


def samples(log: Log, run: str, group: Group, *, partition: int) -> list[dict[str, Any]]:
    """Where a group's samples are not those that stand in `rollouts`, sample by sample; one that is not kept there is left out."""
    drawn: dict[int, Rollout] = {}
    for record in scan(log, f"{run}.rollouts", partitions=[partition]):
        try:
            headers = rollouts.check(record, run=run)
            if headers.group == group.group and headers.sample is not None and headers.sample not in drawn:
                drawn[headers.sample] = rollouts.read(record, run=run)[1]
        except Unusable:
            continue
    rows = []
    for scored in group.samples:
        original = drawn.get(scored.rollout.sample)
        if original is not None and (found := list(_fields(scored.rollout, original))):
            rows.append({"sample": original.sample, "differences": found})
    return rows


def _fields(found: Rollout, drawn: Rollout) -> Iterator[Mapping[str, Any]]:
    for name in ("token_ids", "behaviour_logprobs", "loss_mask", "span_versions", "span_starts"):
        now, then = np.asarray(getattr(found, name)), np.asarray(getattr(drawn, name))
        if now.shape != then.shape:
            yield {"field": name, "found": f"{len(now)} values", "drawn": f"{len(then)} values"}
            continue
        same = (now == then) | (np.isnan(now) & np.isnan(then)) if now.dtype.kind == "f" else now == then
        for place in np.flatnonzero(~same)[:SHOWN].tolist():
            yield {"field": name, "token": place, "found": now[place].item(), "drawn": then[place].item()}
    for name in ("finish", "temperature"):
        if getattr(found, name) != getattr(drawn, name):
            yield {"field": name, "found": getattr(found, name), "drawn": getattr(drawn, name)}


def _bits(tensor: TensorBytes) -> npt.NDArray[Any]:
    return np.frombuffer(tensor.data, np.dtype(f"<u{ITEM_BYTES[tensor.dtype]}"))
