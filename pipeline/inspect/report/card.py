"""Writes the model card of a run: Hugging Face front matter and Markdown. Texts of data, models and users are escaped."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.infra.errors import ConfigError
from penstock.infra.templates import rendered
from penstock.topics.wire.visible import visible

TEMPLATE = Path(__file__).with_name("card.md.jinja")
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
    return f"---\n{data.to_yaml(line_break=chr(10))}\n---\n\n{MARK}\n\n" + _body(facts)


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


def _body(facts: Predicate) -> str:
    columns, changes = ("name", "source", "context", "rows", "digest"), ("what", "before", "after")
    values = {
        **facts,
        "data_rows": [
            [*(each.get(key) or "unknown" for key in columns), licence or "unknown"]
            for each, licence in zip(facts["data"], facts["licences"]["data"], strict=True)
        ],
        "change_rows": [[change.get(key) for key in changes] for change in facts["changed"]],
        "counts": list(_counts(facts)),
    }
    return rendered(TEMPLATE, values, filters={"cell": _cell, "code": code, "evaluation": _evaluation, "json": json.dumps})


def _counts(facts: Predicate) -> Iterator[tuple[str, int, str]]:
    groups = facts["groups"]
    yield from ((status, groups[status], cause) for status, cause in DROPS.items() if groups.get(status))
    yield from ((f"filtered, {name}", count, "") for name, count in groups["filtered_by"].items() if count)
    yield from ((f"dead letters, {kind}", count, "records that could not be used") for kind, count in facts["dead_letters"].items())
    if count := groups["samples_without_reward"]:
        yield "samples without a reward", count, "no function applied, or one broke"


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
