"""The policy between two steps: one copy of its weights, the snapshot of its version's beginning, the newest good checkpoint."""

from pathlib import Path

import pytest

from penstock.infra.checkpoints import CheckpointStore, Recorded, State
from penstock.infra.errors import BackendError
from penstock.pipeline.learner import policy_trainer
from penstock.pipeline.learner.policy_trainer import PolicyTrainer, repeat
from penstock.pipeline.runtime.factories import open_store
from penstock.topics.groups import Group
from penstock.topics.ledger import Entry
from tests.support.number_run import RUN, STEPS, NumberBackend, config_of, scored

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> list[NumberBackend]:
    """Every backend that was made, newest last."""
    made: list[NumberBackend] = []

    def make(*_: object, **__: object) -> NumberBackend:
        made.append(NumberBackend())
        return made[-1]

    monkeypatch.setattr(policy_trainer, "make_backend", make)
    return made


def trained(policy: PolicyTrainer, steps: int) -> PolicyTrainer:
    found = scored(2 * STEPS)
    for _ in range(steps):
        step = policy.step()
        for group in found[2 * policy.steps_done : 2 * policy.steps_done + 2]:
            step.add(group)
        step.finish(learner_version=0)
        policy.steps_done += 1
    return policy


def test_the_weights_are_copied_once_between_two_steps_and_never_after_the_next_one(backends: list[NumberBackend]) -> None:
    policy = PolicyTrainer.open(config_of(), steps=STEPS)
    first = policy.weights()
    assert policy.weights() is first
    digest = first.digest
    assert (first.tensors, backends[0].copies) == (policy.weights().tensors, 1)
    late = trained(policy, 1).weights()
    policy.step()
    assert first.digest == digest
    with pytest.raises(AssertionError, match="not copied in time"):
        _ = late.tensors


def test_the_last_version_is_published_after_the_last_step() -> None:
    policy = PolicyTrainer.open(config_of(schedule={"steps_per_version": 3}), steps=STEPS)
    versions = []
    for done in range(STEPS + 1):
        policy.steps_done = done
        versions.append(policy.version)
    assert versions == [0, 0, 0, 1, 2]


def test_a_snapshot_within_a_version_comes_from_the_recorded_weights_of_its_beginning(backends: list[NumberBackend]) -> None:
    config = config_of(schedule={"steps_per_version": 2}, algorithm={"proximal": "snapshot", "loss": "dapo"})
    recorded = NumberBackend()
    recorded.value = 42.0
    policy = trained(PolicyTrainer.open(config, steps=STEPS, weights_of=lambda _: recorded.weights()), 3)
    at_its_own_beginning = backends[0].snapshots
    assert len(at_its_own_beginning) == 2
    assert 42.0 not in at_its_own_beginning
    policy._proximal = None  # as after loading a checkpoint
    policy.step()
    assert backends[0].snapshots[-1] == 42.0


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = open_store(config_of(tmp_path), RUN)
    assert store is not None
    policy = PolicyTrainer.open(config_of(), steps=STEPS)
    for steps in (1, 2):
        trained(policy, 1)
        state = State(run=RUN, steps=steps, version=steps, digest=policy.weights().digest, seq=steps)
        store.write(state, save=policy.backend.save, record=lambda _: None)
    return store


def recorded(*digests: str) -> Recorded:
    return Recorded(run=RUN, steps=STEPS, seq=99, versions={0, 1, 2}, digests={steps: set(digests) for steps in (1, 2)})


def digests_after(*steps: int) -> list[str]:
    return [trained(PolicyTrainer.open(config_of(), steps=STEPS), count).weights().digest for count in steps]


def test_the_newest_checkpoint_is_loaded_and_an_older_one_where_the_ledger_knows_another_digest(store: CheckpointStore) -> None:
    said: list[str] = []
    after_1, after_2 = digests_after(1, 2)
    for known, steps in (((after_1, after_2), 2), ((after_1,), 1)):
        policy = PolicyTrainer.open(config_of(), steps=STEPS)
        state = policy.load_newest(store, recorded(*known), notify=said.append, doing=lambda _: None)
        assert state is not None
        assert (policy.steps_done, policy.weights().digest) == (steps, (after_1, after_2)[steps - 1])
    assert said == [line for line in said if line.startswith("the checkpoint of step 2 cannot be used: its weights digest is ")]
    assert len(said) == 1


def test_at_most_passes_over_newer_checkpoints(store: CheckpointStore) -> None:
    policy = PolicyTrainer.open(config_of(), steps=STEPS)
    everything = recorded(*digests_after(1, 2))
    assert policy.load_newest(store, everything, notify=print, doing=lambda _: None, at_most=1) is not None
    assert policy.steps_done == 1


def test_a_model_that_was_half_replaced_is_loaded_anew(
    store: CheckpointStore, backends: list[NumberBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: NumberBackend, _: object) -> None:
        self.value = -1.0
        raise BackendError("half a file")

    policy = PolicyTrainer.open(config_of(), steps=STEPS)
    everything, begun = recorded(*digests_after(1, 2)), policy.weights().digest
    monkeypatch.setattr(NumberBackend, "load", broken)
    assert policy.load_newest(store, everything, notify=lambda _: None, doing=lambda _: None) is None
    assert (policy.steps_done, policy.weights().digest) == (0, begun)
    assert sum(backend.closed for backend in backends) == 1


def first_step(groups: list[Group], *, recorded_ends: tuple[int, ...] | None = None) -> Entry:
    policy = PolicyTrainer.open(config_of(), steps=STEPS)
    step = policy.step(recorded_ends=recorded_ends)
    for group in groups:
        step.add(group)
    outcome = step.finish(learner_version=0)
    return Entry(
        seq=3, kind="step", time_ns=0, step=0, version=0, boundaries=outcome.boundaries, loss_bits=outcome.loss_bits,
        grad_norm_bits=outcome.grad_norm_bits, digest=policy.weights().digest, metrics=outcome.metrics,
    )  # fmt: skip


def test_a_repeated_step_keeps_the_micro_batches_of_the_ledger() -> None:
    groups = scored(2)
    entry = first_step(groups, recorded_ends=(3, 8))
    assert entry.boundaries == (3, 8)
    assert repeat(PolicyTrainer.open(config_of(), steps=STEPS), entry, groups).differences == ()


def test_a_repeated_step_names_each_number_that_differs() -> None:
    found = scored(2)
    entry = first_step(found)
    again = repeat(PolicyTrainer.open(config_of(), steps=STEPS), entry, found)
    assert again.differences == ()
    changed = repeat(PolicyTrainer.open(config_of(), steps=STEPS), entry, found[::-1][:1])
    assert [difference.name for difference in changed.differences] == ["loss", "gradient norm", "boundaries", "weights digest"]
