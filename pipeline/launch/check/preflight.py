"""Everything that can fail later, tried before a run exists: `penstock check`, and before `create` and `run`.

The first problem is raised as one line with its fix; earlier findings have been reported. Samples are generated and scored in child
processes, which may load a model, hang or crash; output of the libraries is discarded.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from penstock.infra.backends.hardware import driver_problem, driver_version, library_cuda, torch_cuda, visible_gpus
from penstock.infra.errors import PenstockError
from penstock.infra.sandbox.spawn import ChildError, ChildRules
from penstock.infra.sandbox.timed_pool import ChildPool, Done, Failed
from penstock.infra.tensors.parameter_count import parameters
from penstock.pipeline.algorithms.advantages import LOW, RewardScale, zero_variance
from penstock.pipeline.config.load import Config, ConfigError, from_json, to_json
from penstock.pipeline.data.read_files import Row
from penstock.pipeline.data.references import InvalidReference, accepted
from penstock.pipeline.data.run_data import open_data
from penstock.pipeline.data.tokenization import Decoder, Renderer, digests
from penstock.pipeline.inspect.report.figures import one_line
from penstock.pipeline.inspect.report.formats import duration
from penstock.pipeline.launch.check.fit import memory_line
from penstock.pipeline.launch.check.rows import MOST_KINDS, PER_SOURCE
from penstock.pipeline.launch.check.sizes import arithmetic, check_disk
from penstock.pipeline.launch.create import check_inputs
from penstock.pipeline.launch.placement import place
from penstock.pipeline.rewards import functions as rewards
from penstock.pipeline.rewards import scoring as reward_child
from penstock.pipeline.runtime.factories import check_engine, make_engine
from penstock.topics.rollouts import cause_of, generated

SHOWN_GROUPS = 2
"""Groups of which a sample is shown."""
SHOWN = 400
"""Characters of a prompt or a completion."""
ENOUGH = 16
"""Samples from which equal rewards are no accident: a policy that is right in a fifth of them has no reward in 16 with 3 %."""
CHILD = "penstock.pipeline.launch.check.preflight:child"
TRAINED = 8
"""Samples of the micro-batch that training is timed with."""
COPIES = 2
"""Completions of a call: a reward that returns one number for any number of completions would pass with one."""
PROMPTS, SAMPLES = 8, 8
"""Largest numbers of prompts and of samples of each: a step's groups, so far as these reach."""
FAILING_ROWS = 2
"""A reward that has failed for so many first rows, and fails for the next, fails for all."""
TRY_S = 10.0
"""A slow reward is not tried on more rows than necessary after this time."""
GENERATE_LIMIT_S = 1_800.0
_ENGINE = ChildRules(section="environment", memory_gb=math.inf, file_gb=math.inf, isolate="none")
"""Rules for the process that generates: an engine, which starts the run's environments by their own rules."""

Tell = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Checked:
    """Findings for the user by name, the run's info for `create`, and the generated samples."""

    lines: dict[str, str]
    info: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]] = field(default_factory=list)


def check(config: Config, *, tell: Tell, samples: bool, here: bool = True, notify: Callable[[str], None] = lambda _: None) -> Checked:
    """Try everything that can fail in a run with this configuration; return the findings, the run's info and the samples.

    `tell` receives each finding as (name, text) at once; with `samples` the engine generates and the reward scores those of a step. `here`
    is false if the workers run on other machines: this one need not have their GPUs, engine and disk.
    Raises `ConfigError`: a setting that this machine, the model or the data cannot do. Raises `PenstockError`: data, model, reward, engine,
    disk or a GPU's memory cannot be used.
    """
    lines: dict[str, str] = {}

    def note(name: str, text: str) -> None:
        lines[name] = text
        tell(name, text)

    if here:
        check_devices(config)
    if here and config.model_directory.is_dir():
        check_engine(config)
    info, kinds, spread = check_inputs(config, notify=notify)
    for name, text in arithmetic(config, rows=info["rows"]):
        note(name, text)
    count = parameters(config.model_directory)
    note("model", config.model.path + (f", {count / 1e6:,.1f} million parameters" if count else ""))
    if here:
        check_disk(config, info, note)
    note("memory", memory_line(config))
    # Only an environment knows what an episode is worth.
    earned = try_rewards(config, kinds, spread, note) if config.environment.source is None else []
    generated = _samples(config, info, note, notify) if samples else []
    sampled = [sample["reward"] for sample in generated if sample["reward"] is not None]
    if len(generated) >= ENOUGH and not sampled:
        raise PenstockError(
            f"every reward function returned None for all {len(generated)} sampled completions: there is nothing to train on"
        )
    scale = RewardScale.of(config.reward.functions, config.reward.weights, by_source=config.data.rewards)
    scale.see([*sampled, *earned])
    if problem := equal_and_low(sampled, scale):
        note("warning", problem)
    return Checked(lines, info, generated)


