"""Generated pages that only the site has: `python -m docs.site_only` prints them as JSON, file -> text.

On GitHub `penstock COMMAND --help` and `topics/metrics.py` have the same.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from io import StringIO
from itertools import chain
from typing import Any

import typer

from docs.generate import docstrings, table
from penstock.pipeline.cli.app import app
from penstock.pipeline.runtime.main import parsed
from penstock.pipeline.runtime.reporting import reporter
from penstock.pipeline.runtime.reporting.health_and_metrics import family_of
from penstock.topics import metrics
from penstock.topics.metrics import Activity

HEAD = "# Commands\n\nRUN is a run id, a unique prefix of one, or `latest`. These options belong to many commands:\n\n"
MANY = 8
"""Options of more commands than this are listed once."""
UNITS = {
    "_tokens_per_s": "tokens/s", "_tflops_per_s": "TFLOP/s", "_s": "s", "_ms_pN": "ms", "_mib": "MiB", "_bytes": "bytes",
    "_lag_STAT": "versions",
}  # fmt: skip
"""End of a metric's name -> its unit; others are counts, shares, or what their meaning says."""
METRICS = """# Metrics

In a name, STAT is `min`, `mean`, `max` or `p95`, N a number, SOURCE a data source, NAME any name, and USE a use of time.

Each worker serves its own metrics at `/metrics`. The tracker also serves the newest steps, evaluations and rewards. Metrics there use base
units. Names that end in `_total` are counters, which start at 0 with the process; all others are gauges. The labels `run`, `role` and
`worker` identify the worker. The variable part of a name becomes the label `stat`, `n`, `source`, `name` or `use`.

"""


def cli() -> str:
    """Every command with its arguments and options, as `--help` has them."""
    found = list(commands(typer.main.get_command(app), "penstock"))
    options = {name: {option_of(option) for option in command.params if option.param_type_name == "option"} for name, command in found}
    counts = Counter(chain.from_iterable(options.values()))
    common = {option for option, count in counts.items() if count > MANY}
    text = HEAD + table(("option", "meaning"), *sorted(common))
    for name, command in found:
        arguments = [option.metavar or option.name.upper() for option in command.params if option.param_type_name == "argument"]
        text += f"## {' '.join([name, *arguments])}\n\n{command.help}\n\n"
        shown = [option_of(option) for option in command.params if option_of(option) in options[name] - common]
        text += table(("option", "meaning"), *shown) if shown else ""
        text += f"```\n{help_of_worker()}\n```\n\n" if name == "penstock worker" else ""
    return text


def help_of_worker() -> str:
    """What `penstock worker --help` prints: its options are argparse's."""
    os.environ["COLUMNS"] = "110"
    with redirect_stdout(StringIO()) as shown, suppress(SystemExit):
        parsed(["--help"], prog="penstock worker")
    return shown.getvalue().strip()


def option_of(option: Any) -> tuple[str, str]:
    """An option's spelling and meaning."""
    names, value = ", ".join(sorted(option.opts, key=len)), f" {option.metavar}" if option.metavar else ""
    return f"`{names}{value}`", option.help or ""


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Each command with its full name."""
    if getattr(command, "invoke_without_command", True):
        yield name, command
    for part, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{name} {part}")


def metric_names() -> str:
    """Every metric with unit and meaning, and the uses of a worker's time."""
    text = METRICS
    for title, (prefix, names) in zip(("Steps", "Evaluations", "Rewards by version", "Workers"), metrics.TABLES.items(), strict=True):
        where = next(meaning for name, meaning in docstrings(metrics).items() if getattr(metrics, name) is names)
        units = {name: next((unit for end, unit in UNITS.items() if f"_{name}".endswith(end)), "") for name in names}
        shown = {name: family_of(prefix, name)[0].replace("SOURCE", "NAME") for name in names}
        rows = ((f"`{name}`", units[name], meaning, f"`{shown[name]}`") for name, meaning in names.items())
        text += f"## {title}\n\n{where}.\n\n" + table(("metric", "unit", "meaning", "on `/metrics`"), *rows)
    uses = [(f"`{Activity[name]}`", meaning) for name, meaning in docstrings(Activity).items() if Activity[name] in reporter.USES]
    return text + "## Uses of time\n\n" + table(("use", "meaning"), *uses, ("`broker`, `suspended`", docstrings(reporter)["NO_ACTIVITY"]))


if __name__ == "__main__":
    print(json.dumps({"cli.md": cli(), "metrics.md": metric_names()}))
