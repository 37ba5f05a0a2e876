"""`penstock bisect`: finds the step after which a test keeps failing, the groups responsible, possible causes, and a fork that avoids them.

Groups are responsible if the test passes when the step is replayed without them.
"""

import json
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

from penstock.infra.errors import ConfigError, PenstockError
from penstock.pipeline.config.load import Config
from penstock.pipeline.config.resume import OF_THE_STATE
from penstock.pipeline.inspect.explain.as_json import shares
from penstock.pipeline.inspect.recorded_run import RecordedRun, read_run
from penstock.pipeline.learner.policy_trainer import Notify
from penstock.pipeline.replay.bisect.measure import Experiment, Measurer
from penstock.pipeline.replay.bisect.search import (
    Criterion,
    Values,
    ddmin,
    last_transition,
    of_the_weights,
    share_of_change,
    smallest_prefix,
)
from penstock.pipeline.replay.overrides import differences, replayable
from penstock.pipeline.replay.recording import Recording
from penstock.pipeline.replay.rescored_groups import ScoredGroup, cases, read_prompts, score_groups
from penstock.pipeline.replay.what_if import OFF_POLICY
from penstock.pipeline.runtime.sampling import source_of
from penstock.topics.groups import Group
from penstock.topics.ledger import Entry

BEFORE = 20
"""Number of preceding steps; a step's metrics are compared with the medians over these."""
SHOWN_TEXT = 40
HIGHER = {
    "lr": (2.0, "setting", "learning rate"),
    "update_norm": (3.0, "setting", "norm of the update"),
    "grad_norm": (3.0, "setting", "norm of the gradient"),
    "reward_std": (3.0, "reward", "standard deviation of the rewards"),
    "lag_max": (2.0, "stale", "largest lag"),
}
"""Metric of a step -> (multiple of its median above which it is a possible cause, kind of cause, description of the metric)."""
MOST_UNUSUAL = 3


class Cause(NamedTuple):
    """A possible cause of the failing test."""

    kind: str
    """weight, reward, flip, source, row, ratios, rebase, stale or setting."""
    text: str
    """Sentence for the user, with the numbers that support it."""


def gradient_shares(recording: Recording, steps: Sequence[Sequence[Group]], *, notify: Callable[[str], None]) -> dict[int, float]:
    """Return group -> the group's share (0 to 1) of the gradient weight of its step; 0 if the share cannot be computed.

    `steps` holds the groups of each step. The gradient weight of a group is the sum of |weight| over its samples, as in `penstock explain`.
    """
    sums = {group.group: 0.0 for members in steps for group in members}
    for members in steps:
        try:
            samples = shares(members, config=recording.config, trust_code=True).samples
        except ValueError as error:
            notify(f"groups {', '.join(str(group.group) for group in members)} cannot be ranked by gradient weight: {error}")
            continue
        total = sum(abs(sample.weight) for sample in samples) or 1.0
        for sample in samples:
            sums[sample.group] += abs(sample.weight) / total
    return sums


def of_groups(
    recording: Recording, step: int, members: Sequence[Group], culprits: Collection[int], weights: Mapping[int, float], *,
    notify: Callable[[str], None],
) -> Iterator[Cause]:  # fmt: skip
    """Yield the properties in which the groups `culprits` differ from the other `members` of a step.

    `weights` are the gradient shares of all members.
    """
    mine, others = ([group for group in members if (group.group in culprits) == culprit] for culprit in (True, False))
    named = f"group {mine[0].group}" if len(mine) == 1 else f"the {len(mine)} groups"
    if (share := sum(weights[group] for group in culprits) / (sum(weights.values()) or 1.0)) > 0.5:
        yield Cause("weight", f"{named}: {share:.0%} of the gradient weight of {len(members)} groups")
    usual = [reward for group in others for reward in group.rewards] or [0.0]
    low, high = min(usual), max(usual)
    paid = [(sample.reward, sample.completion) for group in mine for sample in group.samples if sample.reward is not None]
    odd, completion = max(paid, key=lambda pair: max(pair[0] - high, low - pair[0]), default=(low, ""))
    if not low <= odd <= high:
        text = f"{named}: a reward of {odd:g} for {_short(completion)}; rewards of the step's other groups range from {low:g} to {high:g}"
        yield Cause("reward", text)
    recorded = read_run(recording.log, recording.run)
    yield from _flips(recorded, mine, notify)
    sources = {source_of(group.columns) for group in mine}
    if len(sources) == 1 < len(mine) and any(source_of(group.columns) not in sources for group in others):
        yield Cause("source", f"{named}: all prompts are from the data source {sources.pop()}")
    yield from _rows(recording, recorded, step, mine)


