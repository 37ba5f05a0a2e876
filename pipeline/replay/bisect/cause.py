"""Facts that distinguish a step or its groups from the others, in words: each is a possible cause with the numbers that it rests on."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from penstock.infra.errors import PenstockError
from penstock.pipeline.inspect.explain.as_json import shares
from penstock.pipeline.inspect.recorded_run import RecordedRun, read_run
from penstock.pipeline.replay.recording import Recording
from penstock.pipeline.replay.rescored_groups import ScoredGroup, cases, read_prompts, score_groups
from penstock.pipeline.runtime.sampling import source_of
from penstock.topics.groups import Group

BEFORE = 20
"""Steps before the step with whose median its metrics are compared."""
SHOWN_TEXT = 40
HIGHER = {
    "lr": (2.0, "setting", "learning rate"),
    "update_norm": (3.0, "setting", "norm of the update"),
    "grad_norm": (3.0, "setting", "norm of the gradient"),
    "reward_std": (3.0, "reward", "standard deviation of the rewards"),
    "lag_max": (2.0, "stale", "largest lag"),
}
"""Metric of a step -> the multiple of its median from which it is a possible cause, the kind of cause, and the metric in words."""
MOST_UNUSUAL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A possible cause."""

    kind: str
    """weight, reward, flip, source, row, ratios, rebase, stale or setting."""
    text: str


def gradient_shares(recording: Recording, steps: Sequence[Sequence[Group]], *, notify: Callable[[str], None]) -> dict[int, float]:
    """Group -> its share of its step's gradient weight, the sum of |weight| over samples as in `penstock explain`; 0 if not computable."""
    sums = {group.group: 0.0 for members in steps for group in members}
    for members in steps:
        try:
            samples = shares(members, config=recording.config, trust_code=True).samples
        except ValueError as error:
            notify(f"groups {', '.join(str(group.group) for group in members)} are taken in their order: {error}")
            continue
        total = sum(abs(sample.weight) for sample in samples) or 1.0
        for sample in samples:
            sums[sample.group] += abs(sample.weight) / total
    return sums


def of_groups(
    recording: Recording, step: int, members: Sequence[Group], culprits: Collection[int], weights: Mapping[int, float], *,
    notify: Callable[[str], None],
) -> Iterator[Cause]:  # fmt: skip
    """Properties that distinguish these groups from the others of the step."""
    mine, others = ([group for group in members if (group.group in culprits) == culprit] for culprit in (True, False))
    named = f"group {mine[0].group}" if len(mine) == 1 else f"the {len(mine)} groups"
    if (share := sum(weights[group] for group in culprits) / (sum(weights.values()) or 1.0)) > 0.5:
        yield Cause(kind="weight", text=f"{named}: {share:.0%} of the gradient weight of {len(members)} groups")
    usual = [reward for group in others for reward in group.rewards] or [0.0]
    low, high = min(usual), max(usual)
    paid = [(sample.reward, sample.completion) for group in mine for sample in group.samples if sample.reward is not None]
    odd, completion = max(paid, key=lambda pair: max(pair[0] - high, low - pair[0]), default=(low, ""))
    if not low <= odd <= high:
        text = f"{named}: a reward of {odd:g} for {_short(completion)}; the other groups of the step have {low:g} to {high:g}"
        yield Cause(kind="reward", text=text)
    recorded = read_run(recording.log, recording.run)
    yield from _flips(recorded, mine, notify)
    sources = {source_of(group.columns) for group in mine}
    if len(sources) == 1 < len(mine) and any(source_of(group.columns) not in sources for group in others):
        yield Cause(kind="source", text=f"{named}: all of the data source {sources.pop()}")
    yield from _rows(recording, recorded, step, mine)


