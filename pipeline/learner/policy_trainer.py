"""The policy being trained, as a live trainer, its recovery and a replay use it."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.infra.backends.base import Backend
from penstock.infra.backends.ranks.lead_backend import LeadBackend
from penstock.infra.checkpoints import CheckpointStore, Recorded, State
from penstock.infra.engines.shared_device import Sleepable
from penstock.infra.errors import BackendError, CheckpointError
from penstock.infra.tensors.adapted import Adapted
from penstock.infra.tensors.stream import HASH, Hash, TensorBytes, digest
from penstock.pipeline.config.load import Config
from penstock.pipeline.config.plugins import source_digest, split_options
from penstock.pipeline.learner.micro_batches import Ranks
from penstock.pipeline.learner.train_step import Objective, Step, StepOutcome, double_bits
from penstock.pipeline.runtime.factories import make_backend
from penstock.pipeline.scheduling import rules
from penstock.topics.groups import Group
from penstock.topics.ledger import Entry

if TYPE_CHECKING:
    from penstock.infra.backends.ranks.process_set import ProcessSet


Notify = Callable[[str], None]
WeightsOf = Callable[[int], Iterable[TensorBytes]]


@dataclass(slots=True)
class Weights:
    """The weights between two steps, copied and hashed at most once, when they are first used."""

    _copy: Callable[[], Sequence[TensorBytes]]
    hash_name: Hash = HASH
    adapted: Adapted | None = None
    """The same weights as base and adapters, if the model has adapters; `_copy` may then be called at any time."""
    _tensors: Sequence[TensorBytes] | None = field(default=None, repr=False)
    _digest: str | None = None
    _invalid: bool = False

    @property
    def tensors(self) -> Sequence[TensorBytes]:
        """The tensors; the first use copies them, which must be before the model takes another step."""
        tensors = self._tensors
        if tensors is None:
            assert not self._invalid, "the model has taken another step: these weights were not copied in time"
            self._tensors = tensors = self._copy()
        return tensors

    @property
    def digest(self) -> str:
        self._digest = self._digest or digest(self.tensors, self.hash_name)
        return self._digest

    @property
    def is_hashed(self) -> bool:
        """True if the digest is computed already."""
        return self._digest is not None

    def hashed(self, digest: str) -> None:
        """Set the digest, which was computed while the tensors were sent."""
        self._digest = digest

    def invalidate(self) -> None:
        """Forbid copying from now on, because the model changes; weights held as adapters stay valid."""
        self._invalid = self.adapted is None

    def forget(self) -> None:
        """Drop the copied tensors, which can be merged again from base and adapters."""
        assert self.adapted is not None, "weights without adapters cannot be copied again"
        self._tensors = None


@dataclass(slots=True, kw_only=True)
class PolicyTrainer:
    """The policy being trained: backend, objective and number of optimizer steps taken."""

    config: Config
    steps: int
    """Steps of the full run: a falling learning rate reaches zero there."""
    backend: Backend
    objective: Objective
    weights_of: WeightsOf | None = None
    """Reads the recorded weights of a version; without it a snapshot is always taken of the current weights."""
    processes: "ProcessSet | None" = None
    """The trainer's processes, led by this one, if it has several."""
    hash_name: Hash = HASH
    """Hash function of the digests in the run's ledger and manifests."""
    steps_done: int = 0
    before_update: Callable[[], None] = lambda: None
    """Called before the model changes; waits for background readers of the model."""
    _proximal: int | None = None
    """Version of the backend's snapshot."""
    _weights: Weights | None = field(default=None, repr=False)

    @classmethod
    def open(
        cls,
        config: Config,
        *,
        steps: int,
        weights_of: WeightsOf | None = None,
        processes: "ProcessSet | None" = None,
        hash_name: Hash = HASH,
    ) -> "PolicyTrainer":
        """Load the initial model of the run on each rank. Raises `BackendError`."""
        return cls(
            config=config, steps=steps, backend=_initial_backend(config, steps=steps, processes=processes),
            objective=Objective.of(config, total_steps=config.trainer.initial_steps + steps), weights_of=weights_of,
            processes=processes, hash_name=hash_name,
        )  # fmt: skip

    def step(self, *, recorded_ends: Sequence[int] | None = None) -> Step:
        """Start an optimizer step, to which groups are added; a repeated step divides them at `recorded_ends`.

        Raises `LogError` when a snapshot has to be read from the log and cannot be.
        """
        if self.objective.proximal == "snapshot":
            self._take_snapshot()
        self.release_weights()
        ranks = None if self.processes is None else Ranks(self.processes)
        return Step(self.backend, self.objective, self.steps_done, ranks, before_update=self.before_update, recorded_ends=recorded_ends)

    def weights(self) -> Weights:
        """The current weights; all callers between two steps share one copy."""
        if self._weights is None:
            adapted = self.backend.adapted()
            self._weights = Weights(self.backend.weights if adapted is None else adapted.merged, self.hash_name, adapted)
        return self._weights

    def sleep(self) -> None:
        """Free the device's memory, after background readers of the model have finished."""
        self.before_update()
        assert isinstance(self.backend, Sleepable)
        self.backend.sleep()

    def wake(self) -> None:
        assert isinstance(self.backend, Sleepable)
        self.backend.wake()

    def release_weights(self) -> None:
        """Forget the copy of the weights, which is as large as the model; a publication that still uses it keeps it."""
        if self._weights is not None:
            self._weights.invalidate()
        self._weights = None

    @property
    def version(self) -> int:
        """Policy version of the current weights; between two versions that of the older one."""
        count = rules.versions_of if self.steps_done == self.steps else rules.version_after
        return count(self.steps_done, steps_per_version=self.config.schedule.steps_per_version)

    def load_newest(
        self, store: CheckpointStore, recorded: Recorded, *, notify: Notify, doing: Notify, at_most: int | None = None
    ) -> State | None:
        """Load the newest checkpoint, of at most `at_most` steps, that is complete and agrees with the ledger.

        Returns its state; without one, None, and the policy stays at the initial model.
        """
        touched = False
        for steps in store.steps():
            if at_most is not None and steps > at_most:
                continue
            doing(f"loading checkpoint of step {steps}")
            try:
                state = store.verify(steps, recorded)
                touched = True
                self.load(store.path(steps) / "backend", state)
            except (CheckpointError, BackendError) as error:
                store.refuse(steps)
                notify(f"the checkpoint of step {steps} cannot be used: {error}")
                continue
            return state
        if touched:
            self._reopen()
        return None

    def load(self, directory: Path, state: State) -> None:
        """Load a verified checkpoint. Raises `BackendError`, or `CheckpointError` if its weights do not have the recorded digest."""
        self.release_weights()
        self._proximal = None
        self.backend.load(directory)
        first = self.config.trainer.initial_steps
        loaded = self.weights().digest
        if loaded != state.digest or self.backend.steps != first + state.steps:
            steps = self.backend.steps - first
            raise CheckpointError(f"its weights digest is {loaded[:16]}… after {steps} steps, expected {state.digest[:16]}…")
        self.steps_done = state.steps

    def _reopen(self) -> None:
        """Load the initial model again, because a failed load may have replaced half of its weights."""
        self.backend.close()
        self.backend = _initial_backend(self.config, steps=self.steps, processes=self.processes)
        self.release_weights()
        self.steps_done, self._proximal = 0, None

    def _take_snapshot(self) -> None:
        """Make the weights at the start of the current version the proximal policy; they are read from the log after its first step."""
        per_version = self.config.schedule.steps_per_version
        version = rules.version_after(self.steps_done, steps_per_version=per_version)
        if version == self._proximal:
            return
        is_first_step = self.steps_done % per_version == 0
        self.backend.take_snapshot(None if is_first_step or self.weights_of is None else self.weights_of(version))
        self._proximal = version


