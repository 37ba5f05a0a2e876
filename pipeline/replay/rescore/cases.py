"""Recorded groups as the reward functions need them: prompt, messages, columns, and the text of every completion.

The rule: texts are those that were judged; where a group was never judged they are decoded from its recorded token ids, by the run's
tokenizer or not at all.
"""

import json
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from penstock.pipeline.envs.group_outcome import group_of
from penstock.pipeline.envs.tokenization import Decoder, digests
from penstock.pipeline.observe.recorded_run import RecordedRun
from penstock.topics.groups import Group
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout
from penstock.topics.samples import generated


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A group that can be judged."""

    group: Group
    """The recorded group; without rewards if it has no outcome."""
    partition: int
    before: str | None
    """scored, filtered, failed; None where it was never judged."""
    messages: str | None
    completions: tuple[str, ...]
    samples: tuple[Rollout, ...]
    """In order of their numbers, as the completions are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedGroup:
    """A group that cannot be judged."""

    number: int
    partition: int
    before: str | None
    why: str
    group: Group | None
    """Its recorded outcome, where there is one."""


def cases(recorded: RecordedRun, *, model: str | None = None) -> Iterator[Case | SkippedGroup]:
    """Every admitted group once: those with an outcome in the order of the log, then those that were never judged, by number.

    `model` is the directory with the run's tokenizer, if it is not where the configuration says. Raises `LogError`.
    """
    prompts = read_prompts(recorded)
    unjudged: dict[int, Group | None] = dict.fromkeys(prompts)
    for outcome in recorded.reader.groups():
        if (group := outcome.payload) is None:
            continue
        number, partition = group.group, outcome.record.partition
        if number not in prompts:
            yield SkippedGroup(number=number, partition=partition, before=group.outcome, why="its prompt cannot be read", group=group)
            continue
        if not group.samples:
            unjudged[number] = group
            continue
        del unjudged[number]
        yield Case(
            group=group,
            partition=partition,
            before=group.outcome,
            messages=prompts[number][0].messages,
            completions=tuple(sample.completion for sample in group.samples),
            samples=tuple(sample.rollout for sample in group.samples),
        )
    yield from _from_tokens(recorded, prompts, unjudged, model=model)


def read_prompts(recorded: RecordedRun, *, wanted: AbstractSet[int] | None = None) -> dict[int, tuple[Prompt, int]]:
    """Group -> its prompt and the partition of that; those nobody can read are passed over."""
    reads = recorded.reader.prompts(only=wanted)
    return {read.payload.group: (read.payload, read.record.partition) for read in reads if read.payload is not None}


def _from_tokens(
    recorded: RecordedRun, prompts: Mapping[int, tuple[Prompt, int]], unjudged: Mapping[int, Group | None], *, model: str | None
) -> Iterator[Case | SkippedGroup]:
    """Groups that no reward function has judged, as far as their samples are all there."""
    if not unjudged:
        return
    decoder = decoder_of(recorded, model)
    by_group: dict[int, dict[int, Rollout]] = {}
    for read in recorded.reader.samples(only=unjudged.keys()):
        if (rollout := read.payload) is not None:
            drawn = by_group.setdefault(rollout.group, {})
            if len(drawn) < prompts[rollout.group][0].samples_per_prompt:
                drawn[rollout.sample] = rollout
    for number, group in sorted(unjudged.items()):
        prompt, partition = prompts[number]
        samples = tuple(rollout for _, rollout in sorted(by_group.pop(number, {}).items()))
        before = group.outcome if group else None
        if (problem := _unfit(prompt, before, samples)) is not None:
            yield SkippedGroup(number=number, partition=partition, before=before, why=problem, group=group)
        elif isinstance(decoder, str):
            yield SkippedGroup(number=number, partition=partition, before=before, why=decoder, group=group)
        else:
            yield Case(
                group=group or _blank(prompt, recorded),
                partition=partition,
                before=before,
                messages=prompt.messages,
                completions=tuple(decoder.decode(generated(sample)) for sample in samples),
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


def decoder_of(recorded: RecordedRun, model: str | None) -> Decoder | str:
    """What makes text of the run's token ids, or why there is nothing here that does."""
    path = model or recorded.config.model.path
    info = json.loads(recorded.record.info) if recorded.record else {}
    try:
        here = digests(Path(path), chat_template=recorded.config.data.chat_template)
        if "digests" in info and here["tokenizer"] != info["digests"]["tokenizer"]:
            return f"its completions are recorded as token ids, and the tokenizer in {path} is not the run's; give --model DIR"
        return Decoder(path)
    except (ValueError, OSError) as error:
        return f"its completions are recorded as token ids, and the run's tokenizer is not here ({error}); give --model DIR"


def _blank(prompt: Prompt, recorded: RecordedRun) -> Group:
    return group_of(prompt, "failed", reason="never judged", samples=(), reward=recorded.config.reward, scored_ns=prompt.created_ns)
