"""A re-scoring's report as a page for a person.

The rule: it says nothing that `--json` does not; long lists are cut and say how long they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

SHOWN = 20
SHOWN_TEXT = 60

Plain = Mapping[str, Any]


def as_page(found: Plain) -> str:
    """The report over many lines."""
    reward = found["reward"]
    lines = [
        f"run {found['run']}: {found['judged']} of {found['groups']} groups judged again",
        f"  before  {_functions(reward['before'])}",
        f"  after   {_functions(reward['after'])}",
        "",
        f"rewards   {_change(found)}",
    ]
    lines += [f"          {name}: {_change(one)}" for name, one in found["components"].items()]
    new = found["newly_judged"]
    if new["samples"]:
        lines.append(f"          {new['samples']} samples that had no reward: mean {_number(new['mean_after'])}")
    lines += ["", "groups    " + (", ".join(f"{count} {change}" for change, count in found["outcomes"].items()) or "none")]
    lines += _list(
        "changed outcomes",
        [f"group {one['group']}: {one['before']} -> {one['after']}{_because(one['reason'])}" for one in found["changed_outcomes"]],
    )
    flips = found["flips"]
    head = f"flips     {len(flips)} samples cross {found['threshold']:g}: {found['flips_up']} up, {found['flips_down']} down"
    lines += ["", head, *_cut([_flip(one) for one in flips])]
    lines += _list("prompts whose rewards changed most", [_prompt(one) for one in _by_change(found["prompts"])])
    lines += _list("broken rewards", [f"group {one['group']} ({one['before']}): {one['reason']}" for one in found["broken"]])
    lines += _list("not judged", [f"group {one['group']} ({one['before'] or 'no outcome'}): {one['why']}" for one in found["left_out"]])
    lines += _list("gone", found["gone"])
    if found["written"]:
        lines += ["", f"written as run {found['written']}: `penstock replay train {found['written']}` trains from it"]
    return "\n".join(lines)


def _change(one: Plain) -> str:
    share = one["changed"] / one["samples"] if one["samples"] else 0.0
    means = f"mean {_number(one['mean_before'])} -> {_number(one['mean_after'])}"
    return f"{one['changed']} of {one['samples']} changed ({share:.1%}); {means}"


def _list(name: str, rows: Sequence[str]) -> list[str]:
    return ["", name, *_cut(rows)] if rows else []


def _cut(rows: Sequence[str]) -> list[str]:
    more = [f"  … and {len(rows) - SHOWN} more; --json has all"] if len(rows) > SHOWN else []
    return [*(f"  {row}" for row in rows[:SHOWN]), *more]


def _flip(one: Plain) -> str:
    what = f"{_short(one['prompt'])} -> {_short(one['completion'])}"
    return f"group {one['group']} sample {one['sample']}: {_number(one['before'])} -> {_number(one['after'])}  {what}"


def _by_change(prompts: Sequence[Plain]) -> list[Plain]:
    both = [one for one in prompts if one["samples"]]
    return sorted(both, key=lambda one: (-abs(one["mean_after"] - one["mean_before"]), one["row"]))


def _prompt(one: Plain) -> str:
    means = f"{_number(one['mean_before'])} -> {_number(one['mean_after'])}"
    return f"row {one['row']} {_short(one['prompt'])}: {one['changed']} of {one['samples']} rewards, mean {means}"


def _functions(reward: Plain) -> str:
    return ", ".join(f"{name} x {weight:g}" for name, weight in zip(reward["functions"], reward["weights"], strict=True))


def _because(reason: str | None) -> str:
    return f" ({_short(reason)})" if reason else ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= SHOWN_TEXT else f"{shown[:SHOWN_TEXT]}…"
