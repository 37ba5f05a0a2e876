"""Evaluates each version that is due, in order, once: held-out prompts are generated greedily and sampled, and scored.

A version is loaded into an idle engine and stays there. Results are in `metrics`, where another worker continues after them. Early
stopping reads evaluations, and requests the end, in the control topic of the evaluating role, which no other role may write. Accuracy, its
interval, pass@k and the decision to stop are pure functions of rewards.
"""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.infra.engines.base import Completion, Engine, GroupRequest, Sampling
from penstock.infra.errors import RecordMissing
from penstock.infra.sandbox.pool import Failed
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.config.run_config import source_name
from penstock.pipeline.data.run_data import open_eval_data, refuse_changed
from penstock.pipeline.data.tokenization import Decoder, Renderer
from penstock.pipeline.rewards.functions import Score, episodes_of
from penstock.pipeline.rewards.scoring import FaultCount, RewardPool, payload, reward_pool
from penstock.pipeline.runtime.ledger_follower import LedgerFollower, LedgerState
from penstock.pipeline.runtime.sampling import episode_request
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.topic_reader import scan
from penstock.pipeline.runtime.weights.read import fetch
from penstock.topics import metrics
from penstock.topics.catalogue import control_topic
from penstock.topics.metrics import Activity
from penstock.topics.samples import cause_of, generated
from penstock.topics.wire.errors import Unusable

