"""`penstock.open`: a run's records as Arrow tables. Read-only; unusable records are skipped, as workers skip them."""

from collections.abc import Mapping, Sequence
from html import escape
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import pyarrow as pa

from penstock.infra.errors import PenstockError
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.pipeline.archive.archived_log import ArchivedLog, open_archive
from penstock.pipeline.archive.index.run_index import all_groups, open_index
from penstock.pipeline.inspect.report.headline import headline
from penstock.pipeline.inspect.report.summary import collect
from penstock.pipeline.inspect.tables.run_tables import RunTables
from penstock.pipeline.launch.broker_keeper import connect
from penstock.pipeline.runtime.registration.run_registry import resolve
from penstock.topics.wire.visible import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Run:
    """One run of a broker or of an archive, live or ended; each call reads the log again. Close it, or use it in a `with`.

    Tables are Arrow: `run.steps().to_pandas()`, `polars.from_arrow(run.groups())`. A notebook shows a run as its summary and curve.
    """

    def __init__(self, log: Log, run: str) -> None:
        self._log, self.id = log, run

    @classmethod
    def find(cls, run: str, *, bootstrap: str, security: Mapping[str, str]) -> Self:
        """The run that an id, a unique prefix or `latest` names, or the one archived in a folder. Raises as `penstock.open`."""
        if (archived := open_archive(run)) is not None:
            return cls(cast(Log, archived), archived.run)
        log = connect(bootstrap, security, notify=lambda _: None, start=False)
        try:
            return cls(log, resolve(log, run))
        except BaseException:
            log.close()
            raise

    def report(self) -> dict[str, Any]:
        """The keys of `penstock report --json`."""
        return collect(self._log, self.id)

    def samples(self) -> pa.Table:
        """One row a finished sample, by group and sample: tokens, logprobs, versions; completion and reward once it is scored."""
        return RunTables(self._log, self.id).samples()

    def groups(self) -> pa.Table:
        """One row an admitted group, by number: prompt, data columns, final `status`, step, rewards, lag and policy versions."""
        return all_groups(self._log, self.id)

    def steps(self) -> pa.Table:
        """One row a committed optimizer step: the groups of its plan in order, and a column for each of its metrics."""
        return open_index(self._log, self.id)[0].steps().sort_by("step")

    def turns(self) -> pa.Table:
        """One row a part of a trajectory with one source, by group, sample and turn: tokens, reward, versions; none for completions."""
        return RunTables(self._log, self.id).turns()

    def sql(self, query: str) -> pa.Table:
        """Result of a SELECT over the views of `penstock sql`. Raises `ValueError` for a query that fails."""
        from penstock.pipeline.archive.sql import ArchivedTables, LiveTables, ask

        archived = isinstance(self._log, ArchivedLog)
        return ask(ArchivedTables(cast(ArchivedLog, self._log)) if archived else LiveTables(cast(KafkaLog, self._log), self.id), query)

    def plot(self, *measures: str) -> "Figure":
        """A matplotlib figure: reward, evaluation and final statuses, or a curve of each of these columns of `steps`.

        Example:
            run.plot("entropy", "grad_norm")

        Raises:
            ValueError: the steps have no such column.
            PenstockError: matplotlib is not installed.
        """
        return figure(self.report(), self.steps(), measures)

    def close(self) -> None:
        """Let go of the broker."""
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<penstock run {self.id}>"

    def _repr_html_(self) -> str:
        """The summary sentences of the report, and the curve of the reward."""
        from penstock.pipeline.inspect.web.render import spark

        report = self.report()
        lines = "".join(f"<p>{escape(visible(line))}</p>" for line in headline(report))
        return f"<h4>{escape(self.id)} · {report['status']}</h4>{lines}<div style='width:30em'>{spark(report['reward']['curve'])}</div>"


MOST_ACROSS = 3
SIZE = (4.6, 2.9)
"""Inches of one curve."""


def figure(report: Mapping[str, Any], steps: "pa.Table", measures: Sequence[str]) -> "Figure":
    """Plot these columns of the steps, by default reward, evals and statuses. Raises `ValueError`, `PenstockError` without matplotlib."""
    if unknown := [name for name in measures if name not in steps.column_names]:
        raise ValueError(f"there is no measure {unknown[0]!r}; the steps have {', '.join(sorted(steps.column_names))}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PenstockError("pictures need matplotlib: pip install '.[notebook]' in the checkout") from error
    across = min(MOST_ACROSS, len(measures) or MOST_ACROSS)
    down = -(-max(1, len(measures)) // across)
    made = Figure(figsize=(SIZE[0] * across, SIZE[1] * down), layout="constrained")
    axes = list(made.subplots(down, across, squeeze=False).flat)
    if measures:
        for one, name in zip(axes, measures, strict=False):
            _curve(one, name, steps["step"].to_pylist(), {name: steps[name].to_pylist()})
        for spare in axes[len(measures) :]:
            spare.remove()
    else:
        _overview(axes, report, steps)
    made.suptitle(f"run {report['run']}")
    return made


def _overview(axes: Sequence[Any], report: Mapping[str, Any], steps: "pa.Table") -> None:
    trained = steps["reward_trained"].to_pylist() if "reward_trained" in steps.column_names else []
    _curve(axes[0], "reward of the trained samples", steps["step"].to_pylist()[: len(trained)], {"reward": trained})
    evals = report["eval"]
    names = [name for name in ("greedy_accuracy", "sampled_accuracy", "greedy_reward") if any(name in one for one in evals)]
    _curve(axes[1], "held-out, by version", [one["version"] for one in evals], {name: [one.get(name) for one in evals] for name in names})
    statuses = {name: count for name, count in report["groups"].items() if count and name != "admitted"}
    axes[2].barh(list(statuses), list(statuses.values()))
    axes[2].set_title("groups by final status")
    axes[2].invert_yaxis()


def _curve(axes: Any, title: str, positions: Sequence[float], curves: Mapping[str, Sequence[Any]]) -> None:
    marker = "." if len(positions) < 20 else ""
    for name, values in curves.items():
        axes.plot(positions, [float("nan") if value is None else value for value in values], label=name, marker=marker)
    axes.set_title(title)
    axes.set_xlabel("step" if "version" not in title else "version")
    axes.grid(visible=True, alpha=0.3)
    if len(curves) > 1:
        axes.legend()
