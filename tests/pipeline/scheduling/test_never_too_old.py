"""No token is ever trained beyond `max_lag`, whatever the timing: engines, bookkeeping and rules as the workers use them.

Feeder, rollout workers, scorer and trainer act in random order; a step of an engine draws a token for each sample in hand.
"""

import random
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.infra.engines.base import GroupRequest, Sampling
from penstock.infra.engines.toy import ToyEngine
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.config.schema import SamplingSection
from penstock.pipeline.runtime.sampling import rollout_of
from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.rules import MODES, Schedule, preset
from penstock.pipeline.scheduling.step_selector import Candidate, Selector
from penstock.topics.groups import version_min
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout
from penstock.workers.rollout.group_tasks import GroupTask
from tests.support.examples import prompt_of

SAMPLING = Sampling(max_new_tokens=12, stop_ids=(2,))


def weights(version: int) -> list[TensorBytes]:
    return [TensorBytes(name="w", dtype="int64", shape=(1,), data=np.int64(version).tobytes())]


def prompt(group: int, *, min_version: int, samples: int) -> Prompt:
    return prompt_of(group, min_version=min_version, samples_per_prompt=samples)


@dataclass
class World:
    """A run without topics: what is in them stands in lists."""

    schedule: Schedule
    steps: int
    engines: list[ToyEngine]
    selector: Selector = field(init=False)
    queue: list[GroupTask] = field(default_factory=list)
    groups_in_flight: list[dict[int, GroupTask]] = field(init=False)
    rollouts: dict[int, list[Rollout]] = field(default_factory=dict)
    scored: dict[int, list[Rollout]] = field(default_factory=dict)
    admitted: int = 0
    newest: int = 0
    done: int = 0
    plan: list[int] = field(default_factory=list)
    fates: dict[int, str] = field(default_factory=dict)
    trained: list[tuple[int, int]] = field(default_factory=list)
    """(learner version, version of the token) of every token that was trained."""

    def __post_init__(self) -> None:
        self.selector, self.groups_in_flight = Selector(self.schedule), [{} for _ in self.engines]
        for engine in self.engines:
            engine.load_weights(0, weights(0))

    def feed(self) -> None:
        limit = rules.admission_limit(self.schedule, newest_version=self.newest, dropped=self.selector.drops, steps=self.steps)
        if self.admitted < limit:
            slot = rules.slot_of(admitted=self.admitted, dropped=self.selector.drops)
            oldest = rules.min_version(self.schedule, slot=slot, newest_version=self.newest)
            made = prompt(self.admitted, min_version=oldest, samples=self.schedule.samples_per_prompt)
            self.queue.append(GroupTask(made, partition=0, offset=self.admitted))
            self.admitted += 1

    def draw(self, worker: int) -> None:
        engine, groups_in_flight = self.engines[worker], self.groups_in_flight[worker]
        if self.schedule.loads_at == "step" and self.newest > engine.version:
            engine.load_weights(self.newest, weights(self.newest))
        if self.schedule.stale_in_hand == "abort":
            for held in engine.groups_in_flight():
                oldest = held.oldest_version
                if oldest is not None and rules.will_be_stale(
                    newest_version=self.newest, policy_version_min=oldest, max_lag=self.schedule.max_lag
                ):
                    self._take(worker, engine.abort(held.group))
        pairs = [(task.group, task.prompt.min_version) for task in self.queue]
        index = rules.next_in_line(pairs, loaded_version=engine.version, newest_version=self.newest) if engine.has_room else None
        if index is not None:
            oldest = self.queue[index].prompt.min_version
            wanted = rules.version_to_load(self.schedule, min_version=oldest, newest_version=self.newest, loaded_version=engine.version)
            if wanted is None or engine.idle or self.schedule.loads_at == "step":
                if wanted is not None:
                    engine.load_weights(wanted, weights(wanted))
                assert rules.may_start(min_version=oldest, loaded_version=engine.version)
                task = self.queue.pop(index)
                groups_in_flight[task.group] = task
                begun = task.to_generate(oversample=self.schedule.oversample)
                task.start(begun)
                engine.submit(GroupRequest(
                    group=task.group, prompt_ids=task.prompt.token_ids, samples=tuple(begun), rows=len(begun), seed=5, sampling=SAMPLING
                ))  # fmt: skip
        self._take(worker, engine.step())

    def _take(self, worker: int, completions: list) -> None:
        engine, groups_in_flight = self.engines[worker], self.groups_in_flight[worker]
        fresh = self.newest - self.schedule.max_lag if self.schedule.stale_in_hand == "continue" else 0
        for completion in completions:
            if (task := groups_in_flight.get(completion.group)) is None:
                continue
            task.take(completion)
            if not task.needed:
                engine.abort(completion.group)
                del groups_in_flight[completion.group]
            for sample, drawn in sorted(task.completed.items()):
                task.note(sample, offset=0)
                self.rollouts.setdefault(drawn.group, []).append(
                    rollout_of(drawn, sampling=SamplingSection(max_new_tokens=12), worker="w", oldest_trained=fresh)
                )

    def score(self, rng: random.Random, drop: float) -> None:
        whole = [group for group, samples in self.rollouts.items() if len(samples) == self.schedule.samples_per_prompt]
        if not whole:
            return
        group = rng.choice(whole)
        samples = self.rollouts.pop(group)
        aborted = any(sample.finish == "abort" for sample in samples)
        outcome = "abandoned" if aborted else "filtered" if rng.random() < drop else "scored"
        if outcome == "scored":
            self.scored[group] = samples
        else:
            self._ends(group, outcome)
        oldest = version_min(samples) or 0
        self.selector.add(Candidate(group=group, outcome=outcome, policy_version_min=oldest, partition=0, offset=group, sha256=""))

    def train(self) -> None:
        learner = rules.version_after(self.done, steps_per_version=self.schedule.steps_per_version)
        if self.schedule.starts_on == "round" and not self.plan and self.done % self.schedule.steps_per_version == 0:
            left = (self.steps - self.done) * self.schedule.prompts_per_step
            if not self.selector.ready(min(self.schedule.round_groups, left)):
                return
        found = self.selector.take(learner_version=learner)
        for stale in self.selector.newly_stale:
            assert self.schedule.max_lag or self.schedule.oversample_groups
            self._ends(stale.group, "stale")
        self.selector.newly_stale.clear()
        if found is None:
            return
        self._ends(found.group, "trained")
        for sample in self.scored[found.group]:
            self.trained += [(learner, int(version)) for version in sample.token_versions[sample.loss_mask]]
        self.plan.append(found.group)
        if len(self.plan) == self.schedule.prompts_per_step:
            self.plan.clear()
            self.done += 1
            if rules.publishes(self.done - 1, steps=self.steps, steps_per_version=self.schedule.steps_per_version):
                self.newest = rules.versions_of(self.done, steps_per_version=self.schedule.steps_per_version)

    def _ends(self, group: int, fate: str) -> None:
        assert group not in self.fates, f"group {group} is {self.fates[group]} and {fate}"
        self.fates[group] = fate


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(sorted(MODES)),
    order=st.sampled_from([None, "submission", "arrival"]),
    stale_in_hand=st.sampled_from([None, "finish", "abort", "continue"]),
    max_lag=st.integers(0, 3),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    oversample=st.integers(0, 2),
    oversample_groups=st.integers(0, 5),
    workers=st.integers(1, 3),
    side_by_side=st.integers(1, 3),
    hurry=st.floats(0.1, 0.9),
    drop=st.floats(0, 0.6),
    steps=st.integers(1, 6),
)
def test_whatever_the_timing_no_token_is_trained_beyond_max_lag_and_every_run_ends(
    seed, mode, order, stale_in_hand, max_lag, sizes, oversample, oversample_groups, workers, side_by_side, hurry, drop, steps
):
    lagging = MODES[mode].loads_at == "step"
    schedule = preset(
        mode,
        prompts_per_step=sizes[0],
        samples_per_prompt=sizes[1],
        steps_per_version=sizes[2],
        max_lag=max_lag if lagging else None,
        order=order,
        stale_in_hand=stale_in_hand if lagging else None,
        oversample=oversample,
        oversample_groups=oversample_groups if lagging and order != "submission" else 0,
    )
    world = World(schedule, steps, [ToyEngine(capacity=side_by_side) for _ in range(workers)])
    rng = random.Random(seed)
    share = [rng.random() for _ in range(workers)]  # some workers are slow
    for _ in range(30_000):
        if world.done == world.steps:
            break
        if rng.random() < hurry:
            world.draw(rng.choices(range(workers), share)[0])
        else:
            rng.choice([world.feed, lambda: world.score(rng, drop), world.train])()
    assert world.done == world.steps
    needed = world.steps * schedule.prompts_per_step
    assert world.admitted - world.selector.drops <= needed or schedule.oversample_groups
    assert list(world.fates.values()).count("trained") == needed
    assert max(learner - version for learner, version in world.trained) <= schedule.max_lag
