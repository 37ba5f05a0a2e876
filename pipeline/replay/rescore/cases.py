"""Recorded groups as the reward functions need them: prompt, messages, columns, and the text of every completion.

The rule: texts are those that were judged; where a group was never judged they are decoded from its recorded token ids, by the run's
tokenizer or not at all.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.infra.log import Log
from penstock.pipeline.envs.group_outcome import group_of
from penstock.pipeline.envs.tokenization import Decoder, digests
from penstock.pipeline.observe.explain.group_records import Place, Run
from penstock.pipeline.runtime.topic_reader import scan
from penstock.topics import groups, prompts, rollouts
from penstock.topics.groups import Group
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A group that can be judged."""

    group: Group
    """As recorded; of one without an outcome everything but rewards."""
    partition: int
    before: str | None
    """scored, filtered, failed; None where it was never judged."""
    messages: str | None
    completions: tuple[str, ...]
    samples: tuple[Rollout, ...]
    """In order of their numbers, as the completions are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A group that cannot be judged."""

    number: int
    partition: int
    before: str | None
    why: str
    group: Group | None
    """Its recorded outcome, where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt and where it stands."""

    prompt: Prompt
    partition: int


def cases(log: Log, found: Run, *, model: str | None = None) -> Iterator[Case | Left]:
    """Every admitted group once: those with an outcome in the order of the log, then those that were never judged, by number.

    `model` is the directory with the run's tokenizer, if it is not where the configuration says. Raises `LogError`.
    """
    asked = read_prompts(log, found)
    unjudged: dict[int, Group | None] = dict.fromkeys(asked)
    seen: set[int] = set()
    for partition, group in outcomes(log, found):
        if group.group in seen:
            continue
        seen.add(group.group)
        if group.group not in asked:
            yield Left(number=group.group, partition=partition, before=group.outcome, why="its prompt cannot be read", group=group)
            continue
        if not group.samples:
            unjudged[group.group] = group
            continue
        del unjudged[group.group]
        yield Case(
            group=group,
            partition=partition,
            before=group.outcome,
            messages=asked[group.group].prompt.messages,
            completions=tuple(sample.completion for sample in group.samples),
            samples=tuple(sample.rollout for sample in group.samples),
        )
    yield from _from_tokens(log, found, asked, unjudged, model=model)


def read_prompts(log: Log, found: Run) -> dict[int, Asked]:
    """Group -> its prompt, the first one in the log; those nobody can read are passed over."""
    asked: dict[int, Asked] = {}
    killers = found.killers
    for record in scan(log, f"{found.run}.prompts"):
        try:
            if prompts.check(record, run=found.run).group not in asked and _place(record) not in killers:
                prompt = prompts.read(record, run=found.run)[1]
                asked[prompt.group] = Asked(prompt=prompt, partition=record.partition)
        except Unusable:
            continue
    return asked


def outcomes(log: Log, found: Run) -> Iterator[tuple[int, Group]]:
    """Partition and group of every whole outcome that can be read."""
    killers, parts = found.killers, groups.Parts()
    for record in scan(log, f"{found.run}.groups"):
        try:
            whole = parts.add(record, groups.check(record, run=found.run))
            if whole is not None and killers.isdisjoint(map(_place, whole)):
                yield record.partition, groups.read(whole, run=found.run)[1]
        except Unusable:
            continue


def _from_tokens(
    log: Log, found: Run, asked: Mapping[int, Asked], unjudged: Mapping[int, Group | None], *, model: str | None
) -> Iterator[Case | Left]:
    """Groups that no reward function has judged, as far as their samples are all there."""
    decoder = decoder_of(found, model) if unjudged else ""
    by_group: dict[int, dict[int, Rollout]] = {}
    for rollout in drawn(log, found, set(unjudged)):
        mine = by_group.setdefault(rollout.group, {})
        if len(mine) < asked[rollout.group].prompt.samples_per_prompt:
            mine.setdefault(rollout.sample, rollout)
    for number, group in sorted(unjudged.items()):
        prompt, partition = asked[number].prompt, asked[number].partition
        samples = tuple(by_group.get(number, {})[sample] for sample in sorted(by_group.get(number, {})))
        before = group.outcome if group else None
        if (problem := _unfit(prompt, before, samples)) is not None:
            yield Left(number=number, partition=partition, before=before, why=problem, group=group)
        elif isinstance(decoder, str):
            yield Left(number=number, partition=partition, before=before, why=decoder, group=group)
        else:
            yield Case(
                group=group or _blank(prompt, found),
                partition=partition,
                before=before,
                messages=prompt.messages,
                completions=tuple(decoder.decode(sample.token_ids) for sample in samples),
                samples=samples,
            )


def _unfit(prompt: Prompt, before: str | None, samples: tuple[Rollout, ...]) -> str | None:
    """Why a group cannot be judged whatever the reward, None where it can."""
    if len(samples) < prompt.samples_per_prompt:
        return f"{len(samples)} of {prompt.samples_per_prompt} samples are in the log"
    if aborted := sum(sample.finish == "abort" for sample in samples):
        return f"{aborted} of {len(samples)} samples were aborted"
    if before == "abandoned":
        return "it was abandoned: its last samples came after its deadline"
    return None


def decoder_of(found: Run, model: str | None) -> Decoder | str:
    """What makes text of the run's token ids, or why there is nothing here that does."""
    path = model or found.config.model.path
    info = json.loads(found.record.info) if found.record else {}
    try:
        here = digests(Path(path), chat_template=found.config.data.chat_template)
        if "digests" in info and here["tokenizer"] != info["digests"]["tokenizer"]:
            return f"its completions are recorded as token ids, and the tokenizer in {path} is not the run's; give --model DIR"
        return Decoder(path)
    except (ValueError, OSError) as error:
        return f"its completions are recorded as token ids, and the run's tokenizer is not here ({error}); give --model DIR"


def drawn(log: Log, found: Run, wanted: set[int]) -> Iterator[Rollout]:
    """Every readable sample of these groups, in the order of the log."""
    if not wanted:
        return
    killers = found.killers
    for record in scan(log, f"{found.run}.rollouts"):
        try:
            headers = rollouts.check(record, run=found.run)
            if headers.group in wanted and _place(record) not in killers:
                yield rollouts.read(record, run=found.run, checked=headers)[1]
        except Unusable:
            continue


def _blank(prompt: Prompt, found: Run) -> Group:
    return group_of(prompt, "failed", reason="never judged", samples=(), reward=found.config.reward, scored_ns=prompt.created_ns)


def _place(record: Record) -> Place:
    return record.topic, record.partition, record.offset
