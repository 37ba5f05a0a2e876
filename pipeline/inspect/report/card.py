"""Writes the model card of a run: Hugging Face front matter and Markdown. Texts of data, models and users are escaped."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.infra.errors import ConfigError
from penstock.topics.wire.visible import visible

Predicate = Mapping[str, Any]
SHOWN = 300
"""Largest number of characters in a cell of a table."""
MARK = "<!-- written by penstock card -->"
DROPS = {
    "trained": "in the plan of a step",
    "filtered": "equal rewards: no advantage",
    "stale": "older than `max_lag` when their step was selected",
    "failed": "generation, environment or rewards failed",
    "abandoned": "the deadline for their samples passed",
    "unused": "scored, and no step needed them",
    "open": "no final status yet",
}
MEASURES = {"greedy_accuracy": "greedy", "sampled_accuracy": "sampled"}
"""Metric of an evaluation -> prefix of the metrics with its confidence interval."""
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_LICENCE = re.compile(r"[\w.+-]{1,64}")


def card(facts: Predicate) -> str:
    """Return README.md for the predicate of a provenance statement. Raises `ConfigError` if huggingface_hub is not installed."""
    try:
        from huggingface_hub import EvalResult, ModelCardData
    except ImportError as error:
        raise ConfigError("a card needs the package huggingface_hub: pip install '.[trainer]' in the checkout") from error
    results = [EvalResult(**result) for result in evaluation_results(facts)]
    base, licences = facts["base"], facts["licences"]
    datasets = [hub_id for each in facts["data"] if each["context"] == "training" and (hub_id := _hub_dataset(each["source"]))]
    data = ModelCardData(
        license=line(licences["model"]) if licences["model"] else None,
        base_model=line(base["name"]) if base["on_hub"] else None,
        datasets=list(dict.fromkeys(datasets)) or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["penstock", "reinforcement-learning", line(str(facts["settings"]["algorithm"]["loss"]))],
        model_name=line(facts["run"]) if results else None,
        eval_results=results or None,
        provenance={
            "ledger": facts["ledger"],
            "base_model": {"name": line(base["name"]), "weights": base["weights"]},
            "datasets": [
                {"name": line(each["source"]), "digest": each["digest"], "licence": licence and line(licence)}
                for each, licence in zip(facts["data"], licences["data"], strict=True)
            ],
        },
    )
    return f"---\n{data.to_yaml(line_break=chr(10))}\n---\n\n{MARK}\n\n" + "\n".join(_body(facts))


def licence_of(directory: Path) -> str | None:
    """Return the licence in the front matter of a model's README.md; None if there is none."""
    try:
        text = (directory / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    named = front and re.search(r"^license: *['\"]?([^'\"\n]+?)['\"]? *$", front[1], re.MULTILINE)
    return named[1] if named and _LICENCE.fullmatch(named[1]) else None


def evaluation_results(facts: Predicate) -> Iterable[dict[str, Any]]:
    """Yield the accuracies of the newest evaluated version, as arguments of `huggingface_hub.EvalResult`."""
    held_out = [each for each in facts["data"] if each["context"] == "evaluation"]
    newest = max(facts["evaluations"], key=lambda each: each["version"], default=None)
    if newest is None or not held_out:
        return
    name = ", ".join(line(each["name"]) for each in held_out)
    for measure, prefix in MEASURES.items():
        if newest.get(measure) is None:
            continue
        interval = [newest.get(f"{prefix}_low"), newest.get(f"{prefix}_high")]
        yield {
            "task_type": "text-generation",
            "dataset_type": _hub_dataset(held_out[0]["source"]) or line(held_out[0]["source"]),
            "dataset_name": name,
            "dataset_args": {"digests": [each["digest"] for each in held_out]},
            "metric_type": "accuracy",
            "metric_name": f"{prefix} accuracy",
            "metric_value": newest[measure],
            "metric_args": {"interval_95": interval, "prompts": newest.get("n"), "version": newest["version"]},
        }


def _body(facts: Predicate) -> Iterable[str]:
    ledger, prompts, base = facts["ledger"], facts["prompts"], facts["base"]
    yield f"# Model of run {code(facts['run'])}"
    yield "\nA language model post-trained by reinforcement learning with Penstock. The run's log records each step; `provenance.json` has"
    yield "the digests with which these files and the log can be compared.\n"
    summary = {
        "status": facts["status"], "optimizer steps": facts["steps"], "samples": facts["samples"], "completion tokens": facts["tokens"],
        "trained groups": facts["groups"]["trained"], "weights": facts["weights"], "policy versions": len(facts["versions"]),
        "head of the ledger": f"{ledger['head']} ({ledger['entries']} entries)",
    }  # fmt: skip
    if facts["parent"]:
        summary["parent run"] = json.dumps(facts["parent"])
    yield from _table(("", ""), summary.items())
    yield "## Base model\n"
    digests = {f"digest of the {name}": base.get(name) for name in ("weights", "tokenizer", "template")}
    yield from _table(
        ("", ""),
        {"model": base["name"], "revision": base["revision"], "licence": facts["licences"]["model"] or "unknown", **digests}.items(),
    )
    yield "## Data\n"
    columns, rows = ("name", "source", "context", "rows", "digest"), zip(facts["data"], facts["licences"]["data"], strict=True)
    yield from _table(
        (*columns, "licence"), ([*(each.get(key) or "unknown" for key in columns), licence or "unknown"] for each, licence in rows)
    )
    yield "## Reward functions and code\n"
    yield from _table(("function", "SHA-256 of its source"), [*facts["rewards"].items(), *facts["code"].items()])
    if facts["changed"]:
        yield "Changed while the run was stopped:\n"
        keys = ("what", "before", "after")
        yield from _table(keys, ([change.get(key) for key in keys] for change in facts["changed"]))
    yield "## Algorithm and effective settings\n"
    yield f"```json\n{json.dumps(facts['settings'], indent=2)}\n```\n"
    yield "## Evaluations\n"
    yield "Share of held-out prompts solved, with 95 % intervals. The ledger commits to an evaluation that it lists.\n"
    yield from _table(("version", "prompts", "greedy", "sampled", "SHA-256", "in the ledger"), map(_evaluation, facts["evaluations"]))
    yield "## Groups, and why some were not trained\n"
    counts = [(status, facts["groups"][status], cause) for status, cause in DROPS.items() if facts["groups"].get(status)]
    counts += [(f"filtered, {name}", count, "") for name, count in facts["groups"]["filtered_by"].items() if count]
    counts += [(f"dead letters, {kind}", count, "records that could not be used") for kind, count in facts["dead_letters"].items()]
    if count := facts["groups"]["samples_without_reward"]:
        counts.append(("samples without a reward", count, "no function applied, or one broke"))
    yield from _table(("status", "number", "cause"), counts)
    yield from (f"- deleted from the log: {code(gone)}" for gone in facts["deleted"])
    yield "## Hardware\n"
    yield from _table(("", ""), {**(facts["fingerprint"] or {}), "workers": json.dumps(facts["workers"])}.items())
    yield "## Verification\n"
    audit = facts["audit"]
    yield f"Of the log: {code(audit['summary'])}\n"
    yield from (f"- {code(note)}" for note in audit["notes"])
    yield f"\n```\npenstock verify .\npenstock verify . --log {facts['run']}\n```\n"
    if prompts:
        yield f"The trained prompts have the salted root {code(prompts['root'])} ({prompts['leaves']} groups): the run's owner can prove"
        yield "that one of them was trained without the others.\n"
    yield "Not proved: that rewards and data are good, and that the log was honest before its head was published.\n"


def _evaluation(measured: Mapping[str, Any]) -> list[Any]:
    """Return the cells of one evaluation in the table of the card; each accuracy with its interval if there is one."""
    intervals = [
        f"{measured[name]:.3f} [{measured[f'{prefix}_low']:.3f}, {measured[f'{prefix}_high']:.3f}]"
        if None not in (measured.get(name), measured.get(f"{prefix}_low"), measured.get(f"{prefix}_high"))
        else measured.get(name)
        for name, prefix in MEASURES.items()
    ]
    listed = "yes" if measured["in_ledger"] else "no"
    return [measured["version"], measured.get("n"), *intervals, measured["sha256"], listed]


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterable[str]:
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    yield from [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads), *lines, ""] if lines else ["None.", ""]


def _cell(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return code(value)


def code(value: Any) -> str:
    """Format a text as inline code, so that it is not interpreted as Markdown or HTML. Characters that could end it are escaped."""
    text = line(str(value)) if value not in (None, "") else "–"
    return "`" + text.replace("|", r"\x7c").replace("`", r"\x60") + "`"


def line(text: str) -> str:
    """Format a text in one line of at most `SHOWN` characters, without hidden characters."""
    shown = visible(text, one_line=True)
    return shown if len(shown) <= SHOWN else shown[: SHOWN - 1] + "…"


def _hub_dataset(source: str) -> str | None:
    """Return the id of a data set on the Hugging Face hub: `_hub_dataset("hf:openai/gsm8k:main")` is "openai/gsm8k"; else None."""
    name = re.split(r"[:@]", source.removeprefix("hf:"))[0] if source.startswith("hf:") else ""
    return name if _HUB_ID.fullmatch(name) else None
