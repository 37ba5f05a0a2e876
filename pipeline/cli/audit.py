"""`penstock audit`: whether a run kept its promises.

The rule: the log is read by the audit's own client; only the broker and the run's id are looked up here.
"""

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, Run, Security, at, emit, say, security_settings


def audit(run: Run, *, bootstrap: Bootstrap = "embedded", security: Security = None, json: Json = False) -> None:
    """Check from the log alone that nothing was lost, trained twice or trained too old; status 1 on any violation."""
    from penstock.pipeline.audit.report import as_table, as_text, audit_kafka
    from penstock.pipeline.runtime.run_registry import resolve

    with at(bootstrap, security) as log:
        found, address = resolve(log, run), log.bootstrap
    judged = audit_kafka(address, found, security=security_settings(security), say=say)
    if json:
        emit(as_table(judged))
    else:
        print(as_text(judged))
    if not judged.clean:
        raise typer.Exit(1)