def _initial_backend(config: Config, *, steps: int, processes: "ProcessSet | None") -> Backend:
    """A backend with the run's initial model, and the parent's optimizer state if the run is a fork."""
    if processes is None:
        backend = make_backend(config, steps=steps)
    else:
        processes.broadcast(do="open")
        backend = LeadBackend(make_backend(config, steps=steps), processes)
    if config.trainer.initial_state is not None:
        backend.load(config.trainer.initial_state)
        if backend.steps != config.trainer.initial_steps:
            state, expected = config.trainer.initial_state, config.trainer.initial_steps
            raise BackendError(f"trainer.initial_state: {state} is at step {backend.steps}, but trainer.initial_steps = {expected}")
    return backend


def arithmetic_of(backend: Backend, config: Config) -> dict[str, str | int]:
    """The backend's fingerprint, with a digest of the source of each user function."""
    names = {"algorithm.loss": config.algorithm.loss, "algorithm.advantage": config.advantage}
    return backend.fingerprint() | {key: source_digest(split_options(name)[0])[:16] for key, name in names.items() if ":" in name}


def changed_arithmetic(entries: Sequence[Entry], now: Mapping[str, str | int]) -> dict[str, tuple[Any, Any]]:
    """Compare the fingerprint `now` with the newest one in the ledger; return name -> (recorded, now) of what differs."""
    details = [json.loads(entry.details or "{}") for entry in entries if entry.kind in ("run-opened", "rebased")]
    recorded: Mapping[str, Any] = details[-1].get("fingerprint", {}) if details else {}
    if recorded and "forward" in now:
        recorded = {"forward": "padded rows, logits whole", **recorded}  # the default of fingerprints without this key
    return {name: (recorded[name], now.get(name)) for name in recorded if recorded[name] != now.get(name)}


