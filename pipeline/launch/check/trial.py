"""Generates samples and scores them before a run exists, in child processes that may load a model, hang or crash.

A fault of the model, the engine or a reward ends in one line; output of the libraries is discarded.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.infra.errors import PenstockError
from penstock.infra.sandbox.pool import ChildPool, Failed
from penstock.infra.sandbox.rules import ChildRules
from penstock.infra.sandbox.spawn import ChildError
from penstock.pipeline.config.load import Config, from_json, to_json
from penstock.pipeline.data import Row
from penstock.pipeline.data.configured import open_data
from penstock.pipeline.data.references import InvalidReference, accepted
from penstock.pipeline.data.tokenization import Decoder, Renderer
from penstock.pipeline.launch.check.reward_signal import refuse_reversed, swapped
from penstock.pipeline.launch.check.rows import PER_SOURCE
from penstock.pipeline.rewards import child as reward_child
from penstock.pipeline.rewards import functions as rewards
from penstock.topics.samples import cause_of, generated

CHILD = "penstock.pipeline.launch.check.trial:child"
COPIES = 2
"""Completions of a call: a reward that returns one number for any number of completions would pass with one."""
PROMPTS, SAMPLES = 8, 8
"""Largest numbers of prompts and of samples of each: a step's groups, so far as these reach."""
GENERATE_LIMIT_S = 1_800.0
_ENGINE = ChildRules(section="environment", memory_gb=math.inf, file_gb=math.inf, isolate="none")
"""Rules for the process that generates: an engine, which starts the run's environments by their own rules."""