def of_step(recording: Recording, step: int) -> Iterator[Cause]:
    """Yield the metrics and events in which a step differs from the `BEFORE` steps preceding it."""
    now, usual = recording.steps[step].metrics, _usual(recording, step)
    since = f"median of the {min(step, BEFORE)} steps before"
    if "ess" in now and now["ess"] < usual.get("ess", 0.0) / 2:
        text = f"step {step}: heavy-tailed importance ratios: effective sample size {now['ess']:.3g}, {since} {usual['ess']:.3g}"
        yield Cause("ratios", text)
    for name, (times, kind, title) in HIGHER.items():
        if _multiple(now, usual, name) > times:
            yield Cause(kind, f"step {step}: {title} {now[name]:.3g}, {since} {usual[name]:.3g}")
    for entry in recording.entries:
        if entry.kind == "rebased" and entry.step in (step, step + 1):
            text = f"after {entry.step} steps the trainer was restarted, and the steps that it recomputed differed from the ledger (rebase)"
            yield Cause("rebase", text)
        if entry.kind == "stale" and entry.step == step and len(entry.groups) >= len(recording.steps[step].plan):
            yield Cause("stale", f"{len(entry.groups)} groups were dropped as stale before step {step}")


def unusual_steps(recording: Recording, steps: Iterable[int]) -> list[int]:
    """Return at most `MOST_UNUSUAL` of these steps that exceed a limit in `HIGHER`, by descending excess."""
    ranks = dict[int, float]()
    for step in steps:
        now, usual = recording.steps[step].metrics, _usual(recording, step)
        ranks[step] = max(_multiple(now, usual, name) / times for name, (times, *_) in HIGHER.items())
    return sorted((step for step, rank in ranks.items() if rank > 1), key=lambda step: -ranks[step])[:MOST_UNUSUAL]


def _usual(recording: Recording, step: int) -> dict[str, float]:
    """Return metric -> its median over the `BEFORE` steps preceding `step`."""
    before = [entry.metrics for entry in recording.steps[max(0, step - BEFORE) : step]]
    names = ("ess", *HIGHER)
    return {name: median(values) for name in names if (values := [metrics[name] for metrics in before if name in metrics])}


def _multiple(now: Mapping[str, float], usual: Mapping[str, float], name: str) -> float:
    """Return a metric of a step as a multiple of its usual value; 0 if that is unknown or 0."""
    if name not in usual:
        return 0.0
    least = max(usual[name], 1.0 if name == "lag_max" else 0.0)
    return now.get(name, 0.0) / least if least else 0.0


def _flips(recorded: RecordedRun, members: Sequence[Group], notify: Callable[[str], None]) -> Iterator[Cause]:
    """Score the groups with the reward functions on this machine; yield a cause if rewards differ from the recorded ones."""
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
        notify(f"the groups cannot be scored again on this machine, so changed reward functions are not detected: {error}")
    if changes:
        then, now, text = max(changes, key=lambda change: abs(change[0] - change[1]))
        counted = f"{len(changes)} of {sum(len(group.samples) for group in members)} rewards"
        change = f"{then:g} -> {now:g} for {_short(text)}"
        yield Cause("flip", f"{counted} change when the reward functions on this machine score them again: {change}")


def _rows(recording: Recording, recorded: RecordedRun, step: int, members: Sequence[Group]) -> Iterator[Cause]:
    """Yield a cause for each group whose data row was trained on in earlier steps."""
    trained = {planned.group: entry.step or 0 for entry in recording.steps[:step] for planned in entry.plan}
    steps: dict[int, list[int]] = {group.row: [] for group in members}
    for number, (prompt, _) in read_prompts(recorded).items():
        if prompt.row in steps and number in trained:
            steps[prompt.row].append(trained[number])
    for group in members:
        if earlier := sorted(steps[group.row]):
            shown = ", ".join(map(str, earlier[-5:]))
            text = f"row {group.row} of the data (group {group.group}) was already trained on in {len(earlier)} earlier steps: {shown}"
            yield Cause("row", text)


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]}…")