def rebases(config: Config, changed: Mapping[str, Any], now: Mapping[str, str | int]) -> bool:
    """True if a trainer continues although a repeated step differs: by `trainer.on_mismatch`, by default on GPUs or changed arithmetic."""
    action = config.trainer.on_mismatch
    return action == "rebase" if action is not None else bool(changed) or now.get("device", "cpu") != "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A number of a repeated step that differs from the ledger."""

    name: str
    recomputed: Any
    recorded: Any
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Result of a repeated step, with its differences from the ledger."""

    entry: Entry
    outcome: StepOutcome
    weights: Weights
    differences: tuple[Difference, ...]
    """Empty if every number has the recorded bits."""


def repeat(policy: PolicyTrainer, entry: Entry, groups: Iterable[Group]) -> Repetition:
    """Train on the groups of a recorded plan in the recorded micro-batches, and compare all numbers of the step with the ledger."""
    step, planned = policy.step(recorded_ends=entry.boundaries), {member.group: member for member in entry.plan}
    for group in groups:
        step.add(group, planned.get(group.group))
    outcome = step.finish(learner_version=entry.version or 0)
    policy.steps_done += 1
    weights, differences = policy.weights(), compare(outcome, entry)
    if entry.digest is not None and weights.digest != entry.digest:
        differences.append(other_weights(weights.digest, entry.digest))
    return Repetition(entry=entry, outcome=outcome, weights=weights, differences=tuple(differences))


def compare(outcome: StepOutcome, entry: Entry) -> list[Difference]:
    """The numbers in which a repeated step differs from the recorded one; empty if all bits are equal."""
    pairs = {"loss": (outcome.loss, entry.loss_bits), "gradient norm": (outcome.grad_norm, entry.grad_norm_bits)}
    recorded = {"loss": entry.metrics.get("loss"), "gradient norm": entry.metrics.get("grad_norm")}
    differences = []
    for name, (number, bits) in pairs.items():
        if double_bits(number) != bits:
            text = f"{name} {number!r}, recorded {recorded[name]!r} (bits {double_bits(number)} and {bits})"
            differences.append(Difference(name=name, recomputed=number, recorded=recorded[name], text=text))
    if outcome.boundaries != entry.boundaries:
        ends, expected = list(outcome.boundaries), list(entry.boundaries)
        text = f"micro-batch boundaries {ends} instead of the recorded {expected}"
        differences.append(Difference(name="boundaries", recomputed=ends, recorded=expected, text=text))
    return differences


def other_weights(digest: str, recorded: str) -> Difference:
    """The difference between two digests of the weights after a step."""
    text = f"weights {digest[:16]}…, recorded {recorded[:16]}…"
    return Difference(name="weights digest", recomputed=digest, recorded=recorded, text=text)
