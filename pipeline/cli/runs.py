"""`penstock runs` lists, describes and removes runs; `penstock card` publishes a model; `penstock verify` checks it by its statement."""

import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.pipeline.cli.inspect import audit_source
from penstock.pipeline.cli.options import Bootstrap, Json, Run, RunOrFolder, Security, TrustRun, at, emit, notify, on_broker, reading

if TYPE_CHECKING:
    from penstock.infra.log import Log
    from penstock.pipeline.replay.provenance.statement import Verification


app = typer.Typer(help="List runs, describe them, or remove some.", invoke_without_command=True)
UNITS = {"d": 86_400.0, "h": 3_600.0, "m": 60.0}
SHOWN_REASON = 80
COLUMNS = ("run", "name", "status", "steps", "age", "reward", "size", "model", "parent", "tags", "note", "reason")


@app.callback()
def runs(context: typer.Context, *, bootstrap: Bootstrap = "embedded", security: Security = None, json: Json = False) -> None:
    """List the runs of a broker: status, steps, age, reward, size, model, parent, reason of an early end."""
    if context.invoked_subcommand is not None:
        return
    from penstock.pipeline.inspect.records.runs import list_runs

    with at(bootstrap, security) as log:
        refused: list[str] = []
        rows = list_runs(log, refused=refused.append)
    if refused:
        notify(f"{len(refused)} registrations of runs could not be read and were skipped; the last one: {refused[-1]}")
    if json:
        emit(rows)
    elif not rows:
        print("no run is registered on this broker; start one with `penstock run CONFIG`")
    else:
        print(_table(rows))


def _table(rows: list[dict[str, Any]]) -> str:
    """Format the list of runs, without columns that are empty for all of them."""
    from penstock.pipeline.inspect.records.runs import size
    from penstock.pipeline.inspect.report.figures import one_line
    from penstock.pipeline.inspect.report.formats import columns

    cells = [
        (
            row["run"],
            one_line(row["name"] or "", SHOWN_REASON),
            row["status"],
            f"{row['steps_done']} of {row['steps']}",
            row["age"],
            "" if row["reward"] is None else f"{row['reward']:.3f}",
            size(row["bytes"]),
            row["model"] or "",
            row["parent"] or "",
            " ".join(row["tags"]),
            one_line(row["text"] or "", SHOWN_REASON),
            one_line(row["reason"] or "", SHOWN_REASON),
        )
        for row in rows
    ]
    shown = [number for number in range(len(COLUMNS)) if any(row[number] for row in cells)]
    return "\n".join(columns([[row[number] for number in shown] for row in (COLUMNS, *cells)]))


