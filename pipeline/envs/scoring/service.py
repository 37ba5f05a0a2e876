"""A reward function behind an address: what a function would get as keywords is posted as JSON, and its list comes back as `rewards`.

The rule: a service that is away, busy or silent is asked again with growing pauses until the group's time is nearly up; one that refuses is
not. It waits in the asyncio loop: a group under way costs a connection and no thread.
"""

import asyncio
import json
import os
import time
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from penstock.infra.sandbox.rules import REWARD_TOKEN
from penstock.pipeline.config.plugins import PluginError
from penstock.pipeline.envs.scoring.faults import RewardError
from penstock.pipeline.envs.scoring.logged import NAMES

PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0
"""Before it is asked a second time; doubles with each."""
CONNECT_S = 5.0
IN_TIME = 0.95
"""Share of the time limit after which the call fails with its reason, before the child process is killed without one."""
LATER = (408, 425, 429, 502, 503, 504)
"""Statuses that ask to come again."""


class _Later(Exception):
    """The service may answer next time."""

    def __init__(self, reason: str, *, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class RewardService:
    """The service at an address, asked by at most `connections` groups at a time; each has `timeout_s` with all its attempts."""

    def __init__(self, address: str, *, timeout_s: float, connections: int) -> None:
        if not urlsplit(address).hostname:
            raise PluginError(f"{address!r} is no address of a reward service: expected http://HOST:PORT/PATH")
        try:
            import httpx
        except ImportError as error:
            raise PluginError(f"a reward service needs the package httpx: pip install '.[rewards]' in the checkout ({error})") from error
        self.address, self._timeout_s = address, timeout_s
        token = os.environ.get(REWARD_TOKEN)
        self._client = httpx.AsyncClient(
            headers={"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {}),
            limits=httpx.Limits(max_connections=connections),
        )

    async def judge(self, **given: Any) -> Any:
        """The rewards of one group's completions. Raises `RewardError` with what the service said last."""
        content = json.dumps({**_sent(given), "trainer_state": asdict(given["trainer_state"])})
        end = time.monotonic() + IN_TIME * self._timeout_s
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._ask(content, end - time.monotonic())
            except _Later as later:
                pause = max(later.after_s, min(LONGEST_PAUSE_S, PAUSE_S * 2 ** (attempt - 1)))
                if time.monotonic() + pause >= end:
                    tried = "once" if attempt == 1 else f"{attempt} times"
                    raise RewardError(
                        f"reward {self.address}: no rewards within {self._timeout_s:g} s (reward.timeout_s), asked {tried}: {later}"
                    ) from later
            await asyncio.sleep(pause)

    async def _ask(self, content: str, left_s: float) -> Any:
        import httpx

        try:
            limits = httpx.Timeout(left_s, connect=min(left_s, CONNECT_S))
            answer = await asyncio.wait_for(self._client.post(self.address, content=content, timeout=limits), left_s)
        except (httpx.TransportError, TimeoutError) as error:
            raise _Later(str(error) or f"{type(error).__name__} after {left_s:.1f} s") from error
        status = f"{answer.status_code} {answer.reason_phrase}"
        if answer.status_code in LATER:
            after = answer.headers.get("retry-after", "")
            raise _Later(status, after_s=float(after) if after.isdecimal() else 0.0)
        if not answer.is_success:
            raise RewardError(f"reward {self.address}: {status}: {_beginning(answer.text)}")
        try:
            return answer.json()["rewards"]
        except (ValueError, KeyError, TypeError) as error:
            expected = '{"rewards": [a number or null for each completion]}'
            raise RewardError(f"reward {self.address} answered {_beginning(answer.text)}, expected {expected}") from error


def _sent(given: dict[str, Any]) -> dict[str, Any]:
    """Without token ids, the longest part by far, which mean nothing to a service without the run's tokenizer, and without functions."""
    return {name: value for name, value in given.items() if name not in ("completion_ids", *NAMES)}


def _beginning(text: str) -> str:
    return " ".join(text.split())[:200] or "nothing"
