"""A model between two optimizer steps, and how a recorded step is trained again: the same for a live trainer, its recovery and a replay.

The rule: it needs no worker and writes nothing; what a step gives is a function of the model before it and the groups of its plan.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.infra.backends.base import Backend
from penstock.infra.checkpoints import CheckpointStore, Recorded, State
from penstock.infra.errors import BackendError, CheckpointError
from penstock.infra.tensors.stream import TensorBytes, digest
from penstock.pipeline.config.load import Config
from penstock.pipeline.learner.train_step import Objective, Step, StepOutcome, double_bits
from penstock.pipeline.runtime.factories import make_backend
from penstock.pipeline.scheduling import schedule as rules
from penstock.topics.groups import Group
from penstock.topics.ledger import Entry

Say = Callable[[str], None]
WeightsOf = Callable[[int], Iterable[TensorBytes]]


@dataclass(slots=True)
class Weights:
    """The weights between two steps: copied out at most once and hashed at most once, when somebody asks."""

    _copy: Callable[[], Sequence[TensorBytes]]
    _tensors: Sequence[TensorBytes] | None = field(default=None, repr=False)
    _digest: str | None = None
    _over: bool = False

    @property
    def tensors(self) -> Sequence[TensorBytes]:
        """The tensors themselves."""
        if self._tensors is None:
            assert not self._over, "the model has gone on: these weights were not copied in time"
            self._tensors = self._copy()
        return self._tensors

    @property
    def digest(self) -> str:
        """Their digest, as the ledger has it."""
        self._digest = self._digest or digest(self.tensors)
        return self._digest

    def pass_by(self) -> None:
        """From now on the model has other weights."""
        self._over = True


@dataclass(slots=True, kw_only=True)
class Course:
    """A backend on its way through a run's steps."""

    config: Config
    steps: int
    """Of the whole run: where a falling learning rate reaches zero."""
    backend: Backend
    objective: Objective
    weights_of: WeightsOf | None = None
    """The recorded weights of a version; without it a snapshot is always taken of the weights there are."""
    steps_done: int = 0
    _proximal: int | None = None
    """The version whose weights the backend keeps as its snapshot."""
    _weights: Weights | None = field(default=None, repr=False)

    @classmethod
    def open(cls, config: Config, *, steps: int, weights_of: WeightsOf | None = None) -> "Course":
        """Load the model that the run begins with. Raises `BackendError`."""
        backend = _begin(config, steps=steps)
        return cls(config=config, steps=steps, backend=backend, objective=Objective.of(config), weights_of=weights_of)

    def reopen(self) -> None:
        """Put the model that the run begins with in the place of one that was half replaced."""
        self.backend.close()
        self.backend = _begin(self.config, steps=self.steps)
        self.let_go()
        self.steps_done, self._proximal = 0, None

    def step(self) -> Step:
        """An optimizer step to be fed with groups. Raises `LogError` when a snapshot has to come from the log and is not there."""
        if self.objective.proximal == "snapshot":
            self._hold_snapshot()
        self.let_go()
        return Step(self.backend, self.objective)

    def weights(self) -> Weights:
        """The weights there are; copied and hashed once between two steps, whoever asks."""
        self._weights = self._weights or Weights(self.backend.weights)
        return self._weights

    def let_go(self) -> None:
        """Forget the copy of the weights: it is as large as the model."""
        if self._weights is not None:
            self._weights.pass_by()
        self._weights = None

    @property
    def version(self) -> int:
        """The newest version that is published after the steps done."""
        count = rules.versions_of if self.steps_done == self.steps else rules.version_after
        return count(self.steps_done, steps_per_version=self.config.schedule.steps_per_version)

    def load(self, directory: Path, state: State) -> None:
        """Go on from a verified checkpoint. Raises `BackendError`, `CheckpointError` when it gives other weights than it says."""
        self.let_go()
        self._proximal = None
        self.backend.load(directory)
        first = self.config.trainer.initial_steps
        if (found := self.weights().digest) != state.digest or self.backend.steps != first + state.steps:
            steps = self.backend.steps - first
            raise CheckpointError(f"it gives weights {found[:16]}… after {steps} steps, not {state.digest[:16]}…")
        self.steps_done = state.steps

    def _hold_snapshot(self) -> None:
        """Keep the weights with which the version under way began; in its middle they are those that it was published with."""
        per_version = self.config.schedule.steps_per_version
        version = rules.version_after(self.steps_done, steps_per_version=per_version)
        if version == self._proximal:
            return
        begins = self.steps_done % per_version == 0 or self.weights_of is None
        self.backend.take_snapshot(None if begins or self.weights_of is None else self.weights_of(version))
        self._proximal = version