HALF = 0.5
"""Smallest share of the change between the good and the bad state for which steps or groups are held responsible."""
NEAR = 4
"""Number of steps on each side of the transition; a change within them is sudden. The optimizer's moments spread a gradient over steps."""
WIDTHS = (1, 4, 16)
"""Numbers of steps up to the transition; the groups of each such window are ranked for a first guess."""
LOWER = 0.1
"""Factor by which the learning rate is lowered if no small set of groups is responsible."""


def bisect(
    recording: Recording, test: str, *, good: int, bad: int | None, replays: int, against: Config | None, notify: Notify
) -> dict[str, Any]:
    """Search the step and groups that make the test fail or, with `against`, the settings of that configuration that make it pass.

    The test passes after `good` steps and fails after `bad` (all if None). At most `replays` replays without some groups or with changed
    settings are made.

    Returns plain data for JSON. Raises `ConfigError` for an invalid request, `PenstockError` if a state cannot be measured.
    """
    started, count = time.monotonic(), len(recording.steps)
    bad = count if bad is None else bad
    if not good < bad <= count:
        raise ConfigError(f"--good {good} --bad {bad}: {recording.run} has {count} steps; choose 0 <= --good < --bad <= {count}")
    with closing(Measurer(recording, Criterion.of(test), notify, replays)) as measurer:
        search = _Search(recording, measurer, good, bad, notify)
        result = search.settings(against) if against is not None else search.step()
    ends = {"run": recording.run, "test": test, "good": good, "bad": bad}
    return {**ends, **result, "work": {**measurer.work, "seconds": round(time.monotonic() - started, 1)}}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """The transition of a test from passing to failing."""

    end: int
    last: int
    sudden: bool
    """True if at least half of the metric's change is within `NEAR` steps of the transition."""
    metric: str | None
    """The metric that fails; None for a command."""
    good: Values
    bad: Values


