"""`penstock audit`: check that a run kept its promises.

The rule: the audit's own client reads the log of a run on a broker; only the broker and the run's id are resolved here.
"""

from typing import TYPE_CHECKING

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, RunOrFolder, Security, at, emit, notify

if TYPE_CHECKING:
    from penstock.pipeline.audit.anchors import Anchor
    from penstock.pipeline.audit.source import Source


def audit(run: RunOrFolder, *, bootstrap: Bootstrap = "embedded", security: Security = None, json: Json = False) -> None:
    """Check from the log alone that nothing was lost, trained twice or trained too old; status 1 on any violation."""
    from penstock.pipeline.audit import report

    anchors, source = _source(run, bootstrap, security)
    judged = report.audit(source, anchors)
    if json:
        emit(report.as_table(judged))
    else:
        print(report.as_text(judged))
    if not judged.clean:
        raise typer.Exit(1)


def _source(run: str, bootstrap: str, security: list[str] | None) -> tuple[list["Anchor"], "Source"]:
    """What this machine knows of the run's end, and the log: in this order, because the run may be at work."""
    from penstock.infra.kafka.settings import librdkafka
    from penstock.infra.paths import run_directory
    from penstock.pipeline.archive.archived_log import ArchivedSource, open_archive
    from penstock.pipeline.audit.anchors import of_folder
    from penstock.pipeline.audit.kafka_reader import KafkaSource
    from penstock.pipeline.runtime.registration.run_registry import resolve

    if (archived := open_archive(run)) is not None:
        return [], ArchivedSource(archived)
    with at(bootstrap, security) as log:
        run_id, connection = resolve(log, run), log.connection
    return of_folder(run_directory(run_id)), KafkaSource(connection.bootstrap, run_id, settings=librdkafka(connection), notify=notify)
