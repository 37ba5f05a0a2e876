"""Measures states of a recorded run for `penstock bisect`: as recorded, without some groups, or under changed settings.

A state is the weights after a number of steps. Each result is stored at once, so that an interrupted bisect does not measure it again.
"""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from penstock.infra.backends.model import write_model
from penstock.infra.checkpoints import State
from penstock.infra.errors import ConfigError, LogError, PenstockError
from penstock.infra.paths import new_directory, run_directory, write_private
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.config.load import Config, override
from penstock.pipeline.learner.evaluation import Evaluator
from penstock.pipeline.learner.policy_trainer import Notify, PolicyTrainer
from penstock.pipeline.replay.bisect.search import EXIT_STATUS, UNTESTED, Criterion, OutOfReplays, Values
from penstock.pipeline.replay.recording import PlannedGroups, Recording, require_retained
from penstock.pipeline.replay.restore_policy import advance_to, apply_rebase, open_policy, weights_of
from penstock.pipeline.replay.steps import StepToTrain
from penstock.pipeline.replay.what_if import train_step
from penstock.pipeline.rewards import functions as rewards
from penstock.pipeline.runtime.factories import make_engine
from penstock.pipeline.runtime.topic_reader import scan
from penstock.pipeline.scheduling.rules import version_after
from penstock.topics import metrics
from penstock.topics.wire.errors import Unusable

WORK = ("recorded", "stored", "measured", "replays", "replayed", "recomputed")
"""Counters of a bisect: states known from the run's evaluations, from earlier bisects, and measured now; replays with changes, their
steps, and recorded steps recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A state to measure: the weights after `end` steps, with the steps from `start` on trained without some groups or with changes."""

    end: int
    start: int | None = None
    """First step that is trained with changes; None to measure the recorded state."""
    without: frozenset[int] = frozenset()
    changes: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = f"group {min(self.without)}" if len(self.without) == 1 else f"{len(self.without)} groups"
        without = f" without {named}" if self.without else ""
        return f"after {self.end} steps" + without + "".join(f" --set {text}" for text in self.changes)