@app.command(short_help="Write a name, a note and tags about a run.")
def note(
    run: Run,
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="The note; an empty one removes it.")] = None,
    *,
    name: Annotated[str | None, typer.Option(help="A name for the run in lists; an empty one removes it.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Add a tag; repeatable.")] = None,
    untag: Annotated[list[str] | None, typer.Option(help="Remove a tag; repeatable.")] = None,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Write a name, a note and tags about a run, stored on this machine; without any, print them."""
    from dataclasses import asdict

    from penstock.pipeline.inspect.records.runs import Note, note_of, write_note

    with on_broker(run, bootstrap, security) as (_, run_id):
        old = note_of(run_id)
    tags = tuple(dict.fromkeys(label for label in (*old.tags, *(tag or ())) if label not in (untag or ())))
    new = Note(name=old.name if name is None else name or None, text=old.text if text is None else text or None, tags=tags)
    if new != old:
        write_note(run_id, new)
    if json:
        emit({"run": run_id, **asdict(new)})
    else:
        print("  ".join(part for part in (run_id, new.name, " ".join(f"#{label}" for label in new.tags), new.text) if part))


@app.command(short_help="Remove runs, or show what would be freed.")
def rm(
    run: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Ids, unique prefixes, or `latest`.")] = None,
    *,
    older_than: Annotated[str | None, typer.Option(metavar="7d", help="Runs that ended at least this long ago: 7d, 12h, 30m.")] = None,
    keep_model: Annotated[bool, typer.Option("--keep-model", help="Keep the exported models.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without --yes, only print what would be freed.")] = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Remove runs: their topics, record and folder on this machine."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.archive.delete import delete, ended_before, plan_deletion
    from penstock.pipeline.inspect.records.runs import size
    from penstock.pipeline.launch.run_lock import attended_runs
    from penstock.pipeline.runtime.registration.run_registry import resolve

    if bool(run) == (older_than is not None):
        raise ConfigError("give either runs, or --older-than 7d")
    limit_s = None if older_than is None else seconds(older_than)
    with at(bootstrap, security) as log:
        names = (
            [resolve(log, text, executes=True) for text in run or ()]
            if limit_s is None
            else ended_before(log, time.time() - limit_s, busy=attended_runs())
        )
        plans = [plan_deletion(log, name, keep_model=keep_model) for name in dict.fromkeys(names)]
        for plan in plans:
            if yes:
                delete(log, plan)
            if not json:
                print(f"{plan.run}: {size(plan.bytes)}{' freed' if yes else ''}")
    total = sum(plan.bytes for plan in plans)
    if json:
        emit({"runs": plans, "bytes": total, "deleted": yes})
    elif not plans:
        print("no run is that old")
    else:
        print(f"{size(total)} {'freed' if yes else 'would be freed; add --yes'}")


def seconds(text: str) -> float:
    """Parse a duration: `seconds("7d")` is 604800.0. Raises `ConfigError`."""
    from penstock.infra.errors import ConfigError

    number, unit = text[:-1], text[-1:]
    if unit not in UNITS or not number.isdecimal():
        raise ConfigError(f"--older-than {text}: expected a whole number followed by d, h or m, such as 7d")
    return int(number) * UNITS[unit]


def card(
    run: RunOrFolder,
    *,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Directory for the card; default: that of the final model.")
    ] = None,
    prove: Annotated[
        int | None,
        typer.Option(metavar="GROUP", help="Print a proof that the published run was trained on this group; other groups stay private."),
    ] = None,
    record: Annotated[bool, typer.Option("--record", help="With --prove: add the group's record, with samples and rewards.")] = False,
    sign: Annotated[Path | None, typer.Option(metavar="KEY", help="Sign all files with this private key (package model-signing).")] = None,
    licence: Annotated[
        str | None, typer.Option("--license", metavar="ID", help="Licence of the model; default: that of the base model.")
    ] = None,
    data_licence: Annotated[
        list[str] | None,
        typer.Option("--data-license", metavar="SOURCE=ID", help="Licence of a data source, by its source or name; repeatable."),
    ] = None,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Write a model card and an in-toto provenance statement next to the model's files."""
    from penstock.pipeline.inspect.audit import report
    from penstock.pipeline.inspect.audit.chunk_digests import TopicDigests
    from penstock.pipeline.inspect.report import card as text
    from penstock.pipeline.inspect.report import provenance
    from penstock.pipeline.inspect.run_status import config_of, info_of
    from penstock.pipeline.runtime.reporting.log_lines import Progress

    pairs = [each.rpartition("=") for each in data_licence or ()]
    if wrong := next((last for source, _, last in pairs if not source), None):
        raise typer.BadParameter(f"--data-license {wrong}: expected SOURCE=ID, such as train.jsonl=mit")
    signer = provenance.signer(sign) if sign is not None else None
    with reading(run, bootstrap, security) as (log, run_id):
        directory = out or provenance.card_directory(run_id)
        if prove is not None:
            emit(_proof(log, run_id, prove, directory, record=record))
            return
        audited = report.as_table(report.audit(audit_source(run, bootstrap, security)[1], digests=(digests := TopicDigests())))
        topics = digests.as_table()
        published = provenance.read_published(log, run_id, ends=digests.ends, alive=Progress(notify))
        claims = provenance.log_claims(published, provenance.secret_of(run_id))
    info = info_of(published.view)
    folders = (Path(config_of(published.view)["model"]["path"]).expanduser(), directory)
    data_licences = {source: last for source, _, last in pairs}
    licences = {
        "model": licence or next(filter(None, map(text.licence_of, folders)), None),
        "data": [data_licences.get(each["source"], data_licences.get(each["name"])) for each in info.get("data", ())],
    }
    audit = provenance.audit_claims(audited)
    predicate = {**claims, "audit": audit, "licences": licences, "topics": topics}
    statement = provenance.publish(directory, text.card(predicate), predicate, notify=notify)
    signature = signer(directory) if signer is not None else None
    if json:
        emit({"directory": str(directory), "statement": str(statement), "signature": signature and str(signature), **predicate})
        return
    print(f"{directory / provenance.README}, {statement.name}{f', {signature.name}' if signature else ''}: {audit['summary']}")
    print(f"head of the ledger, to be published elsewhere too: {predicate['ledger']['head']} ({predicate['ledger']['entries']} entries)")


def _proof(log: "Log", run: str, group: int, directory: Path, *, record: bool) -> dict[str, Any]:
    """Return the proof that the run was trained on one group, for the card in `directory`; `record` adds the group's record.

    Raises `ConfigError` if the run was not trained on the group or the card does not match the log, `LogError` if prompts were deleted.
    """
    from penstock.infra.errors import ConfigError, LogError
    from penstock.pipeline.inspect.report import inclusion, provenance
    from penstock.pipeline.learner.ledger_history import with_later_parts
    from penstock.pipeline.runtime.topic_reader import RunReader

    stated = provenance.read_statement(directory)["predicate"]
    reader = RunReader(log, run)
    chain = provenance.read_chain(reader)[: stated["ledger"]["entries"]]
    planned = next((each for entry, _ in chain for each in entry.plan if each.group == group), None)
    if planned is None:
        raise ConfigError(f"--prove {group}: the published run was not trained on this group; see `penstock explain {run} {group}`")
    prompts = provenance.read_prompts(reader, chain)
    if prompts is None:
        raise LogError(f"--prove {group}: the log no longer has all prompts of {run}, so their hash tree cannot be computed")
    parts = []
    if record:
        (first,) = log.read(f"{run}.groups", planned.partition, [planned.offset])
        parts = [bytes(part.value) for part in with_later_parts(log, run, first)]
    proof = inclusion.prove(run, group, chain, inclusion.leaves(chain, prompts), provenance.secret_of(run), parts=parts)
    if (proof["root"], proof["ledger"]) != ((stated["prompts"] or {}).get("root"), stated["ledger"]):
        raise ConfigError(f"--prove {group}: the log or {provenance.SALT} does not match the card in {directory}; write the card again")
    shown = inclusion.check(proof)
    by = "the group's record" if shown.has_record else "the root in the card"
    notify(f"step {shown.step} was trained on group {group}; {by} proves the prompt")
    return proof