def of_step(recording: Recording, step: int) -> Iterator[Cause]:
    """Properties that distinguish a step from those before it."""
    now, usual = recording.steps[step].metrics, _usual(recording, step)
    since = f"median of the {min(step, BEFORE)} steps before"
    if "ess" in now and now["ess"] < usual.get("ess", 0.0) / 2:
        yield Cause(kind="ratios", text=f"step {step}: heavy tail of ratios: ESS {now['ess']:.3g}, {since} {usual['ess']:.3g}")
    for name, (times, kind, title) in HIGHER.items():
        if _multiple(now, usual, name) > times:
            yield Cause(kind=kind, text=f"step {step}: {title} {now[name]:.3g}, {since} {usual[name]:.3g}")
    for entry in recording.entries:
        if entry.kind == "rebased" and entry.step in (step, step + 1):
            yield Cause(kind="rebase", text=f"the trainer was rebased after {entry.step} steps: recomputed steps differed")
        if entry.kind == "stale" and entry.step == step and len(entry.groups) >= len(recording.steps[step].plan):
            yield Cause(kind="stale", text=f"{len(entry.groups)} groups were dropped as stale before step {step}")


def unusual_steps(recording: Recording, steps: Iterable[int]) -> list[int]:
    """The `MOST_UNUSUAL` of these steps whose metrics are highest above the usual ones, of those above the limits in `HIGHER`."""
    ranks = dict[int, float]()
    for step in steps:
        now, usual = recording.steps[step].metrics, _usual(recording, step)
        ranks[step] = max(_multiple(now, usual, name) / times for name, (times, *_) in HIGHER.items())
    return sorted((step for step, rank in ranks.items() if rank > 1), key=lambda step: -ranks[step])[:MOST_UNUSUAL]


def _usual(recording: Recording, step: int) -> dict[str, float]:
    """Medians of the metrics over the steps before a step."""
    before = [entry.metrics for entry in recording.steps[max(0, step - BEFORE) : step]]
    names = ("ess", *HIGHER)
    return {name: median(values) for name in names if (values := [metrics[name] for metrics in before if name in metrics])}


def _multiple(now: Mapping[str, float], usual: Mapping[str, float], name: str) -> float:
    if name not in usual:
        return 0.0
    least = max(usual[name], 1.0 if name == "lag_max" else 0.0)
    return now.get(name, 0.0) / least if least else 0.0


def _flips(recorded: RecordedRun, members: Sequence[Group], notify: Callable[[str], None]) -> Iterator[Cause]:
    """Rewards that the present reward functions would give otherwise."""
    changes = list[tuple[float, float, str]]()
    try:
        scored = cases(recorded, only={group.group for group in members})
        for result in score_groups(scored, recorded.config, steps=recorded.planned_steps, processes=1):
            before = {sample.rollout.sample: sample for sample in result.case.group.samples} if isinstance(result, ScoredGroup) else {}
            for sample in result.group.samples if result.group is not None else ():
                old = before.get(sample.rollout.sample)
                if old is not None and old.reward is not None and sample.reward is not None and old.reward != sample.reward:
                    changes.append((old.reward, sample.reward, old.completion))
    except (PenstockError, ValueError) as error:
        notify(f"the groups cannot be scored again here: {error}")
    if changes:
        then, now, text = max(changes, key=lambda change: abs(change[0] - change[1]))
        counted = f"{len(changes)} of {sum(len(group.samples) for group in members)} rewards"
        yield Cause(kind="flip", text=f"{counted} change under the present reward functions: {then:g} -> {now:g} for {_short(text)}")


def _rows(recording: Recording, recorded: RecordedRun, step: int, members: Sequence[Group]) -> Iterator[Cause]:
    """Earlier steps that were trained on the same rows."""
    trained = {planned.group: entry.step or 0 for entry in recording.steps[:step] for planned in entry.plan}
    steps: dict[int, list[int]] = {group.row: [] for group in members}
    for number, (prompt, _) in read_prompts(recorded).items():
        if prompt.row in steps and number in trained:
            steps[prompt.row].append(trained[number])
    for group in members:
        if earlier := sorted(steps[group.row]):
            shown = ", ".join(map(str, earlier[-5:]))
            yield Cause(kind="row", text=f"row {group.row}, of group {group.group}, was trained in {len(earlier)} earlier steps: {shown}")


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]}…")
