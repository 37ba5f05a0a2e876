"""`penstock bisect`: the step after which a test keeps failing, its groups by leave-out replay, the cause, and the fork without it."""

import json
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

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


HALF = 0.5
"""Steps that make less than this part of the change between the good and the bad state are not held responsible."""
NEAR = 4
"""Steps on each side of the first failing state in which a change is sudden: the optimizer's moments spread a gradient over some steps."""
WIDTHS = (1, 4, 16)
"""Steps up to the first failing state whose groups are ranked for a first guess."""
LOWER = 0.1
"""Factor of the learning rate that is tried if no few groups are responsible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectRequest:
    """Object and limits of a search."""

    test: str
    good: int = 0
    """A state that passes the test: a number of steps."""
    bad: int | None = None
    """A later state that fails it; the newest one if None."""
    replays: int = 64
    """Largest number of replays with groups left out or settings changed."""


def bisect(recording: Recording, request: BisectRequest, *, against: Config | None = None, notify: Notify) -> dict[str, Any]:
    """Search the step and its groups, or with `against` the settings; the result as plain data for JSON.

    Raises `ConfigError` for an invalid request, `PenstockError` if a state cannot be measured.
    """
    started, count = time.monotonic(), len(recording.steps)
    bad = count if request.bad is None else request.bad
    if not request.good < bad <= count:
        raise ConfigError(f"{recording.run} has {count} steps: --good S --bad T need 0 <= S < T <= {count}, got {request.good} and {bad}")
    measurer = Measurer(recording, Criterion.of(request.test), notify, request.replays)
    try:
        search = _Search(recording, measurer, request.good, bad, notify)
        result = search.settings(against) if against is not None else search.step()
    finally:
        measurer.close()
    ends = {"run": recording.run, "test": request.test, "good": request.good, "bad": bad}
    return {**ends, **result, "work": {**measurer.work, "seconds": round(time.monotonic() - started, 1)}}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """The change of a test's result between two states."""

    end: int
    """The failing state."""
    last: int
    """The last step that can be responsible."""
    sudden: bool
    metric: str | None
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
        """The step after which the test keeps failing, its groups and possible causes."""
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
        """Groups without which the state passes, else whether a lower learning rate does; possible causes, and the command of the fork."""
        last, groups, minimal, rate, problem, causes = change.last, list[int](), False, None, None, list[Cause]()
        starts = [max(min(self.good, last), last + 1 - width) for width in WIDTHS] if change.sudden else [self.good]
        start = starts[0]
        try:
            if change.sudden:
                groups, minimal, start, causes = self._groups(change, starts) or (groups, minimal, start, causes)
            if not groups:
                rate, start = self._lower_rate(starts, change.end) or (None, start)
        except PenstockError as error:  # no state to start from on this machine, a deleted group, or too many replays
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
            "causes": [asdict(cause) for cause in causes],
            "next": self._fork(start, options),
        }

    def settings(self, other: Config) -> dict[str, Any]:
        """The settings of another configuration with which the steps from the good to the bad state pass the test."""
        differing, measurer = differences(self.recording.config, other), self.measurer
        tried = {
            key: f"{key}={json.dumps(value)}"
            for key, (_, value) in sorted(differing.items())
            if value is not None and replayable(key) and key not in OF_THE_STATE
        }
        if not tried:
            raise ConfigError(f"--against: no setting that a replay can change is another one: {', '.join(differing) or 'all are equal'}")
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
        """The fewest groups without which the state passes, True if each of them counts, their first step, and causes.

        Guesses are made from the gradient shares of the groups of the last step, then of the steps from another start to it, because the
        optimizer's moments spread a gradient over the following steps. If the guesses fail, all groups of the last step are searched. None
        if it takes more than half of the groups.
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
        """True if the state passes when these steps lack the groups, by half of its distance from the good one at least."""
        start = steps[0].step or 0
        if any({planned.group for planned in entry.plan} <= set(groups) for entry in steps):
            return start == change.end - 1  # a step without any group leaves the good state before it
        values = self.measurer.values(Experiment(end=change.end, start=start, without=frozenset(groups)))
        recovered = share_of_change(change.metric, (values, change.bad), (change.good, change.bad))
        return self.measurer.criterion.passes(values) and (recovered is None or recovered >= HALF)

    def _lower_rate(self, starts: Sequence[int], end: int) -> tuple[float, int] | None:
        """A tenth of the learning rate, and the first of these steps from which on the test passes with it."""
        rate = self.recording.config.trainer.lr * LOWER
        for start in dict.fromkeys(starts):
            if self.measurer.passes(Experiment(end=end, start=start, changes=(f"trainer.lr={rate:g}",))):
                return rate, start
        return None

    def _fork(self, start: int, options: Sequence[str]) -> str:
        return shlex.join(["penstock", "fork", self.recording.run, "--from-step", str(start), *options])


def as_text(result: Mapping[str, Any]) -> str:
    """The result for a terminal."""
    lines = list(_settings(result) if "settings" in result else _step(result))
    work = result["work"]
    lines.append(
        f"{work['measured']} states measured, {work['recorded']} from the run and {work['stored']} from earlier bisects, "
        f"{work['replays']} replays ({work['replayed']} steps), {work['recomputed']} steps recomputed, {work['seconds']:.1f} s"
    )
    return "\n".join([*lines, f"next: {result['next']}"])


def _step(result: Mapping[str, Any]) -> Iterator[str]:
    run, step, groups, near = result["run"], result["step"], result["groups"], result["near"]
    for point in result["measured"]:
        shown = ", ".join(f"{name} {'-' if value is None else format(value, '.4g')}" for name, value in point["values"].items())
        yield f"after {point['steps']:>6} steps  {'good' if point['good'] else 'bad ':<4}  {shown}"
    after = [point["steps"] for point in result["measured"] if point["steps"] > step]
    yield f"{run}: step {step} is the first after which the test keeps failing: all {len(after)} measured states from {step + 1} on fail"
    if result["responsible"] < step:
        yield f"what fails is measured before the update of step {step}: the steps up to {result['responsible']} are responsible"
    if not result["monotone"]:
        yield f"the curve is not monotone: some states before {step} fail too"
    if not result["sudden"]:
        part = f"steps {near['from']} to {near['to'] - 1} make {near['share']:.0%}"
        yield f"the fall is slow: {part} of the change from {result['good']} to {result['bad']}"
    elif not result["single"]:
        yield f"the step makes {result['share']:.0%} of the change, steps {near['from']} to {near['to'] - 1} make {near['share']:.0%}"
    if groups:
        named, fewer = ", ".join(map(str, groups)), "" if result["minimal"] else ", perhaps without fewer"
        several = "s" if len(groups) > 1 else ""
        yield f"without group{several} {named} from step {result['start']} on the state after {result['passes_after']} steps passes{fewer}"
    elif result["problem"] is not None:
        yield f"the search of groups has ended early: {result['problem']}"
    elif result["sudden"]:
        yield "no few groups are responsible"
    if result["lower_rate"] is not None:
        rate, start, end = result["lower_rate"], result["start"], result["passes_after"]
        yield f"with trainer.lr={rate:g}, a tenth, from step {start} on the state after {end} steps passes"
    yield from (f"possible cause: {cause['text']}" for cause in result["causes"])


def _settings(result: Mapping[str, Any]) -> Iterator[str]:
    untried = sorted(result["against"].keys() - set(result["tried"]))
    if untried:
        yield f"not tried, as a replay cannot change them: {', '.join(untried)}"
    if result["settings"]:
        settings = ", ".join(result["settings"])
        yield f"{result['run']}: with {settings} steps {result['good']} to {result['bad'] - 1} pass the test; {OFF_POLICY}"
    else:
        yield f"{result['run']}: with all of {', '.join(result['tried'])} the test fails as well"