Z95 = 1.959964
"""Two-sided 95 % quantile of the standard normal distribution."""


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson, Journal of the American Statistical Association 22, 1927).

    Example:
        wilson(8, 10)  # -> (0.490, 0.943)
    """
    if trials == 0:
        return (0.0, 1.0)
    p, z2 = successes / trials, Z95 * Z95
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials * trials)) / (1 + z2 / trials)
    return (max(0.0, centre - half), min(1.0, centre + half))


def pass_at(k: int, *, solved: int, samples: int) -> float:
    """Probability that at least one of k samples, taken without replacement, is among the solved ones (arXiv 2107.03374, section 2.1).

    Example:
        pass_at(2, solved=1, samples=4)  # -> 0.5
    """
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def summary(
    *, greedy: Sequence[Score | None], sampled: Sequence[Score | None], samples: int, names: Sequence[str], threshold: float
) -> dict[str, float]:
    """Accuracies with 95 % intervals, pass@k and mean rewards of one version; a prompt whose reward broke is None.

    A prompt with a completion without a reward counts as one whose reward broke: its completions are counted in `n_failed` only. `greedy`
    has one completion a prompt, `sampled` has `samples`; `names` are the reward functions. A completion whose reward reaches the
    threshold is solved. avg@k's interval is over prompts, whose k samples are not independent.
    """
    greedy, sampled = ([score if score and None not in score.rewards else None for score in scores] for scores in (greedy, sampled))
    failed = sum(score is None for score in greedy) + samples * sum(score is None for score in sampled)
    values = {"n": float(len(greedy)), "samples": float(samples), "n_failed": float(failed)}
    ones, many = [score for score in greedy if score is not None], [score for score in sampled if score is not None]
    if ones:
        solved = sum(_solved(score, threshold)[0] for score in ones)
        low, high = wilson(solved, len(ones))
        values |= {"greedy_accuracy": solved / len(ones), "greedy_low": low, "greedy_high": high, **_rewards("greedy", ones, names)}
    if many:
        counts = [sum(_solved(score, threshold)) for score in many]
        mean = sum(counts) / (len(counts) * samples)
        spread = math.sqrt(sum((count / samples - mean) ** 2 for count in counts) / (len(counts) - 1)) if len(counts) > 1 else 0.0
        half = Z95 * spread / math.sqrt(len(counts))
        values |= {"sampled_accuracy": mean, "sampled_low": max(0.0, mean - half), "sampled_high": min(1.0, mean + half)}
        for k in sorted({samples, *(2**power for power in range(samples.bit_length()))} - {1}):
            values[f"pass_at_{k}"] = sum(pass_at(k, solved=count, samples=samples) for count in counts) / len(counts)
        values |= {"pass_at_k": values.get(f"pass_at_{samples}", mean), **_rewards("sampled", many, names)}
    return values


def _solved(score: Score, threshold: float) -> list[bool]:
    return [reward >= threshold - 1e-9 for reward in score.scored]


def _rewards(how: str, scores: Sequence[Score], names: Sequence[str]) -> dict[str, float]:
    """Mean reward, and the mean of each function over the completions that it applies to."""
    totals = [reward for score in scores for reward in score.scored]
    means = {f"{how}_reward": sum(totals) / len(totals)}
    for index, name in enumerate(names):
        values = [row[index] for score in scores for row in score.components]
        applying = [value for value in values if value is not None]
        if applying:
            means[f"{how}_reward/{name}"] = sum(applying) / len(applying)
    return means


def due(*, newest: int, last: int, every: int, done: set[int], closed: bool) -> int | None:
    """The next version to evaluate, or None: 0 first, then every n-th in order, and always the last one.

    Once the run is closed, intermediate versions that were not reached are skipped.
    """
    if 0 not in done and newest >= 0:
        return 0
    if closed:
        return newest if newest not in done and newest > 0 else None
    versions = [version for version in range(every, newest + 1, every) if version not in done]
    if last <= newest and last not in done:
        versions.append(last)
    return min(versions, default=None)


@dataclass(slots=True)
class EarlyStopping:
    """Requests the end of a run once a target is reached or accuracy no longer improves."""

    target: float | None
    patience: int | None
    best: float = -math.inf
    best_version: int | None = None
    since_best: int = 0

    def note(self, *, version: int, accuracy: float | None) -> str | None:
        """Apply an evaluation; returns the reason to stop, or None. An evaluation without an accuracy is ignored."""
        if accuracy is None:
            return None
        if accuracy > self.best:
            self.best, self.best_version, self.since_best = accuracy, version, 0
        else:
            self.since_best += 1
        if self.target is not None and accuracy >= self.target:
            return f"greedy accuracy {accuracy:.3f} of version {version} reached the target {self.target:g}"
        if self.patience is not None and self.since_best >= self.patience:
            return f"{self.since_best} evaluations since the best greedy accuracy, {self.best:.3f} of version {self.best_version}"
        return None


EXAMPLES = 3
"""Number of held-out prompts whose greedy completions are recorded with every evaluation."""
SEED_OFFSET = 1_000_003
"""Makes the random numbers of evaluations differ from those of training samples, which use run.seed with the same group numbers."""
FIRST_GROUP = 1 << 32
"""Group number of the first held-out prompt in an engine: above the groups of any run."""


@dataclass(slots=True)
class Evaluator:
    """The held-out prompts and the reward functions."""

    session: Session
    engine: Engine
    pool: RewardPool[int]
    decoder: Decoder
    rows: list[tuple[Any, Any]]
    """(data row, its text and token ids), one per held-out prompt."""
    sources: list[str]
    """The name of each row's source."""
    renderer: Renderer
    faults: FaultCount
    meanwhile: Callable[[], None]
    """The worker's other work between two decode steps."""
    examples: list[dict[str, Any]] = field(default_factory=list)
    """Prompt, greedy completion and reward of the first held-out prompts under the newest evaluated version."""

    @classmethod
    def open(cls, session: Session, engine: Engine, *, meanwhile: Callable[[], None]) -> "Evaluator":
        """Render the held-out prompts and start the reward functions' processes."""
        config = session.config
        held_out = open_eval_data(config)
        if config.data.on_change == "refuse":
            refuse_changed(session.info, config.eval_sources, held_out, context="evaluation", run=session.run)
        held = [(name, row) for name, dataset in held_out.items() for row in map(dataset.__getitem__, range(len(dataset)))]
        renderer = Renderer.of(config)
        rows = [(row, renderer.render(row)) for _, row in held]
        reward = config.eval_reward
        longest = (
            config.max_completion_tokens if config.environment.source else config.eval.max_new_tokens or config.sampling.max_new_tokens
        )
        pool: RewardPool[int] = reward_pool(reward, max_steps=session.info["steps"], max_completion_length=longest)
        names, faults = [name for name, _ in held], FaultCount(config.reward.on_error)
        return cls(session, engine, pool, Decoder(config.model.path), rows, names, renderer, faults, meanwhile)

    def evaluate(self, version: int, tensors: Sequence[TensorBytes]) -> dict[str, float] | None:
        """The `measures` of the version with these tensors; None if a stop was requested."""
        session, held, sampling = self.session, self.session.config.eval, self.session.config.sampling
        started = time.monotonic()
        self.engine.load_weights(version, tensors)
        longest, stop_ids = held.max_new_tokens or sampling.max_new_tokens, tuple(session.info["digests"]["stop_ids"])
        scores: dict[bool, dict[int, Score]] = {}
        turns, shown = list[int](), dict[int, str]()
        for greedy, rows in ((True, 1), (False, held.samples)):
            how = Sampling(
                temperature=held.temperature, greedy=greedy, max_new_tokens=longest, stop_ids=stop_ids, stop=tuple(sampling.stop)
            )
            for index, completions in self._generate([self._request(index, rows, how) for index in range(len(self.rows))]):
                turns += [sum(turn.source == "model" for turn in getattr(completion, "turns", ())) for completion in completions]
                self._score(index, completions, version)
                if greedy and index < EXAMPLES:
                    shown[index] = self.decoder.decode(generated(completions[0]).tolist())
            if session.stop.is_set():
                return None
            scores[greedy] = self._scored()
        values = self.measures(scores[True], scores[False])
        self.examples = [self._example(index, shown[index], scores[True].get(index)) for index in sorted(shown)]
        if session.config.environment.source is not None:
            values["turns_mean"] = sum(turns) / len(turns)
        parts = [f"{how} reward {values[key]:.3f}" for how in ("greedy", "sampled") if (key := f"{how}_reward") in values]
        parts += [f"{values['n_failed']:.0f} completions without a reward"] if values["n_failed"] else []
        session.reporter.notify(f"version {version}: {', '.join(parts)}")
        return {**values, "eval_s": time.monotonic() - started}

    def _request(self, index: int, rows: int, how: Sampling) -> GroupRequest:
        """Request for `rows` samples of one held-out prompt."""
        row, (text, token_ids) = self.rows[index]
        request = GroupRequest(
            group=FIRST_GROUP + index, prompt_ids=token_ids, samples=tuple(range(rows)), rows=rows,
            seed=self.session.config.run.seed + SEED_OFFSET, sampling=how, stream=index,
        )  # fmt: skip
        if self.session.config.environment.source is None:
            return request
        messages = self.renderer.messages(row)
        return episode_request(request, text=text, messages=json.dumps(messages) if messages else None, columns=row.columns)

    def _example(self, index: int, completion: str, score: Score | None) -> dict[str, Any]:
        row, (text, _) = self.rows[index]
        prompt = row.prompt if row.prompt is not None else text
        return {"prompt": prompt, "completion": completion, "reward": None if score is None else score.rewards[0]}

    def _score(self, index: int, completions: Sequence[Completion], version: int) -> None:
        """Submit the completions of one prompt to the rewards; if an environment broke, the prompt has no reward."""
        row, (text, _) = self.rows[index]
        if cause := next((cause for completion in completions if (cause := cause_of(getattr(completion, "turns", None)))), None):
            self.session.reporter.notify(f"the environment of held-out prompt {index} is broken: {cause}")
            return
        token_ids = [generated(completion).tolist() for completion in completions]
        texts, step = [self.decoder.decode(ids) for ids in token_ids], version * self.session.schedule.steps_per_version
        messages = row.messages if self.session.config.environment.source is None else self.renderer.messages(row)
        self.pool.submit(
            index,
            payload(
                texts, prompt=text, messages=messages, columns=row.columns, completion_ids=token_ids, step=step,
                episodes=episodes_of(completions),
            ),
        )  # fmt: skip

    def measures(self, greedy: Mapping[int, Score], sampled: Mapping[int, Score]) -> dict[str, float]:
        """Accuracies, pass@k and mean rewards over all held-out prompts; of several sources also of each, as `SOURCE/NAME`.

        A prompt that is not in `greedy` or `sampled` has no reward there, because a function broke.
        """
        config = self.session.config
        names = [source_name(name) for name in config.eval_reward.functions]

        def of(rows: Sequence[int]) -> dict[str, float]:
            return summary(
                greedy=[greedy.get(row) for row in rows],
                sampled=[sampled.get(row) for row in rows],
                samples=config.eval.samples,
                names=names,
                threshold=config.eval_threshold,
            )

        values, different = of(range(len(self.rows))), dict.fromkeys(self.sources)
        for source in different if len(different) > 1 else ():
            mine = of([row for row, name in enumerate(self.sources) if name == source])
            values |= {f"{source}/{name}": value for name, value in mine.items()}
        return values

    def close(self) -> None:
        """End the reward functions' processes; the engine stays open."""
        self.pool.close()

    def _generate(self, requests: Sequence[GroupRequest]) -> Iterator[tuple[int, list[Completion]]]:
        """(index, its completions) as prompts finish, as many at a time as the engine samples; ends early on a stop request."""
        left, held = deque(requests), dict[int, list[Completion]]()
        while (left or not self.engine.idle) and not self.session.stop.is_set():
            while left and self.engine.has_room:
                self.engine.submit(left.popleft())
            for completion in self.engine.step():
                index = completion.group - FIRST_GROUP
                held.setdefault(index, []).append(completion)
                if len(held[index]) == len(requests[index].samples):
                    yield index, sorted(held.pop(index), key=lambda completion: completion.sample)
            self.meanwhile()

    def _scored(self) -> dict[int, Score]:
        """Prompt -> the rewards of its completions, without prompts whose reward failed; failures are logged. Raises `BrokenReward`."""
        scores: dict[int, Score] = {}
        while self.pool.pending:
            for result in self.pool.poll(1.0):
                if isinstance(result, Failed):
                    self.session.reporter.notify(f"the reward of held-out prompt {result.key} is broken: {result.reason}")
                    self.faults.failed(result.reason)
                else:
                    scores[result.key] = score = Score.of(result.result)
                    self.faults.partly(score.broken.values(), len(score.rewards))
                    for number, reason in score.broken.items():
                        self.session.reporter.notify(f"completion {number} of held-out prompt {result.key} has no reward: {reason}")
                self.faults.check()
            self.meanwhile()
        return scores


