"""The three levels at which a model is verified: its statement and files, its run's log, and steps repeated. Read-only."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.infra.errors import ConfigError, Unrecoverable
from penstock.infra.log import Log
from penstock.pipeline.inspect.audit import report
from penstock.pipeline.inspect.audit.facts import Anchor
from penstock.pipeline.inspect.audit.source import Source
from penstock.pipeline.inspect.audit.topic_digests import TopicDigests
from penstock.pipeline.inspect.report import provenance
from penstock.pipeline.learner.policy_trainer import Notify
from penstock.pipeline.replay.provenance import statement as claims
from penstock.pipeline.replay.provenance.statement import Problem
from penstock.pipeline.replay.recording import Recording, prepare
from penstock.pipeline.runtime.factories import open_store
from penstock.pipeline.runtime.registration.trust import Trust, require_trusted, user_code

Reading = Callable[..., AbstractContextManager[tuple[Log, str]]]
"""Opens a log and yields it with the run's id; takes `executes`."""


@dataclass(slots=True, kw_only=True)
class Verification:
    """The levels that were checked, and the differences."""

    directory: Path
    notify: Notify
    statement: dict[str, Any] | None = None
    """None if it is damaged."""
    problems: list[Problem] = field(default_factory=list)
    levels: list[dict[str, Any]] = field(default_factory=list)

    @property
    def predicate(self) -> dict[str, Any]:
        """The claims about the run."""
        assert self.statement is not None, "level 1 has read it"
        stated: dict[str, Any] = self.statement["predicate"]
        return stated

    def check_files(self) -> None:
        """Level 1: the files are those that the statement names, and the card is its text."""
        with self._level(provenance.STATEMENT) as figures:
            self.statement = provenance.read_statement(self.directory)
            figures["files"] = len(self.statement["subject"])
            self.problems += claims.check_files(self.directory, self.statement)
            try:
                self.problems += claims.check_card(self.directory, self.predicate)
            except ConfigError as error:
                self.notify(f"{provenance.README} is not compared with the statement: {error}")

    def check_log(self, log: str, reading: Reading, audited: Callable[[], tuple[Sequence[Anchor], Source]]) -> None:
        """Level 2: the ledger ends in the statement's head, the audit passes, and claims, topics, model and checkpoints agree with it."""
        topics = self.predicate["topics"]
        with self._level(log) as figures:
            anchors, source = audited()
            digests = TopicDigests({name: (topic["first"], topic["end"]) for name, topic in topics.items()})
            audit = report.audit(source, anchors, digests)
            facts = audit.facts
            figures |= {"entries": len(facts.entries), "audit": report.summary(audit), "topics": len(topics)}
            for result in audit.results:
                self.problems += (claims.changed(name=result.check.name, text=report.as_line(each)) for each in result.violations)
            self.problems += claims.check_ledger(self.predicate, run=facts.run, sha256s=[fact.sha256 for fact in facts.entries])
            starts = {f"{topic}/{partition}": start for (topic, partition), start in facts.start_offsets.items()}
            self.problems += claims.check_topics(topics, digests.as_table(), starts=starts, later=digests.later if facts.closed else {})
            try:
                with reading() as (read_log, run), Recording.open(read_log, run) as recording:
                    published = provenance.read_published(read_log, run, ends={name: topic["end"] for name, topic in topics.items()})
                    actual = provenance.log_claims(published, provenance.known_secret(run))
                    self._check_model(recording)
            except ConfigError as error:  # the audit has read the run: its record is damaged
                raise ValueError(str(error)) from error
            if any(starts.get(name, 0) > topic["first"] for name, topic in topics.items()):  # figures need the records that are gone
                actual = {name: actual[name] for name in provenance.LEDGER_CLAIMS}
            elif digests.later:
                del actual["status"]
            else:
                actual["audit"] = provenance.audit_claims(report.as_table(audit))
            if actual.get("prompts") is None:
                actual.pop("prompts", None)
            self.problems += claims.check_claims(self.predicate, actual)
            if (store := open_store(recording.config, run, to_read=True)) is not None:
                figures["checkpoints"] = len(store.steps())
                self.problems += claims.check_checkpoints(store, recording.past.recorded(), recording.entries)

    def repeat_steps(self, log: str, reading: Reading, count: int, seed: int, *, trust_code: bool) -> None:
        """Level 3: random steps, repeated from the versions before them, give the recorded numbers."""
        with self._level(log) as figures, reading(executes=True) as (read_log, run), Recording.open(read_log, run) as recording:
            code = user_code(recording.config, sections=("algorithm", "trainer"))
            require_trusted(recording.registration, trust=Trust(code=trust_code), notify=self.notify, code=code)
            prepare(recording.config)
            from penstock.pipeline.replay.provenance import single_steps  # imports torch, which reads the environment then

            steps = single_steps.selected(recording, count, seed=f"{self.predicate['ledger']['head']}/{seed}")
            cost_s = sum(entry.metrics.get("compute_s", 0.0) for entry in steps)
            numbers = ", ".join(str(entry.step) for entry in steps)
            self.notify(f"repeating steps {numbers}: the run's trainer computed them in {cost_s:.1f} s")
            figures["steps"] = []
            for repeated in single_steps.repeat_steps(recording, steps, architecture=str(self.directory), notify=self.notify):
                figures["steps"].append(asdict(repeated))
                text = "; ".join(repeated.differences)
                self.notify(f"step {repeated.step}: {text or 'the same bits'}")
                if not repeated.same:
                    self.problems.append(Problem(level=3, kind="changed", name=f"step {repeated.step}", text=text))

    @contextmanager
    def _level(self, damaged: str) -> Iterator[dict[str, Any]]:
        """Measure a level; a file or record that cannot be read ends it, under the name `damaged`."""
        figures: dict[str, Any] = {"level": len(self.levels) + 1}
        wall, cpu = time.monotonic(), time.process_time()
        try:
            yield figures
        except ConfigError:
            raise
        except (ValueError, Unrecoverable) as error:
            self.problems.append(Problem(level=figures["level"], kind="changed", name=damaged, text=" ".join(str(error).split())))
        self.levels.append({**figures, "seconds": time.monotonic() - wall, "cpu_s": time.process_time() - cpu})

    def _check_model(self, recording: Recording) -> None:
        stated, manifests = self.predicate["weights"], recording.ledger_state.manifests
        version = next((number for number, manifest in manifests.items() if manifest.digest == stated), None)
        if version is None:
            return

        def export(target: Path) -> None:
            from penstock.infra.backends.model import write_model  # imports torch
            from penstock.pipeline.replay.restore_policy import weights_of

            write_model(self.directory, weights_of(recording, version), target)

        self.problems += claims.check_model(self.directory, stated, manifests[version].names, export)