SHOWN = 20


def verify(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR|PROOF", help="Directory of a model and its provenance.json, or a file from `penstock card --prove`."),
    ],
    *,
    log: Annotated[
        str | None, typer.Option("--log", metavar="RUN|DIR", help="Also check the log of the run, or its exported directory.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=0, metavar="N", help="Also recompute N random steps of the log.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Seed for choosing the steps, combined with the head in the statement.")] = 0,
    trust_code: TrustRun = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> int:
    """Verify a model against its provenance statement, its run's log, and recomputed steps; exit status 1 for any difference."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.replay.provenance.statement import Verification

    if directory.is_file():
        return _verify_proof(directory, json=json)
    if steps and log is None:
        raise ConfigError("--steps needs --log RUN: steps are recomputed from the run's log")
    done = Verification(directory=directory, notify=notify)
    done.check_files()
    if log is not None and done.statement is not None:
        read = partial(reading, log, bootstrap, security)
        done.check_log(log, read, partial(_audit, log, bootstrap, security))
        if steps and "entries" in done.levels[-1]:  # only if the log could be read
            done.repeat_steps(log, read, steps, seed, trust_code=trust_code)
    if json:
        run = None if done.statement is None else done.statement["predicate"]["run"]
        emit({"directory": str(directory), "run": run, "verified": not done.problems, "problems": done.problems, "levels": done.levels})
    else:
        print("\n".join(_lines(done)))
    return 1 if done.problems else 0


def _audit(
    log: str, bootstrap: str, security: list[str] | None, spans: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, Any], list[tuple[str, str]], dict[str, Any], Mapping[str, int]]:
    """Audit the run; return the table, violations as (check, text), a digest per span, and the number of records after each span."""
    from penstock.pipeline.inspect.audit import report
    from penstock.pipeline.inspect.audit.chunk_digests import TopicDigests

    anchors, source = audit_source(log, bootstrap, security)
    audited = report.audit(source, anchors, digests := TopicDigests(spans))
    violations = [(result.check.name, report.as_line(violation)) for result in audited.results for violation in result.violations]
    return report.as_table(audited), violations, digests.as_table(), digests.later


def _verify_proof(path: Path, *, json: bool) -> int:
    """Check a proof about one group, and print what it proves. Raises `ConfigError` or `ValueError` if it is invalid."""
    from json import loads

    from penstock.infra.errors import ConfigError
    from penstock.pipeline.inspect.report.inclusion import check
    from penstock.topics.wire.visible import visible

    try:
        proof = loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: expected a model's directory or a file from `penstock card --prove`: {' '.join(str(error).split())[:200]}"
        ) from error
    proved = check(proof)
    if json:
        emit(proved._asdict())
        return 0
    run, prompt = visible(proved.run, one_line=True), visible(proved.prompt, one_line=True)
    print(f"run {run} trained group {proved.group} in step {proved.step}: {prompt}")
    by = "the group's record" if proved.has_record else "the model card"
    print(f"{by} proves the prompt, if the published card states the head {proved.head} and the root {proved.root}")
    return 0


def _lines(done: "Verification") -> Iterator[str]:
    """Yield the lines of the result; the last one is "verified" or "not verified"."""
    for level in done.levels:
        count = sum(problem.level == level["level"] for problem in done.problems)
        differences = f"{count or 'no'} difference{'' if count == 1 else 's'}"
        yield f"level {level['level']}: {_examined(level)}: {differences}, {level['seconds']:.1f} s"
    yield from (f"  {problem}" for problem in done.problems[:SHOWN])
    if len(done.problems) > SHOWN:
        yield f"  and {len(done.problems) - SHOWN} more; --json lists them"
    yield "not verified" if done.problems else "verified"


def _examined(level: dict[str, Any]) -> str:
    """Describe what a level of the verification has examined: files, the log, or recomputed steps."""
    match level["level"]:
        case 1:
            return f"{level.get('files', 0)} files"
        case 2:
            return f"{level.get('entries', 0)} ledger entries, {level.get('topics', 0)} partitions; {level.get('audit', 'no audit')}"
        case _:
            return f"{len(level.get('steps', ()))} steps recomputed"
