"""A re-scoring's report as text. Long lists are cut; `--json` has all of them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from penstock.pipeline.inspect.live.completions import without_template

SHOWN = 20
SHOWN_TEXT = 60

Plain = Mapping[str, Any]


def as_page(report: Plain) -> str:
    """The report: the changes in detail, then the summary."""
    return "\n".join([*_details(report), *_summary(report)])


def _details(report: Plain) -> list[str]:
    changed = [f"group {row['group']}: {row['before']} -> {row['after']}{_because(row['reason'])}" for row in report["changed_outcomes"]]
    prompts = [row["prompt"] for row in report["prompts"]]
    lists = {
        "changed outcomes": changed,
        "samples that flip": [_flip(row, prompts) for row in report["flips"]],
        "prompts whose rewards changed most": [_prompt(row, prompts) for row in _by_change(report["prompts"])],
        "failed rewards": [f"group {row['group']} ({row['before']}): {row['reason']}" for row in report["broken"]],
        "not scored": [f"group {row['group']} ({row['before'] or 'no outcome'}): {row['why']}" for row in report["left_out"]],
        "deleted": report["gone"],
    }
    return [line for name, rows in lists.items() if rows for line in (name, *_cut(rows), "")]


def _summary(report: Plain) -> list[str]:
    reward = report["reward"]
    edited = _edited(reward)
    before, after = (_functions(reward[when], edited) for when in ("before", "after"))
    since = "; edited since the run was created" if edited else ""
    lines = [
        f"run {report['run']}: {report['judged']} of {report['groups']} groups scored again",
        f"  before  {before}",
        f"  after   {after}{since}",
        "",
        f"rewards   {_change(report)}",
    ]
    lines += [f"          {name}: {_change(row)}" for name, row in report["components"].items()]
    new = report["newly_judged"]
    if new["samples"]:
        lines.append(f"          {new['samples']} samples that had no reward: mean {_number(new['mean_after'])}")
    if report.get("no_reward"):
        lines.append(f"          {report['no_reward']} samples have no reward: every function returned None, or one failed")
    lines.append("groups    " + (", ".join(f"{count} {change}" for change, count in report["outcomes"].items()) or "none"))
    flips = len(report["flips"])
    lines.append(f"flips     {flips} samples cross {report['threshold']:g}: {report['flips_up']} up, {report['flips_down']} down")
    if report["written"]:
        lines.append(f"written as run {report['written']}: `penstock replay train {report['written']}` trains from it")
    return lines


def _edited(reward: Plain) -> set[str]:
    """Functions whose source changed since the run was created."""
    before, after = reward["before"]["sources"] or {}, reward["after"]["sources"] or {}
    return {name for name in before if name in after and before[name] != after[name]}


def _change(row: Plain) -> str:
    share = row["changed"] / row["samples"] if row["samples"] else 0.0
    means = f"mean {_number(row['mean_before'])} -> {_number(row['mean_after'])}"
    return f"{row['changed']} of {row['samples']} changed ({share:.1%}); {means}"


def _cut(rows: Sequence[str]) -> list[str]:
    more = [f"  … and {len(rows) - SHOWN} more; --json has all"] if len(rows) > SHOWN else []
    return [*(f"  {row}" for row in rows[:SHOWN]), *more]


def _flip(row: Plain, prompts: list[str]) -> str:
    change = f"{_short(without_template(row['prompt'], prompts))} -> {_short(row['completion'])}"
    return f"group {row['group']} sample {row['sample']}: {_number(row['before'])} -> {_number(row['after'])}  {change}"


def _by_change(prompts: Sequence[Plain]) -> list[Plain]:
    both = [row for row in prompts if row["samples"]]
    return sorted(both, key=lambda row: (-abs(row["mean_after"] - row["mean_before"]), row["row"]))


def _prompt(row: Plain, prompts: list[str]) -> str:
    means = f"{_number(row['mean_before'])} -> {_number(row['mean_after'])}"
    return (
        f"row {row['row']} {_short(without_template(row['prompt'], prompts))}: {row['changed']} of {row['samples']} rewards, mean {means}"
    )


def _functions(reward: Plain, edited: Collection[str]) -> str:
    """The functions with their weights; edited ones with the first digits of their digest."""
    names = [f"{name} ({reward['sources'][name][:8]})" if name in edited else name for name in reward["functions"]]
    return ", ".join(f"{name} x {weight:g}" for name, weight in zip(names, reward["weights"], strict=True))


def _because(reason: str | None) -> str:
    return f" ({_short(reason)})" if reason else ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= SHOWN_TEXT else f"{shown[:SHOWN_TEXT]}…"
