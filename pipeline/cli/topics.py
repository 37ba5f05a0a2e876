"""`penstock topics`: lists, shows, exports, imports and deletes the records of a run, including undecodable ones."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, Run, RunOrFolder, Security, at, emit, notify, on_broker, reading, refuse_folder
from penstock.pipeline.runtime.reporting.log_lines import print_json, print_page

if TYPE_CHECKING:
    from penstock.pipeline.archive.export import Exported

app = typer.Typer(help="List, show, export, import and delete a run's records.")

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="prompts, rollouts, groups, weights, ledger, metrics or dead-letters.")]


@app.command("list", short_help="List a run's topics with their records.")
def list_topics(run: RunOrFolder, *, bootstrap: Bootstrap = "embedded", security: Security = None, json: Json = False) -> None:
    """List a run's topics with their partitions and records."""
    from penstock.pipeline.inspect.records.browse import list_topics as rows_of
    from penstock.pipeline.inspect.records.runs import own_sizes, size

    with reading(run, bootstrap, security) as (log, run_id):
        rows = rows_of(log, run_id, sizes=own_sizes(log))
    if json:
        emit(rows)
        return
    width = max((len(row.topic) for row in rows), default=0)
    for row in rows:
        counts = f"{row.partitions:>3} partition{'s' if row.partitions > 1 else ' '}  {row.offsets:>9,} offsets"
        records = f"  {'-' if row.records is None else format(row.records, ','):>9} records"
        print(f"{row.topic:<{width}}  {counts}{records}" + ("" if row.bytes is None else f"  {size(row.bytes):>9}"))


