"""`penstock card`: publish a model with what its run's log proves about it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.pipeline.cli.inspect import audit_source
from penstock.pipeline.cli.options import Bootstrap, Json, RunOrFolder, Security, emit, notify, reading

if TYPE_CHECKING:
    from penstock.infra.log import Log

MODEL, CARD = "model", "card"
"""Folders of a run: its final model, and the card of a run that has none yet."""


def card(
    run: RunOrFolder,
    *,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder of the card; the final model's if absent.")] = None,
    prove: Annotated[
        int | None, typer.Option(metavar="GROUP", help="Print a proof that the published run trained this group, without the others.")
    ] = None,
    record: Annotated[bool, typer.Option("--record", help="With --prove: add the group's record: samples and rewards.")] = False,
    sign: Annotated[Path | None, typer.Option(metavar="KEY", help="Sign all files with this private key, by model-signing.")] = None,
    licence: Annotated[
        str | None, typer.Option("--license", metavar="ID", help="Licence of the model; if absent the base model's.")
    ] = None,
    data_licence: Annotated[
        list[str] | None, typer.Option("--data-license", metavar="SOURCE=ID", help="Licence of a data source or its name; repeatable.")
    ] = None,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Write a model card and an in-toto statement next to the model's files: what it was made from, and how to check that."""
    from penstock.infra.paths import run_directory
    from penstock.pipeline.inspect.audit import report
    from penstock.pipeline.inspect.report import card as text
    from penstock.pipeline.inspect.report import provenance, publish
    from penstock.pipeline.inspect.report.summary import Progress

    given = [each.rpartition("=") for each in data_licence or ()]
    if wrong := next((last for source, _, last in given if not source), None):
        raise typer.BadParameter(f"--data-license {wrong}: expected SOURCE=ID")
    with reading(run, bootstrap, security) as (log, run_id):
        model = run_directory(run_id) / MODEL
        directory = out or (model if model.is_dir() else model.with_name(CARD))
        if prove is not None:
            emit(_proof(log, run_id, prove, directory, record=record))
            return
        published = provenance.read_published(log, run_id, alive=Progress(notify))
    audited = report.as_table(report.audit(audit_source(run, bootstrap, security)[1]))
    known = text.licence_of(Path(published.config.model.path).expanduser()) or text.licence_of(directory)
    licences = provenance.Licences(model=licence or known, data={source: last for source, _, last in given})
    audit = {
        **{key: audited[key] for key in ("clean", "closed", "summary", "notes")},
        "violations": {each["check"]: len(each["violations"]) for each in audited["checks"] if each["violations"]},
    }
    predicate = provenance.predicate(published, audit=audit, secret=publish.secret_of(run_id), licences=licences)
    statement = publish.publish(directory, text.card(predicate), predicate, notify=notify)
    signature = publish.sign(directory, sign) if sign is not None else None
    if json:
        emit({"directory": str(directory), "statement": str(statement), "signature": signature and str(signature), **predicate})
        return
    print(f"{directory / publish.README}, {statement.name}{f', {signature.name}' if signature else ''}: {audit['summary']}")
    print(f"publish the head of the ledger: {predicate['ledger']['head']} ({predicate['ledger']['entries']} entries)")


def _proof(log: "Log", run: str, group: int, directory: Path, *, record: bool) -> dict[str, Any]:
    """The proof for one group of the run as published in a folder."""
    from penstock.infra.errors import ConfigError, LogError
    from penstock.pipeline.inspect.report import inclusion, provenance, publish
    from penstock.pipeline.learner.ledger_history import with_later_parts
    from penstock.pipeline.runtime.topic_reader import RunReader

    stated = publish.published(directory)["predicate"]
    reader = RunReader(log, run)
    chain = provenance.read_chain(reader)[: stated["ledger"]["entries"]]
    planned = next((each for entry, _ in chain for each in entry.plan if each.group == group), None)
    if planned is None:
        raise ConfigError(f"--prove {group}: the published run has not trained this group; `penstock explain {run} {group}` says why")
    prompts = provenance.read_prompts(reader, chain)
    if prompts is None:
        raise LogError(f"--prove {group}: the log has lost prompts of {run}, so that their tree cannot be computed")
    parts = []
    if record:
        (first,) = log.read(f"{run}.groups", planned.partition, [planned.offset])
        parts = [bytes(part.value) for part in with_later_parts(log, run, first)]
    proof = inclusion.prove(run, group, chain, inclusion.leaves(chain, prompts), publish.secret_of(run), parts=parts)
    if (proof["root"], proof["ledger"]) != ((stated["prompts"] or {}).get("root"), stated["ledger"]):
        raise ConfigError(f"--prove {group}: the log or {publish.SALT} is not that of the card in {directory}; write the card again")
    inclusion.check(proof)
    return proof
