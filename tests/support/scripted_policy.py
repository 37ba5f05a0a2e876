"""A policy for tests of agents: draws the answers of a script, in the order of asking or by the question."""

import asyncio
from collections.abc import Callable

import numpy as np

from penstock.pipeline.agents.record import Generation
from tests.support.chat_families import answer, tokenizer

FAMILY = "qwen2_5"


class ScriptedPolicy:
    """Answers with what `say` makes of the context's text; keeps all contexts and what was drawn after them."""

    def __init__(self, say: Callable[[str], str], *, wait: Callable[[int], "asyncio.Event | None"] = lambda _: None) -> None:
        self.say, self.wait = say, wait
        self.asked: dict[int, tuple[list[int], list[int], int]] = {}
        """Turn -> ids of the context, ids drawn, the limit."""

    async def __call__(self, token_ids, *, turn: int, max_new_tokens: int) -> Generation:
        if event := self.wait(turn):
            await event.wait()
        whole = answer(FAMILY, self.say(tokenizer(FAMILY).decode(token_ids.tolist(), skip_special_tokens=False)))
        ids, finish = (whole, "stop") if len(whole) <= max_new_tokens else (whole[:max_new_tokens], "length")
        self.asked[turn] = (token_ids.tolist(), ids, max_new_tokens)
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 8
        return Generation(np.array(ids, np.int32), logprobs, np.full(len(ids), turn, np.int32), finish)
