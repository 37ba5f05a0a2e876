"""Creates the run of `penstock regrade --start`: the parent's log up to a step, then steps trained on the regraded groups.

The run is registered last, so that an interruption leaves no run. Its workers resume it like any run that was stopped after a step.
"""

import json
import shutil
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from penstock.infra.checkpoints import State
from penstock.infra.errors import PenstockError
from penstock.infra.paths import run_directory
from penstock.pipeline.config.load import ConfigError, with_values
from penstock.pipeline.launch.create import check_inputs, new_id
from penstock.pipeline.learner.policy_trainer import Notify, PolicyTrainer
from penstock.pipeline.learner.train_step import Objective, Step, StepOutcome
from penstock.pipeline.replay.fork import origin_of
from penstock.pipeline.replay.recording import Recording, spans, with_model
from penstock.pipeline.replay.regrade import Past, PlannedStep, Regraded
from penstock.pipeline.replay.rescored_groups import NewRun, read_prompts
from penstock.pipeline.replay.restore_policy import advance_to, open_policy
from penstock.pipeline.rewards.scoring import group_of
from penstock.pipeline.runtime.factories import open_store
from penstock.pipeline.runtime.reporting.log_lines import Progress
from penstock.pipeline.runtime.weights.publish import deletable
from penstock.pipeline.scheduling import rules
from penstock.topics.ledger import Entry, EntryKind, Planned
from penstock.topics.runs import RunRecord
from penstock.topics.weights import NOWHERE, Manifest

OWN_INFO = ("reward_sources", "code", "git")
"""Keys of the run's info that are computed for the new run; the others are copied from the parent."""


class TooFarOff(Exception):
    """The effective sample size of a step is below the floor; the weights were not updated."""


def write_regraded(recording: Recording, regraded: Regraded, *, run_id: str | None, notify: Notify) -> RunRecord:
    """Train the regraded steps in a new run, up to the floor of the effective sample size, and register it. Raises `PenstockError`."""
    if not regraded.steps:
        reasons = [row["reason"] for row in regraded.report["broken"]]
        cause = f" Last failed reward: {reasons[-1]}." if reasons else ""
        raise PenstockError(
            f"the regraded groups of {recording.run} do not fill one step, so there is nothing to train.{cause} "
            "Choose an earlier --from-step, or check the reward"
        )
    config, run = regraded.config, run_id or new_id(regraded.config)
    info = {name: value for name, value in check_inputs(config, notify=notify)[0].items() if name in OWN_INFO}
    with NewRun.create(recording.log, regraded.source, run, config, option="--run-id", worker=f"regrade:{recording.run}") as new:
        if run_directory(run).exists():
            raise ConfigError(f"{run_directory(run)} exists already; choose another --run-id, or remove it")
        notify(f"writing {run}; it is registered when its regraded steps are trained")
        try:
            _own_start(new, recording.run)
            with open_policy(recording, recording.config, notify=notify) as policy:
                advance_to(policy, recording, regraded.past.first, notify=notify)
                return _Branch(recording, regraded, new, policy, {**recording.info, **info, "rescored_from": None}).write(notify)
        except BaseException:
            shutil.rmtree(run_directory(run), ignore_errors=True)
            raise


def _own_start(new: NewRun, parent: str) -> None:
    """If the parent is a fork, copy the model and optimizer state that it starts from, so that the parent can be deleted."""
    theirs, ours = run_directory(parent) / "start", run_directory(new.run) / "start"
    if theirs.is_dir():
        shutil.copytree(theirs, ours)
        state = new.config.trainer.initial_state and str(ours / "backend")
        new.config = with_model(with_values(new.config, "trainer", initial_state=state), ours / "model")


