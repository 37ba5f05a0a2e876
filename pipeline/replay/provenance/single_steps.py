"""Recomputes single steps of a run from the policy versions published before them, and compares loss and gradient norm. Read-only.

The weights after a step are not compared: they also depend on the optimizer state, which is in no topic. `penstock replay train`
compares them.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.infra.errors import BackendError, PenstockError
from penstock.pipeline.config.load import Config, with_values
from penstock.pipeline.learner.ledger_history import read_planned
from penstock.pipeline.learner.policy_trainer import Notify, Repetition, repeat
from penstock.pipeline.replay.recording import Recording, with_model
from penstock.pipeline.replay.restore_policy import arithmetic, open_policy, weights_of
from penstock.pipeline.replay.verify import report_arithmetic
from penstock.topics import weights
from penstock.topics.ledger import Entry

BOUND = 0.01
"""Largest difference of loss and gradient norm, relative or absolute, that is accepted on hardware whose floating-point results differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedStep:
    """Result of one step that was recomputed from the weights published before it."""

    step: int
    version: int
    """Policy version that the step started from."""
    bits: bool
    """True if loss, gradient norm and micro-batch boundaries equal the recorded ones bit for bit."""
    same: bool
    """True if `bits`, or if this machine's arithmetic differs from the run's and the numbers agree within `BOUND`."""
    differences: tuple[str, ...]
    """One sentence per number that differs."""
    seconds: float


def selected(recording: Recording, count: int, *, seed: str) -> list[Entry]:
    """Choose up to `count` random steps whose groups and starting weights are in the log. Raises `PenstockError` if there is none."""
    config, run = recording.config, recording.run
    if config.trainer.lora_rank or config.algorithm.value_lr is not None:
        what = "adapters" if config.trainer.lora_rank else "a value head"
        raise PenstockError(
            f"{run} trains {what}, so single steps cannot be recomputed from published weights; use penstock replay train {run}"
        )
    published = {manifest.step: manifest.version for manifest in recording.ledger_state.manifests.values()}
    rebased = {entry.step for entry in recording.entries if entry.kind == "rebased"}
    steps = [entry for entry in recording.steps if entry.step in published and entry.step not in rebased and _is_retained(recording, entry)]
    if not steps:
        raise PenstockError(
            f"no step of {run} can be recomputed: for every step, retention has deleted the groups or the weights that it started from"
        )
    return sorted(random.Random(seed).sample(steps, min(count, len(steps))), key=lambda entry: entry.step or 0)


def _is_retained(recording: Recording, entry: Entry) -> bool:
    """True if the log still has the groups of a step and all chunks of the weights that it started from."""
    manifests = recording.ledger_state.manifests
    version = next(manifest.version for manifest in manifests.values() if manifest.step == entry.step)
    chunks = [("weights", *chunk) for manifest in weights.chain(manifests, version) for chunk in weights.chunk_places(manifest)]
    needed = [*chunks, *(("groups", planned.partition, planned.offset) for planned in entry.plan)]
    partitions = {(f"{recording.run}.{topic}", partition) for topic, partition, _ in needed}
    starts = recording.log.beginning_offsets(sorted(partitions))
    return all(offset >= starts[f"{recording.run}.{topic}", partition] for topic, partition, offset in needed)


def repeat_steps(recording: Recording, steps: Sequence[Entry], *, architecture: str, notify: Notify) -> Iterator[RepeatedStep]:
    """Recompute steps and compare them with the ledger; `architecture` is a model directory, used if `model.path` does not exist here."""
    config = _config(recording, architecture)
    with open_policy(recording, config, notify=notify) as policy:
        changes = arithmetic(recording, policy)
        report_arithmetic(changes, notify)
        exact = not changes and (config.trainer.deterministic == "strict" or policy.backend.fingerprint().get("device", "cpu") == "cpu")
        for entry in steps:
            started, step = time.monotonic(), entry.step or 0
            policy.release_weights()
            version = next(manifest.version for manifest in recording.ledger_state.manifests.values() if manifest.step == step)
            policy.backend.load_weights(weights_of(recording, version))
            policy.steps_done, policy.backend.steps = step, config.trainer.initial_steps + step
            repetition = repeat(policy, entry, read_planned(recording.log, recording.run, entry.plan))
            differences = tuple(number.text for number in repetition.differences if number.name != "weights digest")
            same = not differences or (not exact and _is_close(repetition, entry))
            seconds = time.monotonic() - started
            yield RepeatedStep(step=step, version=version, bits=not differences, same=same, differences=differences, seconds=seconds)


def _config(recording: Recording, architecture: str) -> Config:
    """Return the run's configuration without optimizer state, with the model directory `architecture` if its own is not here."""
    config = with_values(recording.config, "trainer", initial_state=None)  # loss and gradient norm do not depend on optimizer state
    try:
        is_here = (config.model_directory / "config.json").is_file()
    except BackendError:
        is_here = False
    return config if is_here else with_model(config, architecture)


def _is_close(repetition: Repetition, entry: Entry) -> bool:
    outcome = repetition.outcome
    pairs = ((outcome.loss, entry.metrics.get("loss")), (outcome.grad_norm, entry.metrics.get("grad_norm")))
    return all(recorded is not None and math.isclose(number, recorded, rel_tol=BOUND, abs_tol=BOUND) for number, recorded in pairs)