def important(notify: Callable[[str], None]) -> Tell:
    """Return a `tell` that passes only warnings and the use of the disk to `notify`, before a run starts."""
    return lambda name, text: notify(f"{name}: {text}") if name in ("warning", "disk") else None


def check_devices(config: Config) -> None:
    """Raise `ConfigError` for GPUs that this machine does not have, or whose driver is too old for torch."""
    gpus = visible_gpus()
    place(config, gpus)
    driver, cuda = (driver_version(), torch_cuda()) if gpus else (None, None)
    if driver and cuda and (problem := driver_problem(cuda, driver, library_cuda())):
        raise ConfigError(problem)
    for section, device in (("trainer", config.trainer.device), ("rollout", config.rollout.device)):
        if device.startswith("cuda") and not gpus:
            raise ConfigError(f'{section}.device: {device!r}, but no GPU is visible on this machine; set it to "auto" or "cpu"')


def _samples(config: Config, info: Mapping[str, Any], note: Tell, notify: Callable[[str], None]) -> list[dict[str, Any]]:
    """Generate and score the samples of a step, pass the findings and the expected time of the run to `note`, and return the samples.

    Raises `PenstockError` if they cannot be generated or scored.
    """
    notify(f"loading the model into the {config.rollout.engine} engine, to generate the samples of a step, at most 64")
    environment = place(config, visible_gpus()).environment("rollout-0")
    trial_result = generate(config, {"OMP_NUM_THREADS": str(config.rollout.threads), **environment})
    samples: list[dict[str, Any]] = trial_result["samples"]
    if cause := next((sample["cause"] for sample in samples if sample["cause"]), None):
        raise PenstockError(f"{config.environment.source}: {cause}")
    rows = rows_of(config)
    groups = [[sample for sample in samples if sample["row"] == number] for number in range(len(rows))]
    texts, ids, played = ([[sample[name] for sample in group] for group in groups] for name in ("completion", "token_ids", "episode"))
    episodes = (None if None in each else each for each in played)
    scores = score(config, zip(rows, texts, ids, episodes, strict=True))
    for group, row, scored in zip(groups, rows, scores, strict=True):
        for sample, reward in zip(group, scored.rewards, strict=False):  # a single sample was scored twice
            sample["reward"], sample["answer"] = reward, row.columns.get("answer")
    for number, group in enumerate(groups[:SHOWN_GROUPS], 1):
        note(f"sample {number}", _shown(group[0]))
    note("rewards", f"of {len(samples)} samples of {len(rows)} prompts: {_span([sample['reward'] for sample in samples])}")
    if failed := _failures(scores):
        note("warning", failed)
    tokens = sum(len(sample["token_ids"]) for sample in samples)
    trained = info["steps"] * config.schedule.prompts_per_step * config.schedule.samples_per_prompt
    generating_s = trained * trial_result["generate_s"] / len(samples) / config.rollout.workers
    took = f"{tokens} tokens in {trial_result['generate_s']:.1f} s, {len(samples)} samples concurrently"
    note("generation", f"the model loaded in {trial_result['load_s']:.1f} s; {took}")
    longest = f"{duration(generating_s)} of generation"
    if (rates := trial_result["training_s"]) is None:
        note("time", f"at most {longest} for {trained:,} samples at that rate; training overlaps or adds to it")
        return samples
    training_s = rates[0] * trained + rates[1] * info["steps"]
    parts = f"{longest} and {duration(training_s)} of training for {trained:,} samples, more or less overlapping"
    note("time", f"{duration(max(generating_s, training_s))} to {duration(generating_s + training_s)}: {parts}")
    return samples


def _shown(sample: Mapping[str, Any]) -> str:
    """A sample as text: reward and length, prompt, reference and completion, each on a line."""
    prompt, completion = (one_line(sample[name], SHOWN) for name in ("prompt", "completion"))
    reference = "" if sample["answer"] is None else f"\n  answer      {one_line(str(sample['answer']), SHOWN)}"
    cut_off = ", truncated at sampling.max_new_tokens" if sample["finish"] == "length" else ""
    earned = f"reward {_number(sample['reward'])}, {len(sample['token_ids'])} tokens{cut_off}"
    return f"{earned}\n  prompt      {prompt}{reference}\n  completion  {completion}"


