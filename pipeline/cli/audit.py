"""`penstock audit`: verifies a run's guarantees from its log, with a Kafka client of its own."""

from typing import TYPE_CHECKING

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, RunOrFolder, Security, at, emit, notify

if TYPE_CHECKING:
    from penstock.pipeline.inspect.audit.anchors import Anchor
    from penstock.pipeline.inspect.audit.source import Source


def audit(run: RunOrFolder, *, bootstrap: Bootstrap = "embedded", security: Security = None, json: Json = False) -> None:
    """Verify from the log alone that nothing was lost, trained twice or trained stale; exit status 1 on any violation."""
    from penstock.pipeline.inspect.audit import report

    anchors, source = _source(run, bootstrap, security)
    findings = report.audit(source, anchors)
    if json:
        emit(report.as_table(findings))
    else:
        print(report.as_text(findings))
    if not findings.clean:
        raise typer.Exit(1)


def _source(run: str, bootstrap: str, security: list[str] | None) -> tuple[list["Anchor"], "Source"]:
    """The figures in the run's folder on this machine, and the log; the folder first, because the run may be live."""
    from penstock.infra.kafka.settings import librdkafka
    from penstock.infra.paths import run_directory
    from penstock.pipeline.archive.archived_log import ArchivedSource, open_archive
    from penstock.pipeline.inspect.audit.anchors import of_folder
    from penstock.pipeline.inspect.audit.kafka_reader import KafkaSource
    from penstock.pipeline.runtime.registration.run_registry import resolve

    if (archived := open_archive(run)) is not None:
        return [], ArchivedSource(archived)
    with at(bootstrap, security) as log:
        run_id, connection = resolve(log, run), log.connection
    return of_folder(run_directory(run_id)), KafkaSource(connection.bootstrap, run_id, settings=librdkafka(connection), notify=notify)