def _begin(config: Config, *, steps: int) -> Backend:
    """A backend with the run's initial model, and with the optimizer state that it begins with, if it goes on from another run's."""
    backend = make_backend(config, steps=steps)
    if config.trainer.initial_state is not None:
        backend.load(config.trainer.initial_state)
        if backend.steps != config.trainer.initial_steps:
            wanted = config.trainer.initial_steps
            raise BackendError(f"the state in {config.trainer.initial_state} is of step {backend.steps}, trainer.initial_steps is {wanted}")
    return backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Differing:
    """A number that a repeated step gave and that is not the recorded one."""

    name: str
    found: Any
    recorded: Any
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """A recorded step trained again."""

    entry: Entry
    outcome: StepOutcome
    weights: Weights
    differences: tuple[Differing, ...]
    """Empty when it is the same bit for bit."""


def repeat(course: Course, entry: Entry, groups: Iterable[Group]) -> Repetition:
    """Train the groups of a recorded plan and compare every bit that the ledger has of its step."""
    step = course.step()
    for group in groups:
        step.add(group)
    outcome = step.finish(learner_version=entry.version or 0)
    course.steps_done += 1
    weights, differences = course.weights(), compare(outcome, entry)
    if entry.digest is not None and weights.digest != entry.digest:
        differences.append(other_weights(weights.digest, entry.digest))
    return Repetition(entry=entry, outcome=outcome, weights=weights, differences=tuple(differences))


def compare(outcome: StepOutcome, entry: Entry) -> list[Differing]:
    """In which numbers a repeated step differs from the recorded one; empty when it is the same bit for bit."""
    pairs = {"loss": (outcome.loss, entry.loss_bits), "gradient norm": (outcome.grad_norm, entry.grad_norm_bits)}
    recorded = {"loss": entry.metrics.get("loss"), "gradient norm": entry.metrics.get("grad_norm")}
    differences = []
    for name, (found, bits) in pairs.items():
        if double_bits(found) != bits:
            text = f"{name} {found!r} where the ledger says {recorded[name]!r} (bits {double_bits(found)} and {bits})"
            differences.append(Differing(name=name, found=found, recorded=recorded[name], text=text))
    if outcome.boundaries != entry.boundaries:
        ends, told = list(outcome.boundaries), list(entry.boundaries)
        text = f"micro-batches that end at {ends} where the ledger says {told}"
        differences.append(Differing(name="boundaries", found=ends, recorded=told, text=text))
    return differences


def other_weights(found: str, recorded: str) -> Differing:
    """That the weights after a step have another digest."""
    text = f"weights {found[:16]}… where the ledger says {recorded[:16]}…"
    return Differing(name="weights digest", found=found, recorded=recorded, text=text)


def load_newest(
    course: Course, store: CheckpointStore, recorded: Recorded, *, say: Say, doing: Say, at_most: int | None = None
) -> State | None:
    """Load the newest checkpoint (of at most so many steps) that is whole, agrees with the ledger and gives the recorded weights.

    Without one the course stands where it stood, at the run's beginning.
    """
    touched = False
    for steps in store.steps():
        if at_most is not None and steps > at_most:
            continue
        doing(f"loading checkpoint of step {steps}")
        try:
            state = store.verify(steps, recorded)
            touched = True
            course.load(store.path(steps) / "backend", state)
        except (CheckpointError, BackendError) as error:
            store.refuse(steps)
            say(f"checkpoint of step {steps} is not used: {error}")
            continue
        return state
    if touched:
        course.reopen()
    return None
