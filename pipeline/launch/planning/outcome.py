"""Figures of a simulated run: wall time, waiting, lag and dropped groups, by the definitions of the papers and of `penstock report`."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.pipeline.launch.planning.engine import SimulatedGroup, SimulatedWorker
from penstock.pipeline.launch.planning.workload import Workload


@dataclass(slots=True)
class SimulatedStep:
    """One optimizer step; times are seconds since the start of the run."""

    number: int
    started_s: float
    first_group_s: float = 0.0
    ended_s: float = 0.0
    wait_s: float = 0.0
    compute_s: float = 0.0
    first_sample_s: float = float("inf")
    last_sample_s: float = 0.0
    tokens: int = 0
    groups: list[int] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    """Of its groups, in versions."""
    token_lag: float = 0.0
    """Sum over its tokens of their lag in versions."""

    def take(self, group: SimulatedGroup, *, learner_version: int) -> None:
        """Add a group that is trained in this step."""
        self.groups.append(group.group)
        self.tokens += group.tokens
        self.lags.append(learner_version - min(sample.version_min for sample in group.samples))
        self.token_lag += sum(sample.tokens * (learner_version - sample.version_mean) for sample in group.samples)
        self.first_sample_s = min(self.first_sample_s, group.started_s)
        self.last_sample_s = max(self.last_sample_s, group.ended_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Figures of a simulated run."""

    wall_s: float
    """From the start of the first sample to the end of the last step."""
    samples: int
    """Trained."""
    tokens: int
    """Trained."""
    wait_s: float
    """The trainer's waiting for groups."""
    compute_s: float
    rollout_to_train_end_s: tuple[float, ...]
    """Per round, from the start of its first sample to the end of its last step (arXiv 2606.26997)."""
    first_dispatch_s: tuple[float, ...]
    """Per round, from the start of its first sample to the start of training on its first group."""
    generate_s: float
    """Mean over the rollout workers."""
    load_s: float
    no_prompt_s: float
    no_weights_s: float
    batch: float
    """Mean batch size of a busy engine."""
    lag_mean: float
    """Of trained groups, in versions."""
    lag_max: int
    token_lag_mean: float
    """Of trained tokens, in versions."""
    dropped: dict[str, int]
    steps: tuple[SimulatedStep, ...] = field(repr=False)

    @classmethod
    def of(
        cls, work: Workload, *, steps: Sequence[SimulatedStep], workers: Sequence[SimulatedWorker], dropped: dict[str, int]
    ) -> "Outcome":
        """The figures of a finished simulation."""
        rounds = [steps[low : low + work.schedule.steps_per_version] for low in range(0, len(steps), work.schedule.steps_per_version)]
        starts = [min(step.first_sample_s for step in members) for members in rounds]
        tokens, count = sum(step.tokens for step in steps), len(workers)
        lags = [lag for step in steps for lag in step.lags]
        busy = sum(worker.busy_s for worker in workers)
        return cls(
            wall_s=steps[-1].ended_s - min(starts),
            samples=len(lags) * work.schedule.samples_per_prompt,
            tokens=tokens,
            wait_s=sum(step.wait_s for step in steps),
            compute_s=sum(step.compute_s for step in steps),
            rollout_to_train_end_s=tuple(members[-1].ended_s - start for members, start in zip(rounds, starts, strict=True)),
            first_dispatch_s=tuple(members[0].first_group_s - start for members, start in zip(rounds, starts, strict=True)),
            generate_s=busy / count,
            load_s=sum(worker.load_s for worker in workers) / count,
            no_prompt_s=sum(worker.no_prompt_s for worker in workers) / count,
            no_weights_s=sum(worker.no_weights_s for worker in workers) / count,
            batch=sum(worker.row_s for worker in workers) / busy if busy else 0.0,
            lag_mean=statistics.fmean(lags),
            lag_max=max(lags),
            token_lag_mean=sum(step.token_lag for step in steps) / tokens,
            dropped=dropped,
            steps=tuple(steps),
        )

    @property
    def waiting_ratio(self) -> float:
        """Share of waiting in the trainer's waiting and compute time."""
        return self.wait_s / (self.wait_s + self.compute_s)

    @property
    def samples_per_s(self) -> float:
        """Trained samples per second."""
        return self.samples / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second."""
        return self.tokens / self.wall_s

    def as_json(self) -> dict[str, Any]:
        """The figures as plain data."""
        return {
            "wall_s": self.wall_s,
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "trainer_waiting_ratio": self.waiting_ratio,
            "trainer_wait_s": self.wait_s,
            "trainer_compute_s": self.compute_s,
            "rollout_to_train_end_s": statistics.median(self.rollout_to_train_end_s),
            "first_dispatch_s": statistics.median(self.first_dispatch_s),
            "rollout_busy_share": min(1.0, self.generate_s / self.wall_s),
            "batch": self.batch,
            "lag_mean": self.lag_mean,
            "lag_max": self.lag_max,
            "token_lag_mean": self.token_lag_mean,
            "dropped": self.dropped,
        }