@dataclass(slots=True)
class Evaluations:
    """The completed evaluations of a run, and the next one."""

    session: Session
    follower: LedgerFollower
    evaluator: Evaluator
    stopping: EarlyStopping
    done: set[int]

    @classmethod
    def open(cls, session: Session, engine: Engine, *, meanwhile: Callable[[], None]) -> "Evaluations":
        """Continue after the completed evaluations; `meanwhile` is called between two decode steps."""
        eval_config = session.config.eval
        every_version = LedgerState(session.run)  # those that are due may be far behind the newest
        follower, stopping = (
            LedgerFollower(session.log, session.run, every_version),
            EarlyStopping(eval_config.target, eval_config.patience),
        )
        evaluations = cls(session, follower, Evaluator.open(session, engine, meanwhile=meanwhile), stopping, set())
        evaluations.read_done()
        return evaluations

    @property
    def closed(self) -> bool:
        """True if the run is closed, as far as was read."""
        return self.follower.state.closed is not None

    @property
    def due(self) -> int | None:
        """The next version to evaluate, of those that were read; None if there is none."""
        newest, last = self.follower.state.newest_version, int(self.session.info["versions"])
        return due(newest=newest, last=last, every=self.session.config.eval.every, done=self.done, closed=self.closed)

    def read_done(self) -> None:
        """Read which versions were evaluated, by any worker; each evaluation of this role counts once for early stopping."""
        run, counted = self.session.run, set[int]()
        own = control_topic(run, self.session.role)
        for record in scan(self.session.log, self.session.topic("metrics"), own):
            try:
                measurement = metrics.read(record, run=run)[1]
            except Unusable:
                continue  # the tracker owns reading `metrics`
            version = measurement.version
            if measurement.kind != "eval" or version is None:
                continue
            self.done.add(version)
            if record.topic == own and version not in counted:
                counted.add(version)
                self.stopping.note(version=version, accuracy=measurement.values.get("greedy_accuracy"))

    def make(self, version: int) -> None:
        """Evaluate a version and publish its measures; none if its weights were deleted, or a stop was requested."""
        session = self.session
        self.done.add(version)
        session.reporter.doing(Activity.COMPUTE, f"evaluating version {version}", now=True)
        try:
            tensors = fetch(session.log, self.follower.state.manifests, version, run=session.run)
        except RecordMissing as error:
            session.reporter.notify(f"version {version} is not evaluated: its weights were deleted (weights.keep): {error}")
            return
        values = self.evaluator.evaluate(version, tensors)
        if values is None:
            return
        reason = self.stopping.note(version=version, accuracy=values.get("greedy_accuracy"))
        labels = {"source": ", ".join(session.config.eval_sources)} | ({"ask": "stop", "reason": reason} if reason else {})
        labels["examples"] = json.dumps(self.evaluator.examples)
        values["best_version"] = float(self.stopping.best_version or 0)
        session.reporter.send(kind="eval", values=values, labels=labels, version=version, control=True)

    def close(self) -> None:
        self.evaluator.close()
        self.follower.close()
