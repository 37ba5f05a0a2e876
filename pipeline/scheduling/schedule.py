"""The schedule as data: when steps start, when weights are loaded, and the largest lag; `MODES` has the named schedules.

All differences between modes are fields of `Schedule`; `rules` has the decisions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Order = Literal["submission", "arrival"]
StaleInFlight = Literal["finish", "abort", "continue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When steps start, when weights are loaded, and the largest lag of a sample."""

    mode: str
    starts_on: Literal["round", "groups"]
    """round: a step waits until its whole round is scored; groups: until its own groups are (complete groups, arXiv 2606.26997)."""
    loads_at: Literal["round", "group", "step"]
    """round: every group of a round is generated under that round's version; group: under the newest version when the group starts; step:
    the newest weights are loaded between two decode steps, and samples in flight continue under them (PipelineRL, arXiv 2509.19128)."""
    max_lag: int
    prompts_per_step: int = 8
    """U"""
    samples_per_prompt: int = 8
    """K"""
    steps_per_version: int = 1
    """S"""
    order: Order = "submission"
    stale_in_hand: StaleInFlight = "finish"
    """Handling of a group in flight that can no longer be fresh. finish: it is generated to its end; abort: it is aborted and replaced
    (RollArt); continue: it continues, and its stale tokens are not trained."""
    oversample: int = 0
    """r: a group is started with K + r samples and closed when K of them have ended."""
    max_drops_per_step: int = 128

    @property
    def samples_begun(self) -> int:
        """Samples that are started for a group: K + r."""
        return self.samples_per_prompt + self.oversample

    @property
    def round_groups(self) -> int:
        """Groups trained between two published versions: U·S."""
        return self.prompts_per_step * self.steps_per_version


MODES: Mapping[str, Schedule] = {
    "synchronous": Schedule(mode="synchronous", starts_on="round", loads_at="round", max_lag=0),
    "pipelined": Schedule(mode="pipelined", starts_on="groups", loads_at="round", max_lag=0),
    "one_step_off": Schedule(mode="one_step_off", starts_on="groups", loads_at="group", max_lag=1),
    "in_flight": Schedule(mode="in_flight", starts_on="groups", loads_at="step", max_lag=4, order="arrival"),
    "bounded": Schedule(mode="bounded", starts_on="groups", loads_at="step", max_lag=1, order="arrival", stale_in_hand="abort"),
}


def preset(
    mode: str,
    *,
    prompts_per_step: int,
    samples_per_prompt: int,
    steps_per_version: int,
    max_lag: int | None = None,
    order: Order | None = None,
    stale_in_hand: StaleInFlight | None = None,
    oversample: int = 0,
    max_drops_per_step: int | None = None,
) -> Schedule:
    """A named mode with this run's sizes. None keeps the mode's value; `max_drops_per_step` is max(16 U·S, 64) by default."""
    base = MODES[mode]
    return replace(
        base,
        prompts_per_step=prompts_per_step,
        samples_per_prompt=samples_per_prompt,
        steps_per_version=steps_per_version,
        max_lag=base.max_lag if max_lag is None else max_lag,
        order=order or base.order,
        stale_in_hand=stale_in_hand or base.stale_in_hand,
        oversample=oversample,
        max_drops_per_step=max_drops_per_step or max(16 * prompts_per_step * steps_per_version, 64),
    )
