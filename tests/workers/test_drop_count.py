"""Feeder and trainer, restarted at any moment: the run makes progress or its trainer ends it, it never waits for ever."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.rules import MODES, preset
from penstock.pipeline.scheduling.step_selector import Candidate
from penstock.topics import groups
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Record
from penstock.workers.feeder.worker import Admission
from penstock.workers.trainer.inbox import DropLimit, GroupInbox

RUN, STEPS, LIMIT = "demo", 3, 3
OUTCOMES = ("scored", "filtered", "failed", "abandoned")
ACTIONS = ("feed", "score", "feeder reads", "trainer reads", "feeder restarts", "trainer restarts")


def refused(record: Record, error: Unusable) -> None:
    raise AssertionError(f"{record} is not usable: {error}")


@dataclass
class Run:
    """A log of outcomes with its two readers; `outcomes[g]` is what the scorer will say of group g, the last one of all later groups."""

    mode: str
    outcomes: list[str]
    log: list[tuple[int, str]] = field(default_factory=list)
    admitted: int = 0
    trained: list[int] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        self.schedule = preset(self.mode, prompts_per_step=2, samples_per_prompt=2, steps_per_version=1, max_drops_per_step=LIMIT)
        self.drops_at_step = 0
        self.feeder_restarts()
        self.trainer_restarts()

    @property
    def steps(self) -> int:
        return len(self.trained) // self.schedule.prompts_per_step

    def feeder_restarts(self) -> None:
        self.feeder, self.fed = Admission(RUN, 1, LedgerState(RUN)), 0
        for number in range(self.admitted):
            self._admit(number)

    def trainer_restarts(self) -> None:
        """A new trainer reads what is there, and counts from then on; a resumed run is one whose trainer had ended."""
        inbox = GroupInbox(run=RUN, schedule=self.schedule, dead_letter=refused, duplicate=print)
        inbox.selector.settle(list(self.trained))
        self.drops, self.read, self.plan, self.ended = DropLimit(inbox, at_last_step=self.drops_at_step), 0, [], False
        if self.log:
            self.trainer_reads(count=False)
            self.drops.tolerate()

    def feed(self) -> None:
        limit = rules.admission_limit(self.schedule, newest_version=self.steps, dropped=self.feeder.dropped, steps=STEPS)
        for _ in range(self.feeder.admissible(limit)):
            self._admit(self.admitted)
            self.admitted += 1

    def _admit(self, number: int) -> None:
        choice = self.feeder.choices.next()
        assert choice is not None
        self.feeder.admit(number, 0, number, choice=choice)

    def score(self) -> None:
        number = len(self.log)
        if number < self.admitted:
            self.log.append((number, self.outcomes[min(number, len(self.outcomes) - 1)]))

    def feeder_reads(self) -> None:
        for number, outcome in self.log[self.fed :]:
            samples = {"part": 0, "parts": 1, "samples": 2, "tokens": 9, "policy_version_min": 0, "policy_version_max": 0}
            headers = Headers(run=RUN, schema=groups.SCHEMA, group=number, outcome=outcome, worker="w", sha256="0" * 64, **samples)
            self.feeder.apply(
                Record(topic=f"{RUN}.groups", partition=0, offset=number, timestamp_ms=0, key=None, headers=headers.encode(b""), value=b"")
            )
        self.fed = len(self.log)

    def trainer_reads(self, *, count: bool = True) -> None:
        if self.ended:
            return
        for number, outcome in self.log[self.read :]:
            at = {"partition": 0, "offset": number, "sha256": ""}
            self.drops.inbox.selector.add(Candidate(group=number, outcome=outcome, policy_version_min=self.steps, **at))
        self.read = len(self.log)
        while count and self.steps < STEPS and (found := self.drops.inbox.selector.take(learner_version=self.steps)) is not None:
            self.plan.append(found.group)
            if len(self.plan) == self.schedule.prompts_per_step:
                self.trained, self.plan = [*self.trained, *self.plan], []
                self.drops.committed()
                self.drops_at_step = self.drops.at_last_step
        self.ended = count and self.drops.passed(steps_done=self.steps) is not None

    def do(self, action: str) -> None:
        getattr(self, action.replace(" ", "_"))()

    def at_rest(self) -> tuple[int, ...]:
        return self.admitted, len(self.log), self.fed, self.read, len(self.trained)


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(MODES)),
    st.lists(st.sampled_from(OUTCOMES), min_size=1, max_size=24),
    st.lists(st.sampled_from(ACTIONS), max_size=60),
)
def test_whatever_restarts_when_the_run_ends_its_steps_or_its_trainer_ends_it(mode: str, outcomes: list[str], actions: list[str]) -> None:
    run = Run(mode, outcomes)
    for action in actions:
        run.do(action)
    while not run.ended and run.steps < STEPS:
        before = run.at_rest()
        for action in ("feed", "score", "feeder reads", "trainer reads"):
            run.do(action)
        assert run.ended or run.at_rest() != before, "the trainer waits for groups that are never admitted"
    if set(outcomes) == {"scored"}:
        assert run.steps == STEPS
