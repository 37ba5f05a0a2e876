"""One stage of a recorded run alone, on the run's own groups: `python -m benchmarks.support.bare trainer|engine BOOTSTRAP RUN`.

`trainer` takes optimizer steps on the groups of the recorded steps, `engine` generates completions of their prompts by vLLM's
`LLMEngine`, driven directly, under the run's initial weights. Prints `ready`; each line on stdin is a number of seconds to work, and
answered by a line of JSON: samples or tokens, and the seconds that they took.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable
from contextlib import closing

from benchmarks.speed.vllm import Bare, open_bare
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.learner.train_step import Objective, Step
from penstock.pipeline.replay.recording import PlannedGroups, Recording, prepare
from penstock.pipeline.runtime.factories import make_backend
from penstock.topics.groups import Group


def trainer(recording: Recording, steps: list[list[Group]]) -> Callable[[], int]:
    """A function that takes the next step and returns its samples."""
    config = recording.config
    backend, objective = make_backend(config, steps=recording.planned_steps), Objective.of(config)
    numbers, rounds = itertools.count(), itertools.cycle(steps)

    def turn() -> int:
        step, groups = Step(backend, objective, next(numbers)), next(rounds)
        for group in groups:
            step.add(group)
        step.finish(learner_version=step.number)
        return sum(len(group.samples) for group in groups)

    return turn


def engine(recording: Recording, steps: list[list[Group]]) -> Callable[[], int]:
    """A function that takes a step of the engine and returns the tokens of the completions that ended."""
    config = recording.config
    prompts = [group.prompt_ids.tolist() for groups in steps for group in groups]
    tokens, rows = config.sampling.max_new_tokens, config.rollout.concurrency
    llm = open_bare(
        config.model_directory, concurrency=rows, longest=config.data.max_prompt_tokens + tokens, engine_process=False,
        dtype=config.rollout.dtype,
    )  # fmt: skip
    return Bare(llm, itertools.cycle(prompts), tokens=tokens, rows=rows, stops=True).turn


def main(stage: str, bootstrap: str, run: str) -> None:
    """Load, then work for each line on stdin."""
    with closing(Recording.open(KafkaLog(bootstrap), run)) as recording:
        prepare(recording.config)
        reads = PlannedGroups(recording.log, run)
        steps = [[member.group for member in reads.read(entry.plan) if member.group is not None] for entry in recording.steps]
        turn = {"trainer": trainer, "engine": engine}[stage](recording, steps)
    turn()  # the first one allocates
    print("ready", flush=True)
    for line in sys.stdin:
        done, started = 0, time.monotonic()
        while (seconds := time.monotonic() - started) < float(line):
            done += turn()
        print(json.dumps({"done": done, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