@app.command(short_help="Print the newest records of a topic, one per line.")
def tail(
    run: RunOrFolder,
    topic: Topic,
    *,
    count: Annotated[int, typer.Option("-n", min=0, help="Number of newest records to print.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new records until Ctrl-C.")] = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Print the newest records of a topic, one per line; with --json, one object per line."""
    from json import dumps

    from penstock.pipeline.inspect.records import browse
    from penstock.pipeline.inspect.tables.token_texts import texts_of

    with reading(run, bootstrap, security) as (log, run_id):
        if follow:
            refuse_folder(log, "--follow")
        texts = None if json or not topic.endswith("rollouts") else texts_of(log, run_id)
        for record in browse.tail(log, run_id, topic, count=count, follow=follow):
            if json:
                print_json(dumps(browse.view(record, run=run_id)), flush=follow)
            else:
                print(browse.as_line(record, run=run_id, texts=texts), flush=follow)


@app.command(short_help="Print headers and payload of one record.")
def show(
    run: RunOrFolder,
    topic: Topic,
    partition: Annotated[int, typer.Argument(min=0)],
    offset: Annotated[int, typer.Argument(min=0)],
    *,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Print the headers and the decoded payload of one record."""
    from penstock.infra.errors import ConfigError, RecordMissing
    from penstock.pipeline.inspect.records import browse

    with reading(run, bootstrap, security) as (log, run_id):
        try:
            record = browse.record_at(log, run_id, topic, partition=partition, offset=offset)
        except RecordMissing as error:
            raise ConfigError(str(error)) from error
    view = browse.view(record, run=run_id)
    emit(view) if json else print_page(browse.as_page(view))


@app.command("export", short_help="Export a run's topics as Parquet.")
def export_topics(
    run: Run,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory for the export, which is DIR/RUN; an existing one is continued.")
    ],
    *,
    topics: Annotated[
        list[str] | None, typer.Option("--topics", metavar="TOPIC", help="Export only this topic; repeatable, or separated by commas.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Export new records until the run is closed or Ctrl-C.")] = False,
    backup: Annotated[bool, typer.Option("--backup", help="Also copy the model and the newest checkpoint.")] = False,
    store: Annotated[str | None, typer.Option(metavar="URI", help="Copy DIR/RUN to URI/RUN, for example s3://BUCKET/FOLDER.")] = None,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Export a run's topics to Parquet files, from which records can be restored byte for byte; repeat to add new records."""
    from penstock.pipeline.archive import export
    from penstock.pipeline.archive.backup import upload
    from penstock.pipeline.archive.files import Archive

    names = [name.strip() for option in topics or () for name in option.split(",") if name.strip()]
    with on_broker(run, bootstrap, security) as (log, run_id):
        archive = Archive(directory, run_id)
        if not follow:
            done = export.export(log, run_id, directory, topics=names, backup=backup, notify=notify)
            if store is not None:
                upload(archive, store)
            _print_export(done, json=json)
            return
        total = export.Exported(run=run_id, directory=str(archive.path))
        try:
            for done in export.follow(log, run_id, directory, topics=names, backup=backup, notify=notify):
                total.add(done)
                if store is not None:
                    upload(archive, store)
                if done.rows:
                    notify(f"{sum(done.rows.values()):,} new rows, {sum(total.rows.values()):,} in all")
        finally:  # also after Ctrl-C, because the records exported so far can be used
            _print_export(total, json=json)


def _print_export(done: "Exported", *, json: bool) -> None:
    """Print what an export has written, and which records were deleted before it."""
    if json:
        emit(done)
        return
    for line in done.gone:
        print(line)
    rows = ", ".join(f"{count:,} {name}" for name, count in done.rows.items()) or "nothing new"
    print(f"{done.directory}: {rows} in {done.files} new files, {done.bytes / 1e6:,.1f} MB, {done.seconds:.1f} s")


@app.command("import", short_help="Import an exported run at new offsets.")
def import_topics(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory that `topics export` wrote, or DIR/RUN in it.")],
    *,
    run_id: Annotated[str | None, typer.Option("--run-id", metavar="NEW", help="Import under another id.")] = None,
    store: Annotated[
        str | None, typer.Option(metavar="URI", help="First copy URI, the folder of the run in an object store, to DIR/RUN.")
    ] = None,
    trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code", help="Sign the run with a new key, so that workers here execute the code that its configuration names."
        ),
    ] = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Import an exported run: the same records at new offsets."""
    from penstock.pipeline.archive.backup import MODEL, download, restore_checkpoints
    from penstock.pipeline.archive.files import find_archive
    from penstock.pipeline.archive.import_run import import_run
    from penstock.pipeline.runtime.registration.trust import adopt_run

    archive = find_archive(directory if store is None else download(store, directory).path)
    with at(bootstrap, security, start=True) as log:
        done = import_run(log, archive, becomes=run_id, notify=notify)
        restore_checkpoints(archive, done.run)
        if trust_code:
            adopt_run(log, done.run)
    if json:
        emit(done)
    else:
        rows = ", ".join(f"{count:,} {name}" for name, count in done.records.items() if count)
        print(f"run {done.run}: {rows} in {done.seconds:.1f} s; inspect it: penstock report {done.run}")
    if (model := archive.path / MODEL).is_dir():
        resume = f"penstock run --resume {done.run} --set model.path={model}"
        notify(f"to resume the run: penstock topics adopt {done.run}, then {resume}")


@app.command(short_help="Show an imported run's code and settings, and sign it.")
def adopt(
    run: Run,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Show a run that no key here has signed (an imported run, or one of an earlier release), and sign it with a new key."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.runtime.registration.trust import adopt_run, shown
    from penstock.topics.catalogue import control_topics_of

    with on_broker(run, bootstrap, security, executes=True) as (log, run_id):
        text = shown(log, run_id)
        if text is not None and not yes:
            notify(text)
            if json or not sys.stdin.isatty():
                raise ConfigError(
                    f"run {run_id} was not signed, because nothing confirmed it; to sign: penstock topics adopt {run_id} --yes"
                )
            typer.confirm(f"sign {run_id}?", abort=True, err=True)
        if text is None:
            log.create_topics(control_topics_of(run_id))
        else:
            adopt_run(log, run_id)
    if json:
        emit({"run": run_id, "signed": text is not None})
    else:
        print(f"run {run_id} is signed; resume it: penstock run --resume {run_id}" if text else f"run {run_id} is already signed")


@app.command(short_help="Print kafka-acls.sh commands for each role.")
def acls(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id; the run need not exist.")],
    *,
    user: Annotated[str, typer.Option(metavar="PATTERN", help="Kafka user of each role.")] = "{run}-{role}",
    json: Json = False,
) -> None:
    """Print the smallest set of ACLs for each role's Kafka user, as `kafka-acls.sh` commands; needs no broker."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.runtime.registration.run_registry import usable
    from penstock.pipeline.runtime.roles import acl_rules, as_acl_command

    rules = acl_rules(usable(run))
    try:
        users = {role: user.format(run=run, role=role) for role in rules}
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"--user {user}: expected a pattern with {{run}} and {{role}} only ({error})") from error
    if json:
        emit({role: {"user": users[role], "rules": rights} for role, rights in rules.items()})
        return
    for role, rights in rules.items():
        print(f"# {role}")
        for rule in rights:
            print(as_acl_command(rule, user=users[role]))


