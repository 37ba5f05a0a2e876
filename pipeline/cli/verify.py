"""`penstock verify`: a model's directory against its statement, its run's log, and repeated steps. Read-only."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.pipeline.cli.inspect import audit_source
from penstock.pipeline.cli.options import Bootstrap, Json, Security, TrustRun, emit, notify, reading

if TYPE_CHECKING:
    from penstock.pipeline.replay.provenance.statement import Problem

SHOWN = 20


@dataclass(slots=True, kw_only=True)
class Verification:
    """The levels that were checked, and the differences."""

    directory: Path
    statement: dict[str, Any] | None = None
    problems: list["Problem"] = field(default_factory=list)
    levels: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def level(self, damaged: str) -> Iterator[dict[str, Any]]:
        """Measure a level; a file or record that cannot be read ends it, under the name `damaged`."""
        from penstock.infra.errors import ConfigError, Unrecoverable
        from penstock.pipeline.replay.provenance.statement import Problem

        figures: dict[str, Any] = {"level": len(self.levels) + 1}
        wall, cpu = time.monotonic(), time.process_time()
        try:
            yield figures
        except ConfigError:
            raise
        except (ValueError, Unrecoverable) as error:
            self.problems.append(Problem(level=figures["level"], kind="changed", name=damaged, text=" ".join(str(error).split())))
        self.levels.append({**figures, "seconds": time.monotonic() - wall, "cpu_s": time.process_time() - cpu})

    def check_files(self) -> None:
        """Level 1: the files are those that the statement names."""
        from penstock.pipeline.inspect.report.provenance import STATEMENT, read_statement
        from penstock.pipeline.replay.provenance.statement import check_files

        with self.level(STATEMENT) as figures:
            self.statement = read_statement(self.directory)
            figures["files"] = len(self.statement["subject"])
            self.problems += check_files(self.directory, self.statement)

    def check_log(self, log: str, bootstrap: str, security: list[str] | None) -> None:
        """Level 2: the ledger ends in the statement's head, the audit passes, and topics, model and checkpoints agree with it."""
        from penstock.infra.errors import ConfigError
        from penstock.pipeline.inspect.audit import report
        from penstock.pipeline.inspect.audit.topic_digests import TopicDigests
        from penstock.pipeline.replay.provenance import statement as claims
        from penstock.pipeline.replay.provenance.statement import Problem
        from penstock.pipeline.replay.recording import Recording
        from penstock.pipeline.runtime.factories import open_store

        assert self.statement is not None
        predicate = self.statement["predicate"]
        with self.level(log) as figures:
            topics = predicate.get("topics", {})
            digests = TopicDigests({name: (topic["first"], topic["end"]) for name, topic in topics.items()})
            anchors, source = audit_source(log, bootstrap, security)
            audited = report.audit(source, anchors, digests)
            facts = audited.facts
            for result in audited.results:
                for violation in result.violations:
                    self.problems.append(Problem(level=2, kind="changed", name=result.check.name, text=report.as_line(violation)))
            entries = [(fact.entry, fact.sha256) for fact in facts.entries]
            self.problems += claims.check_ledger(predicate, run=facts.run, entries=entries, evaluations=facts.evaluations)
            starts = {f"{topic}/{partition}": start for (topic, partition), start in facts.start_offsets.items()}
            self.problems += claims.check_topics(topics, digests.as_table(), starts=starts, later=digests.later if facts.closed else {})
            figures |= {"entries": len(entries), "audit": report.summary(audited), "topics": len(topics)}
            try:
                with reading(log, bootstrap, security) as (read_log, run), Recording.open(read_log, run) as recording:
                    pass
            except ConfigError as error:  # the audit has read the run: its record is damaged
                raise ValueError(str(error)) from error
            self.problems += claims.check_model(self.directory, predicate["weights"], recording.ledger_state.manifests.get(0))
            if (store := open_store(recording.config, run, to_read=True)) is not None:
                figures["checkpoints"] = len(store.steps())
                self.problems += claims.check_checkpoints(store, recording.past.recorded(), recording.entries)

    def repeat_steps(self, log: str, count: int, seed: int, *, trust_code: bool, bootstrap: str, security: list[str] | None) -> None:
        """Level 3: random steps, repeated from the versions before them, give the recorded numbers."""
        from penstock.pipeline.replay.provenance.statement import Problem
        from penstock.pipeline.replay.recording import Recording, prepare
        from penstock.pipeline.runtime.registration.trust import Trust, require_trusted, user_code

        assert self.statement is not None
        head = self.statement["predicate"]["ledger"]["head"]
        with (
            self.level(log) as figures,
            reading(log, bootstrap, security, executes=True) as (read_log, run),
            Recording.open(read_log, run) as recording,
        ):
            code = user_code(recording.config, sections=("algorithm", "trainer"))
            require_trusted(recording.registration, trust=Trust(code=trust_code), notify=notify, code=code)
            prepare(recording.config)
            from penstock.pipeline.replay.provenance import single_steps  # imports torch, which reads the environment then

            steps = single_steps.selected(recording, count, seed=f"{head}/{seed}")
            cost_s = sum(entry.metrics.get("compute_s", 0.0) for entry in steps)
            notify(f"repeating steps {', '.join(str(entry.step) for entry in steps)}: the run's trainer computed them in {cost_s:.1f} s")
            figures["steps"] = []
            for repeated in single_steps.repeat_steps(recording, steps, architecture=str(self.directory), notify=notify):
                figures["steps"].append(asdict(repeated))
                text = "; ".join(repeated.differences)
                notify(f"step {repeated.step}: {text or 'the same bits'}")
                if not repeated.same:
                    self.problems.append(Problem(level=3, kind="changed", name=f"step {repeated.step}", text=text))


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

    if directory.is_file():
        return _verify_proof(directory, json=json)
    if steps and log is None:
        raise ConfigError("--steps needs --log: steps are repeated from the run's log")
    done = Verification(directory=directory)
    done.check_files()
    if log is not None and done.statement is not None:
        done.check_log(log, bootstrap, security)
        if steps:
            done.repeat_steps(log, steps, seed, trust_code=trust_code, bootstrap=bootstrap, security=security)
    if json:
        run = None if done.statement is None else done.statement["predicate"]["run"]
        emit({"directory": str(directory), "run": run, "verified": not done.problems, "problems": done.problems, "levels": done.levels})
    else:
        print("\n".join(_lines(done)))
    return 1 if done.problems else 0


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


def _lines(done: Verification) -> Iterator[str]:
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