@dataclass(slots=True)
class Measurer:
    """Measures experiments on one run and caches the results. Close it to free models and delete restored states."""

    recording: Recording
    criterion: Criterion
    notify: Notify
    replays: int
    work: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WORK, 0))
    recorded: dict[int, Values] = field(default_factory=dict)
    """State -> metrics of the evaluation that the run itself made there."""
    groups: PlannedGroups = field(init=False)
    _results: dict[str, dict[str, float]] = field(default_factory=dict)
    """Key of an experiment -> measured values; saved to disk."""
    _seen: dict[str, Values] = field(default_factory=dict)
    """Key of an experiment -> its values in this bisect, including recorded metrics."""
    _changed: int = 0
    _basis: str = ""
    """Digest of the run and of everything that evaluations depend on; part of each key."""
    _evaluator: Evaluator | None = None
    _policies: ExitStack = field(default_factory=ExitStack)
    _policy: tuple[Config, PolicyTrainer] | None = None

    def __post_init__(self) -> None:
        """Read the run's evaluations and stored results. Raises `ConfigError` if the test needs held-out prompts and the run has none."""
        config, sources = self.recording.config, dict[str, str]()
        self.groups = PlannedGroups(self.recording.log, self.recording.run)
        if self.criterion.evaluates:
            if not config.eval_sources:
                why = "has no held-out prompts (eval.source); test a train/ metric, or give a command"
                raise ConfigError(f"--test {self.criterion.text!r}: {self.recording.run} {why}")
            sources = rewards.digests(config.eval_reward.functions)
            self.recorded = self._recorded_evaluations()
        opened = self.recording.ledger_state.opened  # its time tells apart runs that had the same id
        basis = [sources, config.eval.model_dump(), opened and opened.time_ns]
        self._basis = hashlib.sha256(json.dumps(basis, default=str).encode()).hexdigest()
        with suppress(OSError, ValueError):
            self._results = json.loads(self._file.read_text(encoding="utf-8"))

    @property
    def published(self) -> dict[int, int]:
        """State -> policy version with its weights, for versions whose weights the log still has."""
        manifests, every = self.recording.ledger_state.manifests, self.recording.config.weights.keep == "all"
        return {manifest.step: version for version, manifest in manifests.items() if every or version in (0, max(manifests))}

    def check_recorded(self, good: int, bad: int) -> None:
        """Repeat one of the run's evaluations; if the result differs, as it may on another engine, ignore the run's evaluations."""
        states = [state for state in self.recorded if good <= state <= bad and state in self.published]
        if states and not set(range(good, bad + 1)) <= self.recorded.keys():
            recorded, self.recorded = self.recorded, {}
            here, then = self.values(Experiment(end=states[0])), recorded[states[0]]
            if all(here.get(name) == then.get(name) for name in self.criterion.metrics if name.startswith("eval/")):
                self.recorded = recorded
            else:
                self.notify(
                    f"the evaluation after {states[0]} steps gives another result on this machine than in the run: "
                    "all states are evaluated here"
                )

    def passes(self, experiment: Experiment) -> bool:
        return self.criterion.passes(self.values(experiment))

    def values(self, experiment: Experiment) -> Values:
        """Return the values of a state: `train/…` metrics of its last step, and `eval/…` metrics or the command's exit status."""
        test = "evaluation" if self.criterion.evaluates else "step" if self.criterion.any_of else self.criterion.text
        key = json.dumps([self._basis, test, experiment.start, experiment.end, sorted(experiment.without), experiment.changes])
        if key not in self._seen:
            steps = self.recording.steps[: experiment.end] if experiment.start is None else []
            trained = {f"train/{name}": value for name, value in steps[-1].metrics.items()} if steps else {}
            self._seen[key] = {**trained, **self._tested(experiment, key)}
        return self._seen[key]

    def close(self) -> None:
        """Close models and delete restored states. Stored results remain."""
        self._policies.close()
        if self._evaluator is not None:
            self._evaluator.close()
            self._evaluator.engine.close()
        for state in self._file.parent.glob("*state-*"):
            shutil.rmtree(state, ignore_errors=True)

    @property
    def _file(self) -> Path:
        return run_directory(self.recording.run) / "bisect" / "results.json"

    def _recorded_evaluations(self) -> dict[int, Values]:
        """Return state -> metrics (`eval/…`) of the evaluation that the run made there."""
        run, evaluations = self.recording.run, dict[int, Values]()
        for record in scan(self.recording.log, f"{run}.metrics"):
            with suppress(Unusable):
                measurement = metrics.read(record, run=run)[1]
                manifest = self.recording.ledger_state.manifests.get(-1 if measurement.version is None else measurement.version)
                if measurement.kind == "eval" and manifest is not None:
                    evaluations.setdefault(manifest.step, {f"eval/{name}": value for name, value in measurement.values.items()})
        return evaluations

    def _tested(self, experiment: Experiment, key: str) -> Values:
        """Return what the test needs of a state in addition to recorded metrics of its step: from the run, from disk, or measured now.

        Raises `OutOfReplays` if the state needs a replay with changes and none is left.
        """
        if experiment.start is None and self.criterion.any_of and not self.criterion.evaluates:
            return {}
        if experiment.start is None and experiment.end in self.recorded:
            self.work["recorded"] += 1
            return self.recorded[experiment.end]
        if experiment.start is not None:
            if self._changed == self.replays:  # stored results count too, so that a repeated search ends at the same point
                raise OutOfReplays(f"the limit of {self.replays} replays is reached; allow more with --replays N")
            self._changed += 1
        if key in self._results:
            self.work["stored"] += 1
            return self._results[key]
        self._results[key] = self._measured(experiment)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_private(self._file, json.dumps(self._results))
        return self._results[key]

    def _measured(self, experiment: Experiment) -> dict[str, float]:
        """Measure a state: its evaluation or the command's exit status, and the metrics of a step that was trained for it."""
        self.notify(f"measuring the state {experiment}")
        tensors, values = self._weights(experiment)
        if self.criterion.evaluates:
            values |= self._evaluated(experiment, tensors)
        elif not self.criterion.any_of:
            values |= self._command(experiment, tensors)
        self.work["measured"] += 1
        self.notify(f"{experiment}: " + ", ".join(f"{name} {values[name]:.4g}" for name in self.criterion.metrics if name in values))
        return values

    def _weights(self, experiment: Experiment) -> tuple[Sequence[TensorBytes], dict[str, float]]:
        """Return the weights of an experiment, and the metrics of its last step if the step was trained here (else empty)."""
        recording, config, start = self.recording, self.recording.config, experiment.start
        if start is None:
            if (version := self.published.get(experiment.end)) is not None:
                with suppress(LogError):
                    return weights_of(recording, version), {}
            return self._restored(experiment.end, config).weights().tensors, {}
        steps, values = recording.steps[start : experiment.end], dict[str, float]()
        self.work["replays"] += 1
        self.work["replayed"] += len(steps)
        require_retained(recording, steps)
        policy = self._restored(start, override(config, experiment.changes) if experiment.changes else config)
        for entry in steps:
            apply_rebase(policy, recording, notify=self.notify)
            step = StepToTrain(number=entry.step or 0, recorded=entry, members=self.groups.read(entry.plan))
            outcome = train_step(policy, recording, step, without=experiment.without)
            values = {f"train/{name}": value for name, value in outcome.metrics.items()}
        return policy.weights().tensors, values

    def _evaluated(self, experiment: Experiment, tensors: Sequence[TensorBytes]) -> dict[str, float]:
        """Evaluate weights on the run's held-out prompts; return `eval/…` metrics."""
        config = self.recording.config
        if self._evaluator is None:
            engine, info, run = make_engine(config), self.recording.info, self.recording.run
            self._evaluator = Evaluator.open(config, info, engine, run=run, notify=lambda _: None)
        torch.set_num_threads(config.rollout.threads)
        version = version_after(experiment.end, steps_per_version=config.schedule.steps_per_version)
        values = self._evaluator.evaluate(version, tensors)
        assert values is not None, "only a stop request ends an evaluation early"
        return {f"eval/{name}": value for name, value in values.items()}

    def _command(self, experiment: Experiment, tensors: Sequence[TensorBytes]) -> dict[str, float]:
        """Run the test's command on a model directory with these weights; return its exit status. Raises `PenstockError`."""
        with tempfile.TemporaryDirectory(prefix="penstock-model-") as directory:
            write_model(self.recording.config.model_directory, tensors, Path(directory))
            environment = {**os.environ, "PENSTOCK_MODEL": directory, "PENSTOCK_STEPS": str(experiment.end)}
            done = subprocess.run(shlex.split(self.criterion.text), env=environment, stdout=2, check=False)  # our stdout has the result
        if not 0 <= done.returncode < UNTESTED:
            raise PenstockError(
                f"--test {self.criterion.text!r} exited with status {done.returncode}, expected 0 (good) or 1 to {UNTESTED - 1} (bad). Fix "
                "the command and repeat the bisect; finished measurements are reused"
            )
        return {EXIT_STATUS: float(done.returncode)}

    def _restored(self, step: int, config: Config) -> PolicyTrainer:
        """Return the policy after `step` recorded steps, opened with `config`. The state is saved for later experiments."""
        path = self._state(step)
        if not path.exists():
            nearest = max((number for number in range(step) if self._state(number).exists()), default=None)
            policy = self._opened(self.recording.config, at=nearest)
            self.work["recomputed"] += advance_to(policy, self.recording, step, notify=self.notify).repeated
            state = State(run=self.recording.run, steps=step, version=policy.version, digest=policy.weights().digest, seq=0)
            with new_directory(path, holds="the state") as directory:
                policy.backend.save(directory / "backend")
                (directory / "state.json").write_text(json.dumps(asdict(state)), encoding="utf-8")
        return self._opened(config, at=step)

    def _opened(self, config: Config, *, at: int | None) -> PolicyTrainer:
        """Return the policy with this configuration, in the saved state `at` or, if None, at version 0. Only one policy is open."""
        if at is None or self._policy is None or self._policy[0] != config:
            self._policies.close()
            self._policy = config, self._policies.enter_context(open_policy(self.recording, config, notify=self.notify))
        policy = self._policy[1]
        torch.set_num_threads(config.trainer.threads)
        if at is not None:
            path = self._state(at)
            policy.load(path / "backend", State(**json.loads((path / "state.json").read_text(encoding="utf-8"))))
        return policy

    def _state(self, step: int) -> Path:
        return self._file.parent / f"state-{step:08d}"
