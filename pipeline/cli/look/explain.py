"""`penstock explain`: the life of one prompt. The rule: it reads the topics and writes to none."""

from typing import Annotated

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, RunOrFolder, Security, TrustCode, emit, notify, reading


def explain(
    run: RunOrFolder,
    group: Annotated[int, typer.Argument(min=0, metavar="GROUP", help="The number of a prompt group.")],
    *,
    trust_code: TrustCode = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """The life of one prompt: who drew it, its rewards, why it was trained or dropped, its gradient weight, and the times between."""
    from penstock.pipeline.observe.explain import as_json, text

    with reading(run, bootstrap, security) as (log, run_id):
        life = as_json.explain(log, run_id, group, notify=notify, trust_code=trust_code)
    if json:
        emit(life)
    else:
        print(text.as_page(life))
