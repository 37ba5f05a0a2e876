"""Repeats single steps of a run from the versions published before them. Read-only.

Loss and gradient norm follow from the weights before a step and from its groups. The weights after it follow from the optimizer's state,
too, which is in no topic: `penstock replay train` compares them.
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
"""Largest difference of loss and gradient norm, relative or absolute, on hardware whose last bits differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedStep:
    """One step repeated from the published weights before it."""

    step: int
    version: int
    bits: bool
    """True if all bits are equal."""
    same: bool
    """True if the bits are equal, or need not be and the numbers are within `BOUND`."""
    differences: tuple[str, ...]
    seconds: float


def selected(recording: Recording, count: int, *, seed: str) -> list[Entry]:
    """Random steps whose weights before them, and groups, are in the log, by number. Raises `PenstockError` if there is none."""
    config, run = recording.config, recording.run
    if config.trainer.lora_rank or config.algorithm.value_lr is not None:
        what = "adapters" if config.trainer.lora_rank else "a value head"
        raise PenstockError(f"{run} trains {what}, and single steps start from the full weights: penstock replay train {run}")
    published = {manifest.step: manifest.version for manifest in recording.ledger_state.manifests.values()}
    rebased = {entry.step for entry in recording.entries if entry.kind == "rebased"}
    steps = [entry for entry in recording.steps if entry.step in published and entry.step not in rebased and _is_retained(recording, entry)]
    if not steps:
        raise PenstockError(f"no step of {run} can be repeated: the log has no version and groups of the same step any more")
    return sorted(random.Random(seed).sample(steps, min(count, len(steps))), key=lambda entry: entry.step or 0)


def _is_retained(recording: Recording, entry: Entry) -> bool:
    manifests = recording.ledger_state.manifests
    version = next(manifest.version for manifest in manifests.values() if manifest.step == entry.step)
    chunks = [("weights", *chunk) for manifest in weights.chain(manifests, version) for chunk in weights.chunk_places(manifest)]
    needed = [*chunks, *(("groups", planned.partition, planned.offset) for planned in entry.plan)]
    partitions = {(f"{recording.run}.{topic}", partition) for topic, partition, _ in needed}
    starts = recording.log.beginning_offsets(sorted(partitions))
    return all(offset >= starts[f"{recording.run}.{topic}", partition] for topic, partition, offset in needed)


def repeat_steps(recording: Recording, steps: Sequence[Entry], *, architecture: str, notify: Notify) -> Iterator[RepeatedStep]:
    """Repeat steps and compare them with the ledger; `architecture` is a model directory for a run whose own is not on this machine."""
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
    config = with_values(recording.config, "trainer", initial_state=None)  # of the optimizer: neither number depends on it
    try:
        is_here = (config.model_directory / "config.json").is_file()
    except BackendError:
        is_here = False
    return config if is_here else with_model(config, architecture)


def _is_close(repetition: Repetition, entry: Entry) -> bool:
    outcome = repetition.outcome
    pairs = ((outcome.loss, entry.metrics.get("loss")), (outcome.grad_norm, entry.metrics.get("grad_norm")))
    return all(recorded is not None and math.isclose(number, recorded, rel_tol=BOUND, abs_tol=BOUND) for number, recorded in pairs)
