"""`penstock explain`: traces one prompt group through the topics. Read-only."""

from typing import Annotated

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, RunOrFolder, Security, TrustCode, emit, notify, reading


def explain(
    run: RunOrFolder,
    group: Annotated[int, typer.Argument(min=0, metavar="GROUP", help="Number of a prompt group.")],
    *,
    trust_code: TrustCode = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Trace one prompt group: its workers, rewards, final status with its cause, gradient weight, and the time of each stage."""
    from penstock.pipeline.inspect.explain import as_json, text

    with reading(run, bootstrap, security) as (log, run_id):
        history = as_json.explain(log, run_id, group, notify=notify, trust_code=trust_code)
    if json:
        emit(history)
    else:
        print(text.as_page(history))
