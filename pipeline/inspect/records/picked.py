"""The best, the median and the worst sample of the newest scored groups; only the ends of the topic are read."""

import json
from dataclasses import dataclass

from penstock.infra.log import Log
from penstock.pipeline.inspect.live.completions import without_template
from penstock.pipeline.inspect.records import browse
from penstock.topics import groups
from penstock.topics.wire.errors import Unusable

NEWEST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """One sample with the reference answer of its prompt's row."""

    which: str
    group: int
    prompt: str
    answer: str | None
    completion: str
    reward: float


def newest_samples(log: Log, run: str) -> list[Picked]:
    """Best, median and worst sample by reward of the newest groups with rewards; [] if there are none."""
    scored = []
    for record in browse.tail(log, run, "groups", count=NEWEST, follow=False):
        try:
            group = groups.read(record, run=run)[1]
        except Unusable:
            continue  # the trainer sends it to the dead-letter topic
        scored += [(sample.reward, group, sample.completion) for sample in group.samples if sample.reward is not None]
    if not scored:
        return []
    ordered = sorted(scored, key=lambda candidate: -candidate[0])
    index_of = {"best": 0, "median": len(ordered) // 2, "worst": len(ordered) - 1}
    prompts = sorted({group.prompt for _, group, _ in scored})
    return [_picked(which, *ordered[index], prompts) for which, index in index_of.items()]


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
