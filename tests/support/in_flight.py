"""Whole runs on the toy engine whose weights change between decode steps."""

import time
from pathlib import Path
from typing import Any

from penstock.infra.engines.base import Completion
from penstock.infra.engines.toy import ToyEngine, _Group
from penstock.pipeline.config.run_config import Config
from penstock.topics import groups, rollouts
from penstock.topics.groups import Group
from penstock.topics.rollouts import Rollout
from tests.support.least_config import merged
from tests.support.worker_set import LogLocation, clean, complete, config_of, connect, records_of

TOY: dict[str, Any] = {"engine": "toy", "workers": 2, "toy_delay_s": 0.004}

SLOW_GROUPS = {3, 8}
"""Early enough in a run that newer weights still come."""


class SlowGroups(ToyEngine):
    """Two groups wait after their first token, and once more later, until the engine has loaded newer weights.

    However fast or slow the machine is, these groups are too old for a lag bound of one version.
    """

    def step(self) -> list[Completion]:
        held = [group for group in self._running if self._waits(group)]
        self._running = [group for group in self._running if group not in held]
        try:  # the others go on: both slow groups could wait for versions that only the groups beside them can bring
            if not self._running:
                time.sleep(TOY["toy_delay_s"])
            return super().step()
        finally:
            self._running += held

    def _waits(self, group: _Group) -> bool:
        return group.request.group in SLOW_GROUPS and group.steps > 0 and self.version < group.spans[0].version + min(group.tokens // 2, 2)


def config_in_flight(model: Path, directory: Path, **sections: Any) -> Config:
    """Groups of very unequal length, a step and a version a group: those that are long see many versions go by."""
    table: dict[str, Any] = {
        "run": {"steps": 16, "seed": 11},
        "schedule": {"mode": "in_flight", "prompts_per_step": 1, "samples_per_prompt": 2, "max_drops_per_step": 100},
        "sampling": {"max_new_tokens": 100},
        "rollout": TOY,
        "algorithm": {"filter_zero_variance": False},
        "trainer": {"lr": 1e-4, "micro_batch_tokens": 400, "export": False},
    }
    return config_of(model, directory, **merged(table, sections))


def run_of(place: LogLocation, run: str, config: Config) -> tuple[dict[str, Any], list[Rollout], list[Group]]:
    """A whole run: its report, its samples and its groups; its audit is clean."""
    report, log = complete(place, run, config), connect(place)
    samples = [sample for record in records_of(log, f"{run}.rollouts") for sample in rollouts.read_all(record, run=run)[1]]
    ended = [groups.read([record], run=run)[1] for record in records_of(log, f"{run}.groups")]
    log.close()
    clean(place, run)
    assert report["status"] == "finished"
    assert report["groups"]["trained"] == config.run.steps * config.schedule.prompts_per_step
    return report, samples, ended