def _number(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"


def swapped(rows: Sequence[Row], references: Sequence[str]) -> list[tuple[int, int]]:
    """[(a, b), (b, a)]: indices of two rows with different references, to score each with that of the other; empty if there are none.

    A reward that ignores the row cannot give both rows less for their own answer than for the other one.
    """
    numbers = [number for number, row in enumerate(rows) if row.columns.get("answer") is not None]
    pairs = [(numbers[0], number) for number in numbers[1:] if references[number] != references[numbers[0]]] if numbers else []
    return [pairs[0], pairs[0][::-1]] if pairs else []


def refuse_reversed(rows: Sequence[Row], right: Sequence[float | None], wrong: Sequence[float | None]) -> None:
    """Raise `PenstockError` if in each of these rows the right reference earns less than that of another row."""
    pairs = zip(right, wrong, strict=True)
    if rows and all(own is not None and other is not None and own < other for own, other in pairs):
        raise PenstockError(
            f"reward.functions: a wrong answer earns more than the right one: for {rows[0].origin} the right answer has the reward "
            f"{right[0]:g}, that of {rows[1].origin} has {wrong[0]:g}; correct the reward's sign, or the answers (data.answer_field)"
        )


def unrewarded(right: Sequence[float | None], wrong: Sequence[float | None]) -> str | None:
    """One line if right references earn no reward above 0 and none above that of another row; None otherwise."""
    earned, others = ([reward for reward in rewards if reward is not None] for rewards in (right, wrong))
    if not earned or max(earned) > 0.0 or (others and max(earned) > min(others)):
        return None
    tried = "the first row" if len(earned) == 1 else f"all {len(earned)} rows tried"
    return f"the right answer earns at most {max(earned):g} for {tried}: correct the reward function, or the answers (data.answer_field)"


def equal_and_low(rewards: Sequence[float], scale: RewardScale) -> str | None:
    """One line if all sampled completions have the same reward, in the lower half of the range; None otherwise.

    Raises `PenstockError` with it for `ENOUGH` samples.
    """
    position = scale.position(rewards[0]) if len(rewards) > 1 and zero_variance(rewards) else None
    if position is None or position >= LOW:
        return None
    problem = (
        f"all {len(rewards)} sampled completions have the reward {rewards[0]:g}, in a range of {scale.low:g} to {scale.high:g}: equal "
        f"rewards give no gradient; {scale.advice(rewards[0])}, or a larger sampling.max_new_tokens if completions are truncated"
    )
    if len(rewards) >= ENOUGH:
        raise PenstockError(problem)
    return problem


def rows_of(config: Config) -> list[Row]:
    """The rows to generate samples of: the first of each source, in all about a step's prompts; with an environment two per source."""
    data, groups = open_data(config), min(PROMPTS, config.schedule.prompts_per_step)
    each = PER_SOURCE if config.environment.source is not None else max(PER_SOURCE, groups // len(data.sources))
    return [data.row(number, index) for number, source in enumerate(data.sources.values()) for index in range(min(each, len(source)))]


def generate(config: Config, environment: Mapping[str, str]) -> dict[str, Any]:
    """Generate up to `SAMPLES` samples of each of the first rows with the run's engine, in a child process with this environment.

    Returns `samples`: row, prompt, completion, token_ids and finish of each; `load_s`, `generate_s`, `training_s`. Raises `PenstockError`.
    """
    init, limit_s = {"config": to_json(config), "environment": dict(environment)}, GENERATE_LIMIT_S
    child = ChildPool[int](CHILD, size=1, init=init, timeout_s=limit_s, retries=0, start_timeout_s=limit_s, rules=_ENGINE)
    with closing(child) as pool:
        ended = _ended(pool, {})
    if isinstance(ended, Failed):
        raise PenstockError(f"generating: {ended.reason}")
    return dict(ended.result)


Tried = tuple[Row, Sequence[str], Sequence[Any], Sequence[Any] | None]
"""A row, completions of its prompt, the token ids of each, and their episodes, if any."""


def score(config: Config, groups: Iterable[Tried], *, at_least: int | None = None) -> list[rewards.Score]:
    """Score groups of completions as the run's scorer does. With `at_least`, groups after that many are left out once `TRY_S` are over.

    Raises `PenstockError` if a reward fails, except for an empty completion, and with `reward.on_error = "drop"` only if it fails for all
    of the first groups.
    """
    reward, renderer, scores, started = config.reward, Renderer.of(config), list[rewards.Score](), time.monotonic()
    settings: dict[str, Any] = {"max_completion_length": config.max_completion_tokens, "by_source": config.data.rewards}
    with closing(reward_child.reward_pool(reward, max_steps=config.run.steps or 1, **settings)) as pool:
        for row, completions, ids, played in groups:
            if at_least is not None and len(scores) >= at_least and time.monotonic() - started > TRY_S:
                break
            copies = COPIES if len(completions) == 1 else 1
            texts = list(completions) * copies
            payload = reward_child.payload(
                texts, prompt=renderer.render(row)[0], columns=row.columns, completion_ids=list(ids) * copies,
                messages=row.messages if played is None else renderer.messages(row), episodes=played and list(played) * copies,
            )  # fmt: skip
            ended = _ended(pool, payload)
            scored = (
                rewards.Score(rewards=(None,) * len(texts), components=()) if isinstance(ended, Failed) else rewards.Score.of(ended.result)
            )
            broken = dict.fromkeys(range(len(texts)), ended.reason) if isinstance(ended, Failed) else scored.broken
            where = {n: f"the reward of {row.origin}{'' if texts[n] else ' for an empty completion'}" for n in broken}
            strict = reward.on_error == "stop" or (len(scores) == FAILING_ROWS and all(0 in score.broken for score in scores))
            scores.append(replace(scored, broken={n: f"{where[n]}: {reason}" for n, reason in broken.items()}))
            if strict and (failed := [n for n in broken if texts[n]]):
                raise PenstockError(scores[-1].broken[failed[0]])
    return scores


def try_rewards(config: Config, kinds: Sequence[Row], spread: Sequence[Row], note: Tell) -> list[float]:
    """Score each row's reference, or its prompt if it has none, and an empty completion; two rows also with the reference of the other.

    Passes the findings to `note`, with the rewards of `kinds` one by one, and returns all rewards. Raises `PenstockError` if a reward
    fails, if no reference has one, or if wrong references earn more.
    """
    rows = [*kinds, *spread]
    decoder, texts = Decoder(config.model.path), [_own_reference(row) for row in rows]
    pairs = swapped(rows, texts)
    tried = [*((rows[own], texts[other]) for own, other in pairs), *zip(rows, texts, strict=True)]
    groups: Iterable[Tried] = ((row, [text, ""], [decoder.encode(text) or [0], [0]], None) for row, text in tried)
    scores = score(config, groups, at_least=len(pairs) + max([MOST_KINDS, *(own + 1 for own, _ in pairs)]))
    if failed := _failures(scores):
        note("warning", failed)
    wrong, scores = [score.rewards[0] for score in scores[: len(pairs)]], scores[len(pairs) :]
    refuse_reversed([rows[own] for own, _ in pairs], [scores[own].rewards[0] for own, _ in pairs], wrong)
    right = [score.rewards[0] for row, score in zip(rows, scores, strict=False) if row.columns.get("answer") is not None]
    own = [score.rewards[0] for score in scores]
    first = own[: len(kinds)]
    of = "the reference answers of {} rows" if right else "the prompts of {} rows, which have no reference answers"
    all_rows = f"of {of.format(len(own))}: {_span(own)}; " if len(own) > len(first) else ""
    note("reward", f"{all_rows}of {of.format(len(first))}: {', '.join(map(_number, first))}")
    if all(reward is None for reward in own):
        problem = f"no reward for {rows[0].origin}: every reward function returned None for {of.format(len(own))}"
        if right and not any(score.scored for score in scores):
            raise PenstockError(problem)
        note("warning", f"{problem}; such samples are not trained")
    if low := unrewarded(right, wrong):
        note("warning", low)
    return [reward for score in scores for reward in score.scored]


def _failures(scores: Sequence[rewards.Score]) -> str | None:
    """One line about failed rewards with the first reason; None if none failed."""
    reasons = [reason for score in scores for reason in score.broken.values()]
    tried = sum(len(score.rewards) for score in scores)
    return f"{len(reasons)} of {tried} completions have no reward and would not be trained: {reasons[0]}" if reasons else None


def _span(rewards: Sequence[float | None]) -> str:
    """Format the range and mean of rewards, and how many are missing."""
    earned = [reward for reward in rewards if reward is not None]
    if not earned:
        return "none"
    missing = f", {len(rewards) - len(earned)} without a reward" if len(earned) < len(rewards) else ""
    low, high = min(earned), max(earned)
    return (f"all {low:g}" if low == high else f"{low:g} to {high:g}, mean {fmean(earned):.3g}") + missing


def _own_reference(row: Row) -> str:
    """The first accepted text of a row's reference; its plain text if only a user function can score it."""
    reference = row.columns.get("answer")
    try:
        return accepted(reference)[0]
    except InvalidReference:
        return str(reference or row.prompt or row.origin)


def child(init: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Handler of a child process with the engine loaded: generates what `generate` returns."""
    os.environ.update(init["environment"])
    if not os.environ.get("PENSTOCK_DEBUG"):
        nothing = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nothing, stream)
    config, started = from_json(init["config"]), time.monotonic()
    engine = make_engine(config)
    load_s = time.monotonic() - started
    return lambda _: {"load_s": load_s, **_generate(config, engine)}


def _training_s(config: Config, samples: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Seconds of a sample's backward pass and of an optimizer step; None for a trainer on GPUs or in several processes."""
    import numpy as np

    from penstock.pipeline.algorithms.losses import batch_loss
    from penstock.pipeline.learner.micro_batches import TokenSequence, pack
    from penstock.pipeline.runtime.factories import make_backend

    pairs = [[np.array(sample[name], np.int32) for name in ("prompt_ids", "token_ids")] for sample in samples if sample["token_ids"]]
    single = config.trainer.backend == "torch" and config.trainer.processes == 1 and config.environment.source is None
    if not pairs or not single or visible_gpus() or parameters(config.model_directory) is None:
        return None
    backend, times = make_backend(config, steps=1), [0.0]
    common: dict[str, Any] = {"group": 0, "advantage": 1.0}
    batch = pack([
        TokenSequence(sample=number, prompt_ids=prompt, completion_ids=ids, behaviour_logprobs=np.zeros(len(ids), np.float32),
                      loss_mask=np.ones(len(ids), np.bool_), **common) for number, (prompt, ids) in enumerate(pairs[:TRAINED])
    ])  # fmt: skip
    for _ in range(2):  # the first pass is slower than all others
        times = [time.monotonic()]
        backend.backward(batch, lambda logprobs: batch_loss(logprobs, batch, proximal=logprobs.detach()))
        times.append(time.monotonic())
        backend.step(denominator=float(batch.tokens))
    return (times[1] - times[0]) / len(pairs[:TRAINED]), time.monotonic() - times[1]


def _generate(config: Config, engine: Any) -> dict[str, Any]:
    """Generate the samples that `generate` returns with a loaded engine, which is closed; and time a training step on some of them."""
    from penstock.infra.engines.base import GroupRequest, Sampling
    from penstock.pipeline.runtime.sampling import episode_request

    renderer, decoder, chosen = Renderer.of(config), Decoder(config.model.path), config.sampling
    stop_ids = tuple(digests(config.model.path, chat_template=config.data.chat_template)["stop_ids"])
    how = Sampling(
        temperature=chosen.temperature, top_p=chosen.top_p, top_k=chosen.top_k, max_new_tokens=chosen.max_new_tokens, stop_ids=stop_ids,
        stop=tuple(chosen.stop),
    )  # fmt: skip
    played, rows = config.environment.source is not None, rows_of(config)
    numbers = tuple(range(1 if played else min(SAMPLES, config.schedule.samples_per_prompt)))
    prompts, started = [renderer.render(row) for row in rows], time.monotonic()
    for group, ((text, ids), row) in enumerate(zip(prompts, rows, strict=True)):
        request = GroupRequest(group=group, prompt_ids=ids, samples=numbers, rows=len(numbers), seed=config.run.seed, sampling=how)
        messages = json.dumps(renderer.messages(row)) if renderer.messages(row) else None
        engine.submit(episode_request(request, text=text, messages=messages, columns=row.columns) if played else request)
    ended = {}
    while not engine.idle:
        ended.update({(completion.group, completion.sample): completion for completion in engine.step()})
    samples = [
        {
            "row": group,
            "prompt": prompts[group][0],
            "completion": decoder.decode(generated(completion)),
            "prompt_ids": prompts[group][1].tolist(),
            "token_ids": generated(completion).tolist(),
            "finish": completion.finish,
            "episode": next(iter(rewards.episodes_of([completion]) or ()), None),
            "cause": cause_of(getattr(completion, "turns", None)),
        }
        for (group, _), completion in sorted(ended.items())
    ]
    engine.close()
    generate_s = time.monotonic() - started
    return {"samples": samples, "generate_s": generate_s, "training_s": _training_s(config, samples)}


def _ended(pool: ChildPool[int] | reward_child.RewardPool[int], payload: Mapping[str, Any]) -> Done[int] | Failed[int]:
    """The end of one call of a child process. Raises `PenstockError` if the process fails, and `ConfigError` for a key."""
    pool.submit(0, dict(payload))
    try:
        while True:
            for ended in pool.poll(1.0):
                return ended
    except ChildError as error:
        text = str(error).partition(": ")[2] or str(error)
        raise (ConfigError if text.startswith("reward.functions: ") else PenstockError)(text) from error
