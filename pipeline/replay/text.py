"""What a replay found, for a person.

The rule: the first line has the answer; what follows is where to look.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.pipeline.replay.train.verify import Replayed
from penstock.pipeline.replay.train.what_if import OFF_POLICY, Alternative

SHOWN = 8


def as_text(found: Replayed) -> str:
    """An exact replay in a few lines."""
    times = found.as_json()["times"]
    took = f"{times['replay_s']:.1f} s, start-up {times['start_s']:.1f} s"
    if times["ratio"] is not None:
        took += f"; the recorded trainer was busy for {times['recorded_busy_s']:.1f} s, ratio {times['ratio']:.2f}"
    if found.first is None:
        digest = f"; weights {found.digest[:16]}…" if found.digest else ""
        return f"{found.run}: all {found.steps} steps are the same bit for bit, {found.digests} weights digests compared{digest}\n{took}"
    return "\n".join(
        [*difference(found.first, run=found.run), *_drift(found), f"{found.matching} of {found.steps} steps are the same", took]
    )


def difference(first: Mapping[str, Any], *, run: str) -> Iterator[str]:
    """The first difference, line by line."""
    cause = "the log does not hold what it was trained on" if first["cause"] == "records" else "the same groups give other numbers"
    yield f"{run}: step {first['step']} is the first that differs: {cause}"
    for group in first["groups"] if first["cause"] == "records" else []:
        yield f"  group {group['group']} (partition {group['partition']}, offset {group['offset']}): {group['problem']}"
        for sample in group["samples"]:
            for one in sample["differences"]:
                where = f"token {one['token']} " if "token" in one else ""
                yield f"    sample {sample['sample']} {where}{one['field']}: {one['found']}, in `rollouts` {one['drawn']}"
    if first["cause"] != "records":
        yield "  its groups: " + ", ".join(str(group["group"]) for group in first["groups"])
    yield from (f"  {number['text']}" for number in first["numbers"])
    for tensor in first["tensors"][:SHOWN]:
        told = tensor.get("problem") or f"{tensor['differing']} of {tensor['elements']} elements, by {tensor['max_abs']:.3g} at most"
        yield f"  tensor {tensor['name']}: {told}"
    if (more := len(first["tensors"]) - SHOWN) > 0:
        yield f"  and {more} more tensors"
    if first["note"]:
        yield f"  {first['note']}"


def table(found: Alternative) -> str:
    """A what-if as a few rows of its curves beside the recorded ones."""
    changed = ", ".join(f"{key} {before} -> {after}" for key, (before, after) in found.changed.items()) or "nothing changed"
    lines = [f"{found.run} with {changed}: {len(found.steps)} steps, plans {found.plans}", f"off-policy: {OFF_POLICY}"]
    lines.append(f"{'step':>6}{'loss':>12}{'recorded':>12}{'grad norm':>12}{'recorded':>12}{'ess':>8}{'kl k3':>10}")
    stride = max(1, -(-len(found.steps) // 10))
    rows = found.steps[::stride] + (found.steps[-1:] if found.steps and (len(found.steps) - 1) % stride else [])
    for row in rows:
        here, then = row["what_if"], row["recorded"] or {}
        cells = [f"{row['step']:>6}"]
        for name in ("loss", "grad_norm"):
            cells += [_cell(here.get(name), 12), _cell(then.get(name), 12)]
        lines.append("".join([*cells, _cell(here.get("ess"), 8, ".3f"), _cell(here.get("kl_behaviour_k3"), 10)]))
    lines.append(f"weights {_digest(found.digest)}, recorded {_digest(found.recorded_digest)}")
    if found.exported:
        lines.append(f"model in {found.exported}")
    return "\n".join(lines)


def _drift(found: Replayed) -> Iterator[str]:
    """How the weights went away from the recorded ones: the first, the last and some between."""
    stride = max(1, -(-len(found.drift) // SHOWN))
    for row in found.drift[::stride]:
        yield f"  after step {row['step']:.0f} the weights are {row['relative']:.3g} of their norm away, {row['max_abs']:.3g} at most"


def _digest(digest: str | None) -> str:
    return "none" if digest is None else f"{digest[:16]}…"


def _cell(value: float | None, width: int, form: str = ".4g") -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"
