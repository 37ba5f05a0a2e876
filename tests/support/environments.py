"""Environments for tests, as a user would write them, and what drives them without an engine."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.infra.engines.base import Sampling
from penstock.infra.sandbox.sessions import Sessions
from penstock.pipeline.agents.driver import Episode, Limits
from penstock.pipeline.agents.environments import interfaces
from penstock.pipeline.agents.environments.interfaces import Observation
from penstock.pipeline.agents.environments.sources import CHILD
from penstock.pipeline.agents.record import EpisodeRequest, Generation, Trajectory
from penstock.pipeline.data.conversation.template import PlainTemplate

COUNTING = '''
import os, time

class Counting:
    """Counts to the target in steps of the action; breaks where its row says so, as often as a file says."""

    def __init__(self, file=""):
        self.file = file

    def reset(self, *, seed, breaks="", times=1, **row):
        self.total, self.breaks, self.times = seed % 10, breaks, times
        self.fail("reset")
        return f"{self.total};"

    def step(self, text):
        self.fail("step")
        self.total += len(text)
        reward = None if self.breaks == "rewards" else float(len(text))
        return f"{self.total};", reward, self.total >= 20

    def fail(self, where):
        place, _, how = self.breaks.partition("-")
        if place != where:
            return
        with open(self.file, "a+") as file:
            file.seek(0)
            if len(file.read()) >= self.times:
                return
            file.write("x")
        if how == "raises":
            raise RuntimeError("no such luck")
        if how == "hangs":
            time.sleep(60)
        if how == "dies":
            os._exit(3)
'''

LIMITS = Limits(
    max_turns=6, turn_tokens=8, trajectory_tokens=200, reset_timeout_s=60.0, step_timeout_s=1.0, trajectory_timeout_s=180.0, retries=1,
    replay=True,
)  # fmt: skip


def counting(directory: Path) -> str:
    """The source of an environment that counts; it breaks where a row says `breaks="step-hangs"` and the like."""
    (directory / "counting.py").write_text(COUNTING)
    return f"{directory / 'counting.py'}:Counting?file={directory / 'broken'}"


def characters() -> Any:
    """A template without a chat: one token a character, 2 ends an answer."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{chr(code): code for code in range(32, 127)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    return PlainTemplate(tokenizer, (2,), lambda text: list(tokenizer.encode(text).ids))


def request_for(row: Mapping[str, Any], *, group: int = 0, samples: int = 1) -> EpisodeRequest:
    """A group of trajectories on the prompt `go `."""
    return EpisodeRequest(
        group=group, prompt_ids=np.array([ord(c) for c in "go "], np.int32), samples=tuple(range(samples)), rows=samples, seed=0,
        sampling=Sampling(max_new_tokens=8, stop_ids=(2,)), messages=None, prompt="go ", row=row,
    )  # fmt: skip


class Policy:
    """Says `abc` at every turn, and counts how often it is asked; version 3."""

    def __init__(self, *, length: int = 3, finish: Literal["stop", "length"] = "stop") -> None:
        self.length, self.finish, self.asked = length, finish, list[tuple[int, int]]()

    async def __call__(self, token_ids: Any, *, turn: int, max_new_tokens: int) -> Generation:
        self.asked.append((turn, len(token_ids)))
        ids = np.array([*(ord("a") + n for n in range(self.length)), 2], np.int32)
        return Generation(ids, np.full(len(ids), -0.5, np.float32), np.full(len(ids), 3, np.int32), self.finish)


def play(
    source: str, rows: list[Mapping[str, Any]], *, draw: Any, processes: int = 1, template: Any = None, **limits: Any
) -> tuple[list[Trajectory], list[str]]:
    """The trajectories of these rows, driven side by side; and what was said of losses."""
    said: list[str] = []

    async def all_of_them() -> list[Trajectory]:
        sessions = Sessions(CHILD, size=processes, init={"source": source})
        try:
            episodes = [
                Episode(
                    request=request_for(row, group=group), sample=0, seed=4, template=template or characters(), sessions=sessions,
                    limits=replace(LIMITS, **limits), generate=draw, on_loss=said.append,
                )
                for group, row in enumerate(rows)
            ]  # fmt: skip
            return list(await asyncio.gather(*(episode.run() for episode in episodes)))
        finally:
            await sessions.close()

    return asyncio.run(all_of_them()), said


def walked(episode: interfaces.Episode, *words: object, seed: int = 7, **row: Any) -> list[Observation]:
    """What an episode says to its beginning and to these words of the policy."""

    async def walk() -> list[Observation]:
        try:
            said = [await episode.reset(seed=seed, row=row)]
            return said + [await episode.step({"role": "assistant", "content": str(word)}) for word in words]
        finally:
            await episode.close()

    return asyncio.run(walk())


def texts(said: Iterable[Observation]) -> list[str]:
    """The last message of each."""
    return [str(one.messages[-1]["content"]) for one in said]
