"""`penstock explain`: the life of one prompt, or of one refused record. The rule: it reads the topics and writes to none."""

from typing import Annotated

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, RunOrFolder, Security, emit, reading, say


def explain(
    run: RunOrFolder,
    group: Annotated[int | None, typer.Argument(min=0, metavar="GROUP", help="The number of a prompt group.")] = None,
    *,
    dead_letter: Annotated[
        str | None,
        typer.Option("--dead-letter", metavar="PLACE", help="A dead letter instead: its offset, or TOPIC/PARTITION/OFFSET of its record."),
    ] = None,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """The life of one prompt: who drew it, its rewards, why it was trained or dropped, its gradient weight, and the times between."""
    from penstock.pipeline.config.load import ConfigError

    if (group is None) == (dead_letter is None):
        raise ConfigError("give either a group's number or --dead-letter")
    from penstock.pipeline.observe.explain import as_json, text
    from penstock.pipeline.observe.explain import dead_letter as letters

    with reading(run, bootstrap, security) as (log, run_id):
        if dead_letter is not None:
            told = letters.explain_letter(log, run_id, dead_letter, say=say)
        else:
            assert group is not None
            told = as_json.explain(log, run_id, group, say=say)
    if json:
        emit(told)
    else:
        print(text.as_page(told) if dead_letter is None else text.as_letter(told))
