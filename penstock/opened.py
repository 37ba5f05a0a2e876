"""`penstock.open`: a run's records as Arrow tables. Read-only; unusable records are skipped, as workers skip them."""

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import pyarrow as pa

from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.pipeline.archive.archived_log import ArchivedLog, open_archive
from penstock.pipeline.inspect.report.summary import collect
from penstock.pipeline.inspect.tables import samples_groups_steps, turns
from penstock.pipeline.launch.broker_keeper import connect
from penstock.pipeline.runtime.registration.run_registry import resolve

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Run:
    """One run of a broker or of an archive, live or ended; each call reads the log again. Close it, or use it in a `with`."""

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
        return samples_groups_steps.samples(self._log, self.id)

    def groups(self) -> pa.Table:
        """One row an admitted prompt group, by number: prompt, data columns, its fate, mean reward and policy versions."""
        return samples_groups_steps.groups(self._log, self.id)

    def steps(self) -> pa.Table:
        """One row a committed optimizer step: the groups of its plan in order, and a column for each of its metrics."""
        return samples_groups_steps.steps(self._log, self.id)

    def turns(self) -> pa.Table:
        """One row a part of a trajectory with one source, by group, sample and turn: tokens, reward, versions; none for completions."""
        return turns.turns(self._log, self.id)

    def sql(self, query: str) -> pa.Table:
        """Result of a SELECT over the views of `penstock sql`. Raises `ValueError` for a query that fails."""
        from penstock.pipeline.archive.sql import ArchivedTables, LiveTables, ask

        archived = isinstance(self._log, ArchivedLog)
        return ask(ArchivedTables(cast(ArchivedLog, self._log)) if archived else LiveTables(cast(KafkaLog, self._log), self.id), query)

    def plot(self, *measures: str) -> "Figure":
        """A matplotlib figure: reward, evaluation and fates, or a curve of each of these columns of `steps`.

        Example:
            run.plot("entropy", "grad_norm")

        Raises:
            ValueError: the steps have no such column.
            PenstockError: matplotlib is not installed.
        """
        from penstock.plots import figure

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
