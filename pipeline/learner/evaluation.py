"""Evaluates weights on the held-out prompts: generated greedily and sampled, and scored."""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.infra.engines.base import Completion, Engine, GroupRequest, Sampling
from penstock.infra.sandbox.timed_pool import Failed
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.config.load import Config
from penstock.pipeline.config.run_config import source_name
from penstock.pipeline.data.run_data import open_eval_data, refuse_changed
from penstock.pipeline.data.tokenization import Decoder, Renderer
from penstock.pipeline.rewards.functions import Score, episodes_of
from penstock.pipeline.rewards.scoring import FaultCount, MissingRewards, RewardPool, payload, reward_pool
from penstock.pipeline.runtime.reporting.log_lines import counted
from penstock.pipeline.runtime.sampling import episode_request
from penstock.topics.rollouts import cause_of, generated

Z95 = 1.959964
"""Two-sided 95 % quantile of the standard normal distribution."""


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson, Journal of the American Statistical Association 22, 1927)."""
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
    """Metrics of one version: accuracies with 95 % intervals, pass@k and mean rewards, from one score per held-out prompt.

    A score has one reward in `greedy` and `samples` rewards in `sampled`; it is None if the reward function failed. Such a prompt, and one
    with a completion without a reward, counts in `n_failed` only. `names` are the reward functions. A completion whose reward reaches
    `threshold` is solved. The interval of the sampled accuracy is over prompts, whose samples are not independent.
    """
    greedy, sampled = ([score if score and None not in score.rewards else None for score in scores] for scores in (greedy, sampled))
    failed = sum(score is None for score in greedy) + samples * sum(score is None for score in sampled)
    values = {"n": float(len(greedy)), "samples": float(samples), "n_failed": float(failed)}
    single, many = [score for score in greedy if score is not None], [score for score in sampled if score is not None]
    if single:
        solved = sum(_solved(score, threshold)[0] for score in single)
        low, high = wilson(solved, len(single))
        values |= {"greedy_accuracy": solved / len(single), "greedy_low": low, "greedy_high": high, **_rewards("greedy", single, names)}
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
    """Mean reward as `HOW_reward`, and as `HOW_reward/NAME` the mean of each function over the completions that it scored."""
    totals = [reward for score in scores for reward in score.scored]
    means = {f"{how}_reward": sum(totals) / len(totals)}
    for index, name in enumerate(names):
        values = [row[index] for score in scores for row in score.components]
        applying = [value for value in values if value is not None]
        if applying:
            means[f"{how}_reward/{name}"] = sum(applying) / len(applying)
    return means


EXAMPLES = 3
"""Number of held-out prompts whose greedy completions are recorded with every evaluation."""
SEED_OFFSET = 1_000_003
"""Makes the random numbers of evaluations differ from those of training samples, which use run.seed with the same group numbers."""
FIRST_GROUP = 1 << 32
"""Group number of the first held-out prompt in an engine: above the groups of any run."""


@dataclass(slots=True)
class Evaluator:
    """Evaluates versions on held-out prompts with the run's reward functions."""

    config: Config
    info: Mapping[str, Any]
    """`info` of the run's registration."""
    notify: Callable[[str], None]
    stopped: Callable[[], bool]
    """Returns True when a stop was requested."""
    engine: Engine
    pool: RewardPool[int]
    decoder: Decoder
    rows: list[tuple[Any, Any]]
    """(data row, its text and token ids), one per held-out prompt."""
    sources: list[str]
    """Name of the data source of each row."""
    renderer: Renderer
    faults: FaultCount
    meanwhile: Callable[[], None]
    """The worker's other work between two decode steps."""
    missing: MissingRewards = field(default_factory=MissingRewards)
    examples: list[dict[str, Any]] = field(default_factory=list)
    """Prompt, greedy completion and reward of the first held-out prompts under the newest evaluated version."""

    @classmethod
    def open(
        cls,
        config: Config,
        info: Mapping[str, Any],
        engine: Engine,
        *,
        run: str,
        notify: Callable[[str], None],
        stopped: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> "Evaluator":
        """Render the held-out prompts and start the reward functions' processes."""
        held_out = open_eval_data(config)
        if config.data.on_change == "refuse":
            refuse_changed(info, config.eval_sources, held_out, context="evaluation", run=run)
        held = [(name, row) for name, dataset in held_out.items() for row in map(dataset.__getitem__, range(len(dataset)))]
        renderer = Renderer.of(config)
        rows = [(row, renderer.render(row)) for _, row in held]
        reward = config.eval_reward
        longest = config.eval.max_new_tokens or config.sampling.max_new_tokens
        longest = config.max_completion_tokens if config.environment.source else longest
        pool: RewardPool[int] = reward_pool(reward, max_steps=info["steps"], max_completion_length=longest)
        names, faults = [name for name, _ in held], FaultCount(config.reward.on_error)
        return cls(config, info, notify, stopped, engine, pool, Decoder(config.model.path), rows, names, renderer, faults, meanwhile)

    def evaluate(self, version: int, tensors: Sequence[TensorBytes]) -> dict[str, float] | None:
        """Load a version and return its `measures`; None if a stop was requested meanwhile."""
        held, sampling = self.config.eval, self.config.sampling
        started = time.monotonic()
        self.engine.load_weights(version, tensors)
        longest, stop_ids = held.max_new_tokens or sampling.max_new_tokens, tuple(self.info["digests"]["stop_ids"])
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
            if self.stopped():
                return None
            scores[greedy] = self._scored()
        values = self.measures(scores[True], scores[False])
        self.examples = [self._example(index, shown[index], scores[True].get(index)) for index in sorted(shown)]
        if self.config.environment.source is not None:
            values["turns_mean"] = sum(turns) / len(turns)
        parts = [f"{how} reward {values[key]:.3f}" for how in ("greedy", "sampled") if (key := f"{how}_reward") in values]
        parts += [f"{counted(int(values['n_failed']), 'completion')} without a reward"] if values["n_failed"] else []
        self.notify(f"version {version}: {', '.join(parts)}")
        return {**values, "eval_s": time.monotonic() - started}

    def _request(self, index: int, rows: int, how: Sampling) -> GroupRequest:
        """Request to the engine for `rows` samples of one held-out prompt."""
        row, (text, token_ids) = self.rows[index]
        request = GroupRequest(
            group=FIRST_GROUP + index, prompt_ids=token_ids, samples=tuple(range(rows)), rows=rows,
            seed=self.config.run.seed + SEED_OFFSET, sampling=how, stream=index,
        )  # fmt: skip
        if self.config.environment.source is None:
            return request
        messages = self.renderer.messages(row)
        return episode_request(request, text=text, messages=json.dumps(messages) if messages else None, columns=row.columns)

    def _example(self, index: int, completion: str, score: Score | None) -> dict[str, Any]:
        """One prompt with its greedy completion and reward, as an evaluation records it."""
        row, (text, _) = self.rows[index]
        prompt = row.prompt if row.prompt is not None else text
        return {"prompt": prompt, "completion": completion, "reward": None if score is None else score.rewards[0]}

    def _score(self, index: int, completions: Sequence[Completion], version: int) -> None:
        """Pass the completions of one prompt to the reward functions, unless its environment failed."""
        row, (text, _) = self.rows[index]
        if cause := next((cause for completion in completions if (cause := cause_of(getattr(completion, "turns", None)))), None):
            self._lost(index, [f"its environment failed: {cause}"])
            return
        token_ids = [generated(completion).tolist() for completion in completions]
        texts, step = [self.decoder.decode(ids) for ids in token_ids], version * self.config.schedule.steps_per_version
        messages = row.messages if self.config.environment.source is None else self.renderer.messages(row)
        arguments: dict[str, Any] = {"messages": messages, "columns": row.columns, "completion_ids": token_ids, "step": step}
        self.pool.submit(index, payload(texts, prompt=text, episodes=episodes_of(completions), **arguments))

    def measures(self, greedy: Mapping[int, Score], sampled: Mapping[int, Score]) -> dict[str, float]:
        """The `summary` over all held-out prompts; if they have several sources also that of each, as `SOURCE/NAME`.

        `greedy` and `sampled` map a prompt's index to its score; a prompt that is missing has no reward, because a function failed.
        """
        config = self.config
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
        """Yield (index, completions in order) of each prompt once all its completions have ended; ends early on a stop request."""
        left, held = deque(requests), dict[int, list[Completion]]()
        while (left or not self.engine.idle) and not self.stopped():
            while left and self.engine.has_room:
                self.engine.submit(left.popleft())
            for completion in self.engine.step():
                index = completion.group - FIRST_GROUP
                held.setdefault(index, []).append(completion)
                if len(held[index]) == len(requests[index].samples):
                    yield index, sorted(held.pop(index), key=lambda completion: completion.sample)
            self.meanwhile()

    def _scored(self) -> dict[int, Score]:
        """Prompt -> scores, without prompts whose reward function failed. Raises `BrokenReward`."""
        scores: dict[int, Score] = {}
        while self.pool.pending:
            for result in self.pool.poll(1.0):
                if isinstance(result, Failed):
                    self._lost(result.key, [result.reason])
                    self.faults.failed(result.reason)
                else:
                    scores[result.key] = score = Score.of(result.result)
                    self.faults.partly(score.broken.values(), len(score.rewards))
                    self._lost(result.key, score.broken.values())
                self.faults.check()
            self.meanwhile()
        return scores

    def _lost(self, index: int, reasons: Iterable[str]) -> None:
        """Log reasons why completions of a prompt have no reward, unless one of the same cause was logged before."""
        for reason in self.missing.add(index, reasons):
            self.notify(f"no reward for a completion of held-out prompt {index}: {reason}; others of this cause are only counted")
