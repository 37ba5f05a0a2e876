"""`penstock verify`: a model's directory against its statement, its run's log, and repeated steps. Read-only."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.pipeline.cli.inspect import audit_source
from penstock.pipeline.cli.options import Bootstrap, Json, Security, TrustRun, emit, notify, reading

if TYPE_CHECKING:
    from penstock.pipeline.replay.provenance.statement import Verification

SHOWN = 20


def verify(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR|PROOF", help="A model's directory with a provenance.json, or a file of `penstock card --prove`.")
    ],
    *,
    log: Annotated[
        str | None, typer.Option("--log", metavar="RUN|DIR", help="Also check the run's log, or an exported folder of it.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=0, metavar="N", help="Also repeat N random steps of the log.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Selects the steps, together with the statement's head.")] = 0,
    trust_code: TrustRun = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> int:
    """Verify a model against its statement, its run's log, and some of the run's steps; exit status 1 for any difference."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.replay.provenance.statement import Verification

    if directory.is_file():
        return _verify_proof(directory, json=json)
    if steps and log is None:
        raise ConfigError("--steps needs --log: steps are repeated from the run's log")
    done = Verification(directory=directory, notify=notify)
    done.check_files()
    if log is not None and done.statement is not None:
        read = partial(reading, log, bootstrap, security)
        done.check_log(log, read, partial(_audit, log, bootstrap, security))
        if steps and "entries" in done.levels[-1]:  # the log could be read
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
    """An audit as a table, its violations as (check, text), the digests of these spans, and the numbers of records after them."""
    from penstock.pipeline.inspect.audit import report
    from penstock.pipeline.inspect.audit.topic_digests import TopicDigests

    anchors, source = audit_source(log, bootstrap, security)
    audited = report.audit(source, anchors, digests := TopicDigests(spans))
    violations = [(result.check.name, report.as_line(violation)) for result in audited.results for violation in result.violations]
    return report.as_table(audited), violations, digests.as_table(), digests.later


def _verify_proof(path: Path, *, json: bool) -> int:
    """Check a proof of one group from its file alone; raises if it is invalid."""
    from json import loads

    from penstock.infra.errors import ConfigError
    from penstock.pipeline.inspect.report.inclusion import check
    from penstock.topics.wire.visible import visible

    try:
        proof = loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is neither a model's directory nor a proof: {' '.join(str(error).split())[:200]}") from error
    proved = check(proof)
    if json:
        emit(proved._asdict())
        return 0
    run, prompt = visible(proved.run, one_line=True), visible(proved.prompt, one_line=True)
    print(f"run {run} trained group {proved.group} in step {proved.step}: {prompt}")
    by = "its record" if proved.has_record else "its card"
    print(f"{by} proves the prompt, if the card has the head {proved.head} and the root {proved.root}")
    return 0


def _lines(done: "Verification") -> Iterator[str]:
    """The result as text; the last line is the verdict."""
    for level in done.levels:
        count = sum(problem.level == level["level"] for problem in done.problems)
        differences = f"{count or 'no'} difference{'' if count == 1 else 's'}"
        yield f"level {level['level']}: {_examined(level)}: {differences}, {level['seconds']:.1f} s"
    yield from (f"  {problem}" for problem in done.problems[:SHOWN])
    if len(done.problems) > SHOWN:
        yield f"  and {len(done.problems) - SHOWN} more; --json lists them"
    yield "not verified" if done.problems else "verified"


def _examined(level: dict[str, Any]) -> str:
    match level["level"]:
        case 1:
            return f"{level.get('files', 0)} files"
        case 2:
            return f"{level.get('entries', 0)} ledger entries, {level.get('topics', 0)} partitions; {level.get('audit', 'no audit')}"
        case _:
            return f"{len(level.get('steps', ()))} steps repeated"