def rows_of(config: Config) -> list[Row]:
    """The first rows of each source: together as many as a step has prompts; two of each with an environment, whose episodes are dear."""
    data, groups = open_data(config), min(PROMPTS, config.schedule.prompts_per_step)
    each = PER_SOURCE if config.environment.source is not None else max(PER_SOURCE, groups // len(data.sources))
    return [data.row(number, index) for number, source in enumerate(data.sources.values()) for index in range(min(each, len(source)))]


def _samples_of(config: Config) -> int:
    return min(SAMPLES, config.schedule.samples_per_prompt) if config.environment.source is None else 1


def generate(config: Config, environment: Mapping[str, str]) -> dict[str, Any]:
    """Up to `SAMPLES` samples of each of the first rows by the run's engine, generated concurrently in a process with these variables.

    Returns `samples`: row, prompt, completion, token_ids and finish of each; `load_s` and `generate_s`. Raises `PenstockError`.
    """
    with _children(CHILD, {"config": to_json(config), "environment": dict(environment)}, timeout_s=GENERATE_LIMIT_S, rules=_ENGINE) as pool:
        return dict(_result(pool, {}, what="generating"))


def score(
    config: Config, rows: Sequence[Row], completions: Sequence[Sequence[str]], token_ids: Sequence[Sequence[Any]], episodes: Sequence[Any]
) -> list[rewards.Score]:
    """The score of some completions of each of the rows, by the run's reward functions. Raises `PenstockError`."""
    reward, renderer = config.reward, Renderer.of(config)
    init = reward_child.spec(
        reward.functions, reward.weights, by_source=config.data.rewards, timeout_s=reward.timeout_s,
        max_steps=config.run.steps or 1, max_completion_length=config.max_completion_tokens,
    )  # fmt: skip
    limit_s = max(map(len, [*completions, range(COPIES)])) * reward.timeout_s
    with _children(reward_child.CHILD, init, timeout_s=limit_s, rules=reward.rules()) as pool:
        return [
            rewards.Score.of(
                _result(
                    pool,
                    reward_child.payload(
                        _copied(texts),
                        prompt=renderer.render(row)[0],
                        messages=row.messages if played is None else renderer.messages(row),
                        columns=row.columns,
                        completion_ids=_copied(ids),
                        episodes=played and _copied(played),
                    ),
                    what=f"the reward of {row.origin}",
                )
            )
            for row, texts, ids, played in zip(rows, completions, token_ids, episodes, strict=True)
        ]


def _copied(values: Sequence[Any]) -> list[Any]:
    return list(values) * (COPIES if len(values) == 1 else 1)


def score_answers(config: Config, rows: Sequence[Row]) -> list[rewards.Score]:
    """Like `score`, for the rows' own answers, or their prompts if they have none. Raises `PenstockError`, also for a reversed reward."""
    decoder, texts = Decoder(config.model.path), [_own_answer(row) for row in rows]
    pairs = swapped(rows, texts)
    tried, completions = [*rows, *(rows[own] for own, _ in pairs)], [*texts, *(texts[other] for _, other in pairs)]
    scores = score(config, tried, [[text] for text in completions], [[decoder.encode(text)] for text in completions], [None] * len(tried))
    if rows and not any(score.scored for score in scores[: len(rows)]):
        raise PenstockError(f"the reward of {rows[0].origin}: every reward function returned None, as for all rows tried")
    right, wrong = [scores[own].rewards[0] for own, _ in pairs], [score.rewards[0] for score in scores[len(rows) :]]
    refuse_reversed(tried[len(rows) :], right, wrong)
    return scores[: len(rows)]


def _own_answer(row: Row) -> str:
    """The first accepted answer of a row; the answer's own text if only a user function can score it."""
    answer = row.columns.get("answer")
    try:
        return accepted(answer)[0]
    except InvalidReference:
        return str(answer or row.prompt or row.origin)


def child(init: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Handler of a child process with the engine loaded: generates what `generate` returns."""
    os.environ.update(init["environment"])
    if not os.environ.get("PENSTOCK_DEBUG"):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
    from penstock.pipeline.runtime.factories import make_engine

    config, started = from_json(init["config"]), time.monotonic()
    engine = make_engine(config)
    load_s = time.monotonic() - started
    return lambda _: {"load_s": load_s, **_generate(config, engine)}


def _generate(config: Config, engine: Any) -> dict[str, Any]:
    from penstock.infra.engines.base import GroupRequest, Sampling
    from penstock.pipeline.data.tokenization import digests
    from penstock.pipeline.runtime.sampling import episode_request

    renderer, decoder, chosen = Renderer.of(config), Decoder(config.model.path), config.sampling
    stop_ids = tuple(digests(config.model.path, chat_template=config.data.chat_template)["stop_ids"])
    how = Sampling(
        temperature=chosen.temperature, top_p=chosen.top_p, top_k=chosen.top_k, max_new_tokens=chosen.max_new_tokens, stop_ids=stop_ids,
        stop=tuple(chosen.stop),
    )  # fmt: skip
    numbers = tuple(range(_samples_of(config)))
    prompts, started = [renderer.render(row) for row in rows_of(config)], time.monotonic()
    for group, ((text, ids), row) in enumerate(zip(prompts, rows_of(config), strict=True)):
        request = GroupRequest(group=group, prompt_ids=ids, samples=numbers, rows=len(numbers), seed=config.run.seed, sampling=how)
        messages = json.dumps(renderer.messages(row)) if renderer.messages(row) else None
        played = config.environment.source is not None
        engine.submit(episode_request(request, text=text, messages=messages, columns=row.columns) if played else request)
    ended = {}
    while not engine.idle:
        ended.update({(completion.group, completion.sample): completion for completion in engine.step()})
    samples = [
        {
            "row": group,
            "prompt": prompts[group][0],
            "completion": decoder.decode(generated(completion)),
            "token_ids": generated(completion).tolist(),
            "finish": completion.finish,
            "episode": next(iter(rewards.episodes_of([completion]) or ()), None),
            "cause": cause_of(getattr(completion, "turns", None)),
        }
        for (group, _), completion in sorted(ended.items())
    ]
    engine.close()
    return {"samples": samples, "generate_s": time.monotonic() - started}


@contextmanager
def _children(target: str, init: Mapping[str, Any], *, timeout_s: float, rules: ChildRules) -> Iterator[ChildPool[int]]:
    with ChildPool[int](
        target, size=1, init=dict(init), timeout_s=timeout_s, retries=0, start_timeout_s=GENERATE_LIMIT_S, rules=rules
    ) as pool:
        yield pool


def _result(pool: ChildPool[int], payload: Mapping[str, Any], *, what: str) -> Any:
    pool.submit(0, dict(payload))
    try:
        while True:
            for ended in pool.poll(1.0):
                if isinstance(ended, Failed):
                    raise PenstockError(f"{what}: {ended.reason}")
                return ended.result
    except ChildError as error:
        raise PenstockError(str(error).partition(": ")[2] or str(error)) from error
