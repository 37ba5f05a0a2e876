"""Stages that take time instead of computing: their speeds, and the clock that runs faster than the paper's."""

import time
from dataclasses import dataclass

from penstock.pipeline.launch.planning.workload import DecodeTimes, Workload, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Speeds of the machines of a paper in its own seconds, of which `speed_up` pass in one second here."""

    speed_up: float
    lengths: str
    """A distribution as in `penstock plan --lengths`; the lengths of a group are those of the simulator with the same seed."""
    decode: DecodeTimes
    concurrency: int
    """Concurrent samples of one engine."""
    samples: int
    """Samples of a group in the distribution: K + r."""
    by_group: bool = True
    """A free row gets a sample of the lowest group number. Otherwise all prompts are queued, and the row gets a random sample."""
    load_s: float = 0.0
    train_token_s: float = 0.0
    train_sample_s: float = 0.0
    step_s: float = 0.0
    publish_s: float = 0.0
    """To copy the weights out of the trainer."""
    seed: int = 0
    paces: tuple[tuple[float, ...], ...] = ()
    """For each rollout worker, factors of the decode time of a trajectory's turn, by the trajectory's group modulo their number."""

    @classmethod
    def of(cls, work: Workload, *, speed_up: float, **more: bool) -> "Stages":
        """The stages of a workload of the simulator."""
        return cls(
            speed_up=speed_up, lengths=work.lengths.name, decode=work.decode, concurrency=work.concurrency,
            samples=work.schedule.samples_begun, load_s=work.load_s, train_token_s=work.train_token_s,
            train_sample_s=work.train_group_s / work.schedule.samples_per_prompt, step_s=work.step_s, seed=work.seed, **more,
        )  # fmt: skip

    def lengths_of(self, group: int) -> list[int]:
        """Tokens of each sample of a group."""
        lengths: list[int] = parse(self.lengths).of_group(group, samples=self.samples, seed=self.seed).tolist()
        return lengths


@dataclass(slots=True)
class Pause:
    """Sleeps so that all its pauses together are exact: what one lasts too long, the next ones are shorter."""

    speed_up: float
    _ahead_s: float = 0.0

    def sleep(self, paper_s: float) -> None:
        """Sleep for a time of the paper's clock."""
        wanted = paper_s / self.speed_up - self._ahead_s
        if wanted <= 0.0:
            self._ahead_s = -wanted
            return
        started = time.monotonic()
        time.sleep(wanted)
        self._ahead_s = time.monotonic() - started - wanted