@dataclass(frozen=True, slots=True)
class _Search:
    recording: Recording
    measurer: Measurer
    good: int
    bad: int
    notify: Notify

    def step(self) -> dict[str, Any]:
        """Return the step after which the test keeps failing, the groups responsible, and possible causes, as plain data."""
        measurer, criterion = self.measurer, self.measurer.criterion
        measurer.check_recorded(self.good, self.bad)
        free = measurer.recorded if criterion.evaluates or not criterion.any_of else range(self.good, self.bad + 1)
        low, points = last_transition(
            self.good, self.bad, lambda steps: measurer.passes(Experiment(end=steps)), measured=free, cheap=measurer.published
        )
        self.notify(f"the test passes after {low} steps and fails after {low + 1}")
        values = {steps: measurer.values(Experiment(end=steps)) for steps in points}
        near = [steps for steps in points if -NEAR < steps - low <= NEAR]
        metric, ends = criterion.failing(values[low], values[low + 1]), (values[self.good], values[self.bad])
        share, around = (
            share_of_change(metric, (values[first], values[last]), ends) for first, last in ((low, low + 1), (near[0], near[-1]))
        )
        sudden = around is None or around >= HALF
        last = max(0, low - 1) if of_the_weights(metric) else low
        end, before = (low + 1, near[0]) if sudden else (self.bad, self.good)
        change = _Change(end=end, last=last, sudden=sudden, metric=metric, good=values[before], bad=values[end])
        return {
            "step": low,
            "responsible": last,
            "single": share is None or share >= HALF,
            "sudden": sudden,
            "share": share,
            "near": {"from": near[0], "to": near[-1], "share": around},
            "monotone": all(passes for steps, passes in points.items() if steps < low),
            "measured": [
                {"steps": steps, "good": passes, "values": {name: values[steps].get(name) for name in criterion.metrics}}
                for steps, passes in points.items()
            ],
            **self._reasons(change),
        }

    def _reasons(self, change: _Change) -> dict[str, Any]:
        """Return the groups without which the test passes (else a lower learning rate that passes), causes, and a fork command."""
        last, groups, minimal, rate, problem, causes = change.last, list[int](), False, None, None, list[Cause]()
        starts = [max(min(self.good, last), last + 1 - width) for width in WIDTHS] if change.sudden else [self.good]
        start = starts[0]
        try:
            if change.sudden:
                groups, minimal, start, causes = self._groups(change, starts) or (groups, minimal, start, causes)
            if not groups:
                rate, start = self._lower_rate(starts, change.end) or (None, start)
        except PenstockError as error:  # a state cannot be restored here, a group was deleted, or the replays are used up
            problem = str(error)
        unusual = unusual_steps(self.recording, range(min(self.good, last), last + 1))
        causes[:0] = [cause for step in dict.fromkeys((start if groups else last, *unusual)) for cause in of_step(self.recording, step)]
        options = ["--without", ",".join(map(str, groups))] if groups else [] if rate is None else ["--set", f"trainer.lr={rate:g}"]
        return {
            "groups": groups,
            "minimal": minimal,
            "start": start,
            "passes_after": change.end,
            "lower_rate": rate,
            "problem": problem,
            "causes": [cause._asdict() for cause in causes],
            "next": self._fork(start, options),
        }

    def settings(self, other: Config) -> dict[str, Any]:
        """Return the fewest settings of the configuration `other` with which the steps from the good to the bad state pass the test."""
        differing, measurer = differences(self.recording.config, other), self.measurer
        tried = {
            key: f"{key}={json.dumps(value)}"
            for key, (_, value) in sorted(differing.items())
            if value is not None and replayable(key) and key not in OF_THE_STATE
        }
        if not tried:
            names = ", ".join(differing) or "none"
            raise ConfigError(f"--against: the two configurations differ in no setting that a replay can change (they differ in: {names})")
        if measurer.passes(Experiment(end=self.bad)):
            raise ConfigError(f"--bad {self.bad}: the test passes after {self.bad} steps; choose another state, or another test")

        def passes(texts: Sequence[str]) -> bool:
            return measurer.passes(Experiment(end=self.bad, start=self.good, changes=tuple(texts)))

        texts, minimal = ddmin([*tried.values()], passes) if passes([*tried.values()]) else ([], False)
        return {
            "against": {key: {"recorded": before, "other": after} for key, (before, after) in differing.items()},
            "tried": [*tried],
            "settings": texts,
            "minimal": minimal,
            "off_policy": OFF_POLICY,
            "next": self._fork(self.good, [word for text in texts for word in ("--set", text)]),
        }

    def _groups(self, change: _Change, starts: Sequence[int]) -> tuple[list[int], bool, int, list[Cause]] | None:
        """Return the fewest groups without which the state passes, True if that set is minimal, the first step with one of them, causes.

        First guesses are the groups with the largest gradient shares in the last responsible step, then in wider windows of `starts`,
        because the optimizer's moments spread a gradient over later steps. If all guesses fail, all groups of the last step are searched.
        Returns None if more than half of the groups are needed.
        """
        for first in (*starts, starts[0]):
            steps = self.recording.steps[first : change.last + 1]
            members = [[member.group for member in self.measurer.groups.read(entry.plan) if member.group is not None] for entry in steps]
            weights = gradient_shares(self.recording, members, notify=self.notify)
            ranked, passes = sorted(weights, key=lambda group: -weights[group]), partial(self._recovers_without, change, steps)
            if (guess := smallest_prefix(ranked[: len(ranked) // 2], passes)) is not None:
                break
        groups, minimal = ddmin(ranked if guess is None else guess, passes)
        if 2 * len(groups) > len(ranked) > 1:
            return None
        start = next(entry.step or 0 for entry in steps if {planned.group for planned in entry.plan} & set(groups))
        causes = of_groups(self.recording, first, [*chain(*members)], groups, weights, notify=self.notify)
        return sorted(groups), minimal, start, list(causes)

    def _recovers_without(self, change: _Change, steps: Sequence[Entry], groups: Sequence[int]) -> bool:
        """True if the test passes, and at least half of the metric's change is undone, when these steps are trained without the groups."""
        start = steps[0].step or 0
        if any({planned.group for planned in entry.plan} <= set(groups) for entry in steps):
            return start == change.end - 1  # a step without groups does not change the weights, so the good state remains
        values = self.measurer.values(Experiment(end=change.end, start=start, without=frozenset(groups)))
        recovered = share_of_change(change.metric, (values, change.bad), (change.good, change.bad))
        return self.measurer.criterion.passes(values) and (recovered is None or recovered >= HALF)

    def _lower_rate(self, starts: Sequence[int], end: int) -> tuple[float, int] | None:
        """Return a tenth of the learning rate and the first of `starts` from which the test passes with it; None if none passes."""
        rate = self.recording.config.trainer.lr * LOWER
        for start in dict.fromkeys(starts):
            if self.measurer.passes(Experiment(end=end, start=start, changes=(f"trainer.lr={rate:g}",))):
                return rate, start
        return None

    def _fork(self, start: int, options: Sequence[str]) -> str:
        return shlex.join(["penstock", "fork", self.recording.run, "--from-step", str(start), *options])


def as_text(result: Mapping[str, Any]) -> str:
    """Format the result of `bisect` for a terminal."""
    lines = list(_settings(result) if "settings" in result else _step(result))
    work = result["work"]
    lines.append(
        f"{work['measured']} states measured, {work['recorded']} from the run and {work['stored']} from earlier bisects, "
        f"{work['replays']} replays ({work['replayed']} steps), {work['recomputed']} steps recomputed, {work['seconds']:.1f} s"
    )
    return "\n".join([*lines, f"next: {result['next']}"])


def _step(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines for the terminal about the step and the groups that make the test fail."""
    run, step, groups, near = result["run"], result["step"], result["groups"], result["near"]
    for point in result["measured"]:
        shown = ", ".join(f"{name} {'-' if value is None else format(value, '.4g')}" for name, value in point["values"].items())
        yield f"after {point['steps']:>6} steps  {'good' if point['good'] else 'bad ':<4}  {shown}"
    after = [point["steps"] for point in result["measured"] if point["steps"] > step]
    yield f"{run}: step {step} is the first after which the test keeps failing: all {len(after)} measured states from {step + 1} on fail"
    if result["responsible"] < step:
        yield f"the failing metric is computed before the update of step {step}: the steps up to {result['responsible']} are responsible"
    if not result["monotone"]:
        yield f"the test also fails for some states before {step} (not monotone)"
    if not result["sudden"]:
        part = f"steps {near['from']} to {near['to'] - 1} cause {near['share']:.0%}"
        yield f"the metric changes slowly: {part} of the change from step {result['good']} to {result['bad']}"
    elif not result["single"]:
        yield f"the step causes {result['share']:.0%} of the change, steps {near['from']} to {near['to'] - 1} cause {near['share']:.0%}"
    if groups:
        named, fewer = ", ".join(map(str, groups)), "" if result["minimal"] else " (fewer groups may suffice)"
        several = "s" if len(groups) > 1 else ""
        passes = f"after {result['passes_after']} steps the test passes{fewer}"
        yield f"replayed from step {result['start']} on without group{several} {named}, {passes}"
    elif result["problem"] is not None:
        yield f"the search for responsible groups ended early: {result['problem']}"
    elif result["sudden"]:
        yield "no small set of groups is responsible"
    if result["lower_rate"] is not None:
        rate, start, end = result["lower_rate"], result["start"], result["passes_after"]
        yield f"replayed from step {start} on with trainer.lr={rate:g} (a tenth), after {end} steps the test passes"
    yield from (f"possible cause: {cause['text']}" for cause in result["causes"])


def _settings(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines for the terminal about the settings that make the test pass."""
    untried = sorted(result["against"].keys() - set(result["tried"]))
    if untried:
        yield f"not tried, because a replay cannot change these settings: {', '.join(untried)}"
    if result["settings"]:
        settings = ", ".join(result["settings"])
        steps = f"steps {result['good']} to {result['bad'] - 1} of {result['run']}"
        yield f"{steps} pass the test with {settings}; {OFF_POLICY}"
    else:
        yield f"{result['run']}: the test also fails with all of {', '.join(result['tried'])}"