@app.command(short_help="List or end transactions that block readers.")
def unblock(
    run: Run,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="End the transactions; without --yes they are only listed.")] = False,
    commit: Annotated[bool | None, typer.Option("--commit/--abort", help="How to end transactions whose outcome is unknown.")] = None,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """List transactions whose end marker the brokers have lost, so that readers wait forever; --yes writes the end markers."""
    from penstock.infra.kafka.hanging import end_hanging, hanging_transactions

    with on_broker(run, bootstrap, security, executes=True) as (log, run_id):
        hanging = hanging_transactions(log, log.topics(f"{run_id}."))
        outcomes = [(each, commit if each.committed is None else each.committed) for each in hanging] if yes else []
        ended = [(transaction, outcome) for transaction, outcome in outcomes if outcome is not None]
        for transaction, outcome in ended:
            end_hanging(log, transaction, commit=outcome)
    if json:
        emit({"hanging": hanging, "ended": len(ended)})
        return
    for transaction in hanging:
        print(transaction)
    remaining = len(hanging) - len(ended)
    fix = f"penstock topics unblock {run_id} --yes{' --commit, or --abort' if yes else ''}"
    print(f"{remaining} transactions without an end marker; to end them: {fix}" if remaining else "no transaction blocks readers")


@app.command(short_help="Make all readers skip a damaged batch.")
def skip(
    run: Run,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="rollouts, calls, replies or metrics.")],
    partition: Annotated[int, typer.Argument(min=0)],
    offset: Annotated[int, typer.Argument(min=0, help="Offset in the readers' error message.")],
    *,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Make all readers skip a batch that is damaged on the broker's disk; the skip is recorded as a dead letter."""
    from penstock.pipeline.runtime.dead_letters import skip as skip_batch

    with on_broker(run, bootstrap, security, executes=True) as (log, run_id):
        skipped, follows = skip_batch(log, run_id, topic, partition, offset)
    if json:
        emit({"run": run_id, "topic": topic, "partition": partition, "first": skipped.start, "last": skipped.stop - 1})
    else:
        print(f"readers skip {topic}/{partition} from {skipped.start} to {skipped.stop - 1}; {follows}")


@app.command("delete", short_help="Delete a run: topics, registration and directory.")
def delete_topics(
    run: Run,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without --yes, only list what would be deleted.")] = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Permanently delete a run's topics, its registration and its directory on this machine."""
    from dataclasses import asdict

    from penstock.pipeline.archive.delete import delete, plan_deletion
    from penstock.pipeline.runtime.registration.run_registry import resolve

    with at(bootstrap, security) as log:
        # Topics without a registration, left over from an interrupted deletion or import, need the complete id.
        deletion = plan_deletion(log, run if run != "latest" and log.topics(f"{run}.") else resolve(log, run, executes=True))
        if not json:
            for name, count in deletion.offsets.items():
                print(f"{name}: {count:,} offsets{'' if yes else ' would be deleted'}")
            if deletion.directory is not None:
                print(f"{deletion.directory}: the run's directory{'' if yes else ' would be deleted'}")
        if yes:
            delete(log, deletion)
    if json:
        emit({**asdict(deletion), "deleted": yes})
    else:
        print(f"run {deletion.run} is deleted" if yes else f"nothing was deleted; to delete: penstock topics delete {deletion.run} --yes")