@dataclass(slots=True)
class _Branch:
    """Ledger entries and published versions of the new run so far."""

    recording: Recording
    regraded: Regraded
    new: NewRun
    policy: PolicyTrainer
    info: dict[str, Any]
    entries: list[Entry] = field(default_factory=list)
    manifests: list[Manifest] = field(default_factory=list)
    _ended: int = 0
    """Number of candidates whose outcome has been written."""

    def write(self, notify: Notify) -> RunRecord:
        """Copy the parent up to the first regraded step, train the regraded steps, and register the run. Raises `PenstockError`."""
        past, new = self.regraded.past, self.new
        origin = origin_of(self.recording, self.policy, past.first)
        for outcome in self.regraded.source.reader.groups(only=past.settled, decode=False):
            if outcome.headers is not None:
                new.copy_group(outcome)
        new.commit()
        self._copy_ledger()
        self._copy_versions()
        self._train(notify)
        if self.policy.steps_done == past.first:
            raise PenstockError(
                f"the effective sample size of step {past.first} is below {self.regraded.floor:g}, so no regraded step is trained. Lower "
                f"--floor, or generate new samples from there: penstock fork {self.recording.run} --from-step {past.first}"
            )
        below = 1 + max(new.offsets)
        self._abandon_rest(below)
        new.copy(only=frozenset(range(below)), notify=notify)
        self._save()
        steps, numbers = self.policy.steps_done - past.first, new.offsets.keys() - past.settled
        self.info["regraded_from"] = origin | {
            "steps": steps, "groups": list(spans(sorted(numbers))), "before": _earlier(self.recording.info.get("regraded_from"), past),
        }  # fmt: skip
        self.entries[0] = replace(self.entries[0], details=new.opening(self.info))
        return new.register(self.info, self.entries, self.manifests, status="created")

    def _append(self, kind: EntryKind, **fields: Any) -> None:
        self.entries.append(Entry(seq=len(self.entries), kind=kind, time_ns=time.time_ns(), **fields))

    def _copy_ledger(self) -> None:
        """Copy the parent's entries before the first regraded step, without resume points, which name offsets of the parent's topics."""
        first = self.regraded.past.first
        for entry in self.regraded.source.past.entries:
            limits = {"run-opened": 0, "step": first - 1, "stale": first - 1, "version": first, "rebased": first}
            if (entry.step or 0) > limits.get(entry.kind, -1):
                continue
            plan = tuple(replace(planned, offset=self.new.offsets[planned.group]) for planned in entry.plan)
            details = None if entry.kind == "step" else entry.details
            self.entries.append(replace(entry, seq=len(self.entries), plan=plan, details=details))

    def _copy_versions(self) -> None:
        """Copy version 0 and the newest one; of the other versions only manifests, as if retention had deleted the chunks."""
        first, recorded = self.regraded.past.first, self.regraded.source.past.ledger_state.manifests
        newest = rules.version_after(first, steps_per_version=self.regraded.config.schedule.steps_per_version)
        if newest not in recorded:
            raise PenstockError(f"version {newest} of {self.recording.run} is not published yet; repeat this command in a few seconds")
        for version in range(newest + 1):
            manifest = recorded[version]
            if version in (0, newest):
                current = self.policy.weights().tensors if manifest.step == first else None
                self.manifests.append(self.new.copy_version(version, current))
            else:
                self.manifests.append(replace(manifest, chunk_offsets=(NOWHERE,) * len(manifest.chunk_offsets)))

    def _train(self, notify: Notify) -> None:
        """Train the regraded steps up to the first whose effective sample size is below the floor, and commit each."""
        config, policy, progress = self.regraded.config, self.policy, Progress(notify)
        policy.objective = Objective.of(config, total_steps=config.trainer.initial_steps + policy.steps)
        for step in self.regraded.steps:
            training, started = policy.step(), time.time()
            training.before_update = partial(_require_near, training, self.regraded.floor)
            for member in step.members:
                training.add(self.regraded.spool.read(member.number))
            try:
                outcome = training.finish(learner_version=step.version)
            except TooFarOff as error:
                notify(f"step {step.number} {error}: from here on the new run generates its own samples")
                return
            policy.steps_done += 1
            self._commit(step, outcome, started=started)
            planned = self.regraded.source.planned_steps
            progress(f"{policy.steps_done} of {planned} steps trained, ess {outcome.metrics.get('ess', 1.0):.2f}")

    def _commit(self, step: PlannedStep, outcome: StepOutcome, *, started: float) -> None:
        """Write a trained step: the outcomes of groups up to its last one, its ledger entry, and the policy version if one is due."""
        new, digest, digests = self.new, self.policy.weights().digest, dict[int, str]()
        ended = self.regraded.order[self._ended : step.ended]
        for candidate in ended:
            digests[candidate.number] = new.write_group(self.regraded.spool.read(candidate.number), candidate.partition)
        new.commit()
        self._ended = step.ended
        if step.stale:
            self._append("stale", step=step.number, groups=step.stale)
        plan = tuple(
            Planned(group=member.number, sha256=digests[member.number], partition=member.partition, offset=new.offsets[member.number])
            for member in step.members
        )
        measured = {**outcome.metrics, "started_at": started, "wait_s": 0.0, "dropped": float(len(ended) - len(plan))}
        self._append(
            "step", step=step.number, version=step.version, plan=plan, boundaries=outcome.boundaries, loss_bits=outcome.loss_bits,
            grad_norm_bits=outcome.grad_norm_bits, digest=digest, metrics=measured,
            details=json.dumps({"regraded_from": {"run": self.recording.run}}),
        )  # fmt: skip
        if rules.publishes(step.number, steps=self.policy.steps, steps_per_version=new.config.schedule.steps_per_version):
            self._publish(digest)
        self.policy.release_weights()

    def _publish(self, digest: str) -> None:
        """Send the policy's weights as its next version, and delete chunks of earlier versions as configured."""
        version, step = self.policy.version, self.policy.steps_done
        self.manifests.append(self.new.send(self.policy.weights().tensors, version=version, step=step, digest=digest))
        self._append("version", version=version, step=step, digest=digest, metrics={"bytes": float(self.manifests[-1].nbytes)})
        if self.new.config.weights.keep == "chain":
            sent = {manifest.version: manifest for manifest in self.manifests if NOWHERE not in manifest.chunk_offsets}
            before = deletable(sent, ends={}, every=self.new.config.weights.anchor_every)
            self.new.log.delete_records({(f"{self.new.run}.weights", partition): offset for partition, offset in before.items()})

    def _abandon_rest(self, below: int) -> None:
        """Mark every remaining group below this number as abandoned, so that the feeder admits its prompt again."""
        rest = frozenset(range(below)) - self.new.offsets.keys()
        reason, reward = f"not trained by the regraded steps of {self.recording.run}", self.new.config.reward
        for prompt, partition in read_prompts(self.regraded.source, numbers=rest).values():
            group = group_of(prompt, "abandoned", reason=reason, reward=reward, scored_ns=time.time_ns())
            self.new.write_group(group, partition)
        self.new.commit()

    def _save(self) -> None:
        """Write the checkpoint from which the new run's trainer resumes."""
        policy, digest = self.policy, self.policy.weights().digest
        state = State(run=self.new.run, steps=policy.steps_done, version=policy.version, digest=digest, seq=len(self.entries) - 1)

        def record(size: int) -> None:
            self._append("checkpoint", step=state.steps, version=state.version, digest=digest, metrics={"bytes": float(size)})

        if (store := open_store(self.new.config, self.new.run)) is not None:
            store.write(state, save=policy.backend.save, record=record)


def _earlier(origin: dict[str, Any] | None, past: Past) -> dict[str, Any] | None:
    """Return the `regraded_from` info of the parent, restricted to groups of the copied steps; None if the parent was not regraded."""
    if origin is None:
        return None
    numbers = [number for low, high in origin["groups"] for number in range(low, high + 1) if number in past.settled]
    steps = max(0, min(origin["steps"], past.first - origin["step"]))
    return origin | {"steps": steps, "groups": list(spans(numbers)), "before": _earlier(origin.get("before"), past)}


def _require_near(training: Step, floor: float) -> None:
    if rules.too_far_off(training.ess, floor=floor):
        raise TooFarOff(f"has an effective sample size of {training.ess:.2f}, below the minimum of {floor:g}")
