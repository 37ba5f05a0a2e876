"""The best, the median and the worst sample of the newest scored groups; only the ends of the topic are read."""

import json
from dataclasses import dataclass

from penstock.infra.log import Log
from penstock.pipeline.observe.live.completions import without_template
from penstock.pipeline.observe.records import browse
from penstock.topics import groups
from penstock.topics.wire.errors import Unusable

NEWEST = 16
"""Records of groups that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """One sample, and what its prompt's row says is the answer."""

    which: str
    group: int
    prompt: str
    """Without what all prompts begin and end with."""
    answer: str | None
    completion: str
    reward: float


def newest_samples(log: Log, run: str) -> list[Picked]:
    """Best, median and worst by reward, of the newest groups that have rewards; [] before there are any."""
    scored = []
    for record in browse.tail(log, run, "groups", count=NEWEST, follow=False):
        try:
            group = groups.read(record, run=run)[1]
        except Unusable:
            continue  # the trainer sets it aside
        scored += [(sample.reward, group, sample.completion) for sample in group.samples if sample.reward is not None]
    if not scored:
        return []
    ordered = sorted(scored, key=lambda found: -found[0])
    places = {"best": 0, "median": len(ordered) // 2, "worst": len(ordered) - 1}
    prompts = sorted({group.prompt for _, group, _ in scored})
    return [_picked(which, *ordered[place], prompts) for which, place in places.items()]


def _picked(which: str, reward: float, group: groups.Group, completion: str, prompts: list[str]) -> Picked:
    answer = json.loads(group.columns).get("answer")
    return Picked(
        which=which,
        group=group.group,
        prompt=without_template(group.prompt, prompts),
        answer=None if answer is None else str(answer),
        completion=completion,
        reward=reward,
    )
