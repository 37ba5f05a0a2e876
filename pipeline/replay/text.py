"""Replay results as text; the first line has the result."""

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.pipeline.replay.recording import ranges
from penstock.pipeline.replay.train.verify import ReplayResult
from penstock.pipeline.replay.train.what_if import OFF_POLICY, WhatIfResult

SHOWN = 8


def as_text(result: ReplayResult) -> str:
    """An exact replay as text."""
    times = result.as_json()["times"]
    timing = f"{times['replay_s']:.1f} s, start-up {times['start_s']:.1f} s"
    if times["ratio"] is not None:
        timing += f"; the recorded trainer was busy for {times['recorded_busy_s']:.1f} s, ratio {times['ratio']:.2f}"
    if result.first is None:
        digest = f"; weights {result.digest[:16]}…" if result.digest else ""
        return (
            f"{result.run}: all {result.steps} steps are the same bit for bit, {result.digests} weights digests compared{digest}\n{timing}"
        )
    return "\n".join(
        [*difference(result.first, run=result.run), *_drift(result), f"{result.matching} of {result.steps} steps are the same", timing]
    )


def difference(first: Mapping[str, Any], *, run: str) -> Iterator[str]:
    """The first difference, line by line."""
    cause = "the log does not hold what it was trained on" if first["cause"] == "records" else "the same groups give other numbers"
    yield f"{run}: step {first['step']} is the first that differs: {cause}"
    for group in first["groups"] if first["cause"] == "records" else []:
        yield f"  group {group['group']} (partition {group['partition']}, offset {group['offset']}): {group['problem']}"
        for sample in group["samples"]:
            for field in sample["differences"]:
                where = f"token {field['token']} " if "token" in field else ""
                yield f"    sample {sample['sample']} {where}{field['field']}: {field['found']}, in `rollouts` {field['drawn']}"
    if first["cause"] != "records":
        yield "  its groups: " + ranges(group["group"] for group in first["groups"])
    yield from (f"  {number['text']}" for number in first["numbers"])
    for tensor in first["tensors"][:SHOWN]:
        text = tensor.get("problem") or f"{tensor['differing']} of {tensor['elements']} elements, by {tensor['max_abs']:.3g} at most"
        yield f"  tensor {tensor['name']}: {text}"
    if (more := len(first["tensors"]) - SHOWN) > 0:
        yield f"  and {more} more tensors"
    if first["note"]:
        yield f"  {first['note']}"


def table(result: WhatIfResult) -> str:
    """Some rows of a what-if's curves next to the recorded ones."""
    changed = ", ".join(f"{key} {before} -> {after}" for key, (before, after) in result.changed.items()) or "nothing changed"
    lines = [f"{result.run} with {changed}: {len(result.steps)} steps, plans {result.plans}", f"off-policy: {OFF_POLICY}"]
    lines.append(f"{'step':>6}{'loss':>12}{'recorded':>12}{'grad norm':>12}{'recorded':>12}{'ess':>8}{'kl k3':>10}")
    stride = max(1, -(-len(result.steps) // 10))
    rows = result.steps[::stride] + (result.steps[-1:] if result.steps and (len(result.steps) - 1) % stride else [])
    for row in rows:
        here, then = row["what_if"], row["recorded"] or {}
        cells = [f"{row['step']:>6}"]
        for name in ("loss", "grad_norm"):
            cells += [_cell(here.get(name), 12), _cell(then.get(name), 12)]
        lines.append("".join([*cells, _cell(here.get("ess"), 8, ".3f"), _cell(here.get("kl_behaviour_k3"), 10)]))
    lines.append(f"weights {_digest(result.digest)}, recorded {_digest(result.recorded_digest)}")
    if result.exported:
        lines.append(f"model in {result.exported}")
    return "\n".join(lines)


def _drift(result: ReplayResult) -> Iterator[str]:
    """Distance of the weights from the recorded ones, at up to `SHOWN` steps."""
    stride = max(1, -(-len(result.drift) // SHOWN))
    for row in result.drift[::stride]:
        yield f"  after step {row['step']:.0f} the weights are {row['relative']:.3g} of their norm away, {row['max_abs']:.3g} at most"


def _digest(digest: str | None) -> str:
    return "none" if digest is None else f"{digest[:16]}…"


def _cell(value: float | None, width: int, form: str = ".4g") -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"
