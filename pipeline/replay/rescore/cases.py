"""Recorded groups as input of reward functions: prompt, messages, columns, and completion texts.

Texts are those of the recorded outcome; without one they are decoded from the token ids by the run's tokenizer.
"""

import json
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from penstock.pipeline.data.tokenization import Decoder, digests
from penstock.pipeline.inspect.recorded_run import RecordedRun
from penstock.pipeline.rewards.group_outcome import group_of
from penstock.topics.groups import Group
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout
from penstock.topics.samples import generated


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A group that can be scored."""

    group: Group
    """The recorded group; without rewards if it has no outcome."""
    partition: int
    before: str | None
    """scored, filtered or failed; None if it was never scored."""
    messages: str | None
    completions: tuple[str, ...]
    samples: tuple[Rollout, ...]
    """By number, as the completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedGroup:
    """A group that cannot be scored, and why."""

    number: int
    partition: int
    before: str | None
    reason: str
    group: Group | None
    """Its recorded outcome, if there is one."""


def cases(recorded: RecordedRun, *, model: str | None = None) -> Iterator[Case | SkippedGroup]:
    """Every admitted group once: those with an outcome in log order, then those without, by number.

    `model` is the directory of the run's tokenizer, the configured one if None. Raises `LogError`.
    """
    prompts = read_prompts(recorded)
    unscored: dict[int, Group | None] = dict.fromkeys(prompts)
    for outcome in recorded.reader.groups():
        if (group := outcome.payload) is None:
            continue
        number, partition = group.group, outcome.record.partition
        if number not in prompts:
            yield SkippedGroup(number=number, partition=partition, before=group.outcome, reason="its prompt cannot be read", group=group)
            continue
        if not group.samples:
            unscored[number] = group
            continue
        del unscored[number]
        yield Case(
            group=group,
            partition=partition,
            before=group.outcome,
            messages=prompts[number][0].messages,
            completions=tuple(sample.completion for sample in group.samples),
            samples=tuple(sample.rollout for sample in group.samples),
        )
    yield from _from_tokens(recorded, prompts, unscored, model=model)


def read_prompts(recorded: RecordedRun, *, numbers: AbstractSet[int] | None = None) -> dict[int, tuple[Prompt, int]]:
    """Group -> its prompt and its partition; unreadable prompts are skipped."""
    reads = recorded.reader.prompts(only=numbers)
    return {read.payload.group: (read.payload, read.record.partition) for read in reads if read.payload is not None}


def _from_tokens(
    recorded: RecordedRun, prompts: Mapping[int, tuple[Prompt, int]], unscored: Mapping[int, Group | None], *, model: str | None
) -> Iterator[Case | SkippedGroup]:
    """Groups without rewards, from the token ids of their samples."""
    if not unscored:
        return
    decoder = decoder_of(recorded, model)
    by_group: dict[int, dict[int, Rollout]] = {}
    for read in recorded.reader.samples(only=unscored.keys()):
        if (rollout := read.payload) is not None:
            group_samples = by_group.setdefault(rollout.group, {})
            if len(group_samples) < prompts[rollout.group][0].samples_per_prompt:
                group_samples[rollout.sample] = rollout
    for number, group in sorted(unscored.items()):
        prompt, partition = prompts[number]
        samples = tuple(rollout for _, rollout in sorted(by_group.pop(number, {}).items()))
        before = group.outcome if group else None
        if (problem := _problem(prompt, before, samples)) is not None:
            yield SkippedGroup(number=number, partition=partition, before=before, reason=problem, group=group)
        elif isinstance(decoder, str):
            yield SkippedGroup(number=number, partition=partition, before=before, reason=decoder, group=group)
        else:
            yield Case(
                group=group or _blank(prompt, recorded),
                partition=partition,
                before=before,
                messages=prompt.messages,
                completions=tuple(decoder.decode(generated(sample)) for sample in samples),
                samples=samples,
            )


def _problem(prompt: Prompt, before: str | None, samples: tuple[Rollout, ...]) -> str | None:
    """Reason why a group cannot be scored; None if it can."""
    if len(samples) < prompt.samples_per_prompt:
        return f"{len(samples)} of {prompt.samples_per_prompt} samples are in the log"
    if aborted := sum(sample.finish == "abort" for sample in samples):
        return f"{aborted} of {len(samples)} samples were aborted"
    if before == "abandoned":
        return "it was abandoned: its last samples arrived after its deadline"
    return None


def decoder_of(recorded: RecordedRun, model: str | None) -> Decoder | str:
    """The run's decoder, or the reason why it is not available."""
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
    return group_of(prompt, "failed", reason="never scored", samples=(), reward=recorded.config.reward, scored_ns=prompt.created_ns)
