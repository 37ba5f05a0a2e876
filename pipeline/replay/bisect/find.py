"""`penstock bisect`: the step after which a test keeps failing, its groups by leave-out replay, the cause, and the fork without it."""

import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from penstock.infra.errors import ConfigError, PenstockError
from penstock.pipeline.config.load import Config
from penstock.pipeline.config.resume import OF_THE_STATE
from penstock.pipeline.learner.policy_trainer import Notify
from penstock.pipeline.replay.bisect.cause import Cause, gradient_shares, of_groups, of_step
from penstock.pipeline.replay.bisect.measure import Experiment, Measurer, OutOfReplays, Values
from penstock.pipeline.replay.bisect.search import Criterion, Item, ddmin, last_transition, share_of_change, smallest_prefix
from penstock.pipeline.replay.overrides import differences, replayable
from penstock.pipeline.replay.recording import PlannedGroups, Recording
from penstock.pipeline.replay.what_if import OFF_POLICY
from penstock.topics.groups import Group

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
        share, around = (
            share_of_change(criterion, values, low, between=between, ends=(self.good, self.bad))
            for between in ((low, low + 1), (near[0], near[-1]))
        )
        return {
            "step": low,
            "single": share is None or share >= HALF,
            "sudden": around is None or around >= HALF,
            "share": share,
            "near": {"from": near[0], "to": near[-1], "share": around},
            "monotone": all(passes for steps, passes in points.items() if steps < low),
            "measured": [
                {"steps": steps, "good": passes, "values": {name: values[steps].get(name) for name in criterion.metrics}}
                for steps, passes in points.items()
            ],
            **self._reasons(low, before=values[near[0]], sudden=around is None or around >= HALF),
        }

    def _reasons(self, step: int, *, before: Values, sudden: bool) -> dict[str, Any]:
        """Groups of a sudden change, else whether a lower learning rate passes; possible causes, and the command of the fork."""
        causes, groups, minimal, rate, problem = list(of_step(self.recording, step)), list[int](), False, None, None
        start, end = (step, step + 1) if sudden else (self.good, self.bad)
        try:
            if sudden:
                groups, minimal, start, of_them = self._groups(step, before)
                causes += of_them
            if not groups:
                rate = self._lower_rate(start, end)
        except PenstockError as error:  # no state to start from on this machine, a deleted group, or too many replays
            problem = str(error)
        options = ["--without", ",".join(map(str, groups))] if groups else [] if rate is None else ["--set", f"trainer.lr={rate:g}"]
        return {
            "groups": groups,
            "minimal": minimal,
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

        texts, minimal = self._smallest([*tried.values()], passes) if passes([*tried.values()]) else ([], False)
        return {
            "against": {key: {"recorded": before, "other": after} for key, (before, after) in differing.items()},
            "tried": [*tried],
            "settings": texts,
            "minimal": minimal,
            "off_policy": OFF_POLICY,
            "next": self._fork(self.good, [word for text in texts for word in ("--set", text)]),
        }

    def _groups(self, step: int, before: Values) -> tuple[list[int], bool, int, list[Cause]]:
        """The fewest groups without which the state after `step` passes, True if each of them counts, their first step, and causes.

        A first guess is made from the gradient shares of the step's groups, then of the groups of the steps before it, because the
        optimizer's moments spread a gradient over the following steps. If the guesses fail, all groups of the step are searched. No groups
        if it takes more than half of them.
        """
        for width in WIDTHS:
            first = max(self.good, step + 1 - width)
            weights = self._shares(first, step)
            ranked = sorted(weights, key=lambda group: -weights[group])
            guess = smallest_prefix(ranked[: len(ranked) // 2], partial(self._recovers_without, before, first, step))
            if guess is not None:
                break
        else:
            first, weights = step, self._shares(step, step)
            guess = ranked = sorted(weights, key=lambda group: -weights[group])
        groups, minimal = self._smallest(guess, partial(self._recovers_without, before, first, step))
        if 2 * len(groups) > len(ranked) > 1:
            return [], False, step, []
        trained = {planned.group: entry.step or 0 for entry in self.recording.steps[first : step + 1] for planned in entry.plan}
        causes = of_groups(self.recording, first, self._members(first, step), groups, weights, notify=self.notify)
        return sorted(groups), minimal, min(trained[group] for group in groups), list(causes)

    def _recovers_without(self, before: Values, first: int, step: int, groups: Sequence[int]) -> bool:
        """True if the state after `step` passes without these groups, by half of its distance from the good state `before` at least."""
        plans = [{planned.group for planned in entry.plan} for entry in self.recording.steps[first : step + 1]]
        if any(plan <= set(groups) for plan in plans):
            return first == step  # a step without any group leaves the good state before it
        values = self.measurer.values(Experiment(end=step + 1, start=first, without=frozenset(groups)))
        states = {0: before, 1: self.measurer.values(Experiment(end=step + 1)), 2: values}
        recovered = share_of_change(self.measurer.criterion, states, 0, between=(2, 1), ends=(0, 1))
        return self.measurer.criterion.passes(values) and (recovered is None or recovered >= HALF)

    def _members(self, first: int, step: int) -> list[Group]:
        planned = PlannedGroups(self.recording.log, self.recording.run)
        reads = [member for entry in self.recording.steps[first : step + 1] for member in planned.read(entry.plan)]
        return [member.group for member in reads if member.group is not None]

    def _shares(self, first: int, step: int) -> dict[int, float]:
        """Group -> its share of its step's gradient; equal ones if they cannot be computed."""
        shares = dict[int, float]()
        for number in range(first, step + 1):
            members = self._members(number, number)
            try:
                shares |= gradient_shares(self.recording, members)
            except ValueError as error:
                self.notify(f"the groups of step {number} are taken in their order: {error}")
                shares |= dict.fromkeys((group.group for group in members), 0.0)
        return shares

    def _smallest(self, items: Sequence[Item], passes: Callable[[Sequence[Item]], bool]) -> tuple[list[Item], bool]:
        """The fewest items that pass, and True; or the fewest so far and False if `--replays` ends the search."""
        smallest = list(items)

        def shrinks(candidate: Sequence[Item]) -> bool:
            nonlocal smallest
            if passed := passes(candidate):
                smallest = list(candidate)
            return passed

        try:
            return ddmin(items, shrinks), True
        except OutOfReplays as error:
            self.notify(str(error))
            return smallest, False

    def _lower_rate(self, start: int, end: int) -> float | None:
        """A tenth of the learning rate if the test passes when these steps are trained with it."""
        rate = self.recording.config.trainer.lr * LOWER
        return rate if self.measurer.passes(Experiment(end=end, start=start, changes=(f"trainer.lr={rate:g}",))) else None

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
    if not result["monotone"]:
        yield f"the curve is not monotone: some states before {step} fail too"
    if not result["sudden"]:
        part = f"steps {near['from']} to {near['to'] - 1} make {near['share']:.0%}"
        yield f"no step is responsible: {part} of the change from {result['good']} to {result['bad']}"
    elif not result["single"]:
        yield f"the step makes {result['share']:.0%} of the change, steps {near['from']} to {near['to'] - 1} make {near['share']:.0%}"
    if groups:
        several = "" if result["minimal"] else ", perhaps without fewer"
        yield f"without group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups))} the state after it passes{several}"
    elif result["problem"] is not None:
        yield f"the search of groups has ended early: {result['problem']}"
    elif result["sudden"]:
        yield "no few groups are responsible"
    if result["lower_rate"] is not None:
        yield f"with trainer.lr={result['lower_rate']:g}, a tenth, the test passes"
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
