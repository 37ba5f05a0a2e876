"""A reward function behind an HTTP address: the keyword arguments are posted as JSON, the response has the list `rewards`.

Requests are retried with backoff while the service is unreachable, busy or silent, until the group's time limit; other errors are final.
Requests wait in the asyncio loop: a group in flight needs a connection and no thread.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from penstock.infra.sandbox.spawn import REWARD_TOKEN
from penstock.pipeline.config.plugins import PluginError
from penstock.pipeline.rewards.values import NAMES, RewardError

PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0
"""Pause before the first retry, doubled after each, and the longest pause."""
CONNECT_S = 5.0
IN_TIME = 0.95
"""Share of the time limit after which the call fails with a reason, before the child process is killed without one."""
RETRIED = (408, 425, 429, 502, 503, 504)


class Load:
    """Counts requests to the reward services of this process, and their time, since the last call of `taken`."""

    def __init__(self) -> None:
        self.requests, self.retries, self._busy_s = 0, 0, 0.0
        self._in_flight, self._since = 0, 0.0
        self._request_s = 0.0

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count a request that is in flight during the `with` block, and its time."""
        self._advance()
        self.requests, self._in_flight = self.requests + 1, self._in_flight + 1
        try:
            yield
        finally:
            self._advance()
            self._in_flight -= 1

    def taken(self) -> dict[str, float]:
        """Return the metrics since the last call, empty without a request; `service_busy_s` is the time with a request in flight."""
        self._advance()
        load = {
            "service_requests": float(self.requests), "service_retries": float(self.retries), "service_busy_s": self._busy_s,
            "service_request_s": self._request_s,
        }  # fmt: skip
        self.requests, self.retries, self._busy_s, self._request_s = 0, 0, 0.0, 0.0
        return load if any(load.values()) else {}

    def _advance(self) -> None:
        """Add the time since the last call to the sums; call this before the number of requests in flight changes."""
        now = time.monotonic()
        self._busy_s += (now - self._since) * (self._in_flight > 0)
        self._request_s += (now - self._since) * self._in_flight
        self._since = now


LOAD = Load()


class _Retry(Exception):
    """A failure after which the request is sent again."""

    def __init__(self, reason: str, *, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class RewardService:
    """Client of a reward service for up to `connections` groups at a time; `timeout_s` covers all attempts of a group."""

    def __init__(self, address: str, *, timeout_s: float, connections: int) -> None:
        if not urlsplit(address).hostname:
            raise PluginError(f"{address!r} is not the address of a reward service: expected http://HOST:PORT/PATH")
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

    async def score(self, **arguments: Any) -> Any:
        """Request the rewards of one group's completions, with retries, and return them unchecked. Raises `RewardError`."""
        # Functions cannot be sent; token ids are long, and useless to a service without the run's tokenizer.
        sent = {name: value for name, value in arguments.items() if name not in ("completion_ids", *NAMES)}
        content = json.dumps({**sent, "trainer_state": asdict(arguments["trainer_state"])})
        end = time.monotonic() + IN_TIME * self._timeout_s
        attempt = 0
        while True:
            attempt += 1
            try:
                with LOAD.request():
                    return await self._post(content, end - time.monotonic())
            except _Retry as failure:
                LOAD.retries += 1
                pause = max(failure.after_s, min(LONGEST_PAUSE_S, PAUSE_S * 2 ** (attempt - 1)))
                if time.monotonic() + pause >= end:
                    tried = "1 attempt" if attempt == 1 else f"{attempt} attempts"
                    raise RewardError(
                        f"reward {self.address}: no rewards within {self._timeout_s:g} s (reward.timeout_s), {tried}: {failure}"
                    ) from failure
            await asyncio.sleep(pause)

    async def _post(self, content: str, remaining_s: float) -> Any:
        """Send one request and return the `rewards` of its response. Raises `_Retry`, or `RewardError` for a final failure."""
        import httpx

        try:
            limits = httpx.Timeout(remaining_s, connect=min(remaining_s, CONNECT_S))
            response = await asyncio.wait_for(self._client.post(self.address, content=content, timeout=limits), remaining_s)
        except (httpx.TransportError, TimeoutError) as error:
            raise _Retry(str(error) or f"{type(error).__name__} after {remaining_s:.1f} s") from error
        status = f"{response.status_code} {response.reason_phrase}"
        if response.status_code in RETRIED:
            after = response.headers.get("retry-after", "")
            raise _Retry(status, after_s=float(after) if after.isdecimal() else 0.0)
        if not response.is_success:
            raise RewardError(f"reward {self.address}: {status}: {_excerpt(response.text)}")
        try:
            return response.json()["rewards"]
        except (ValueError, KeyError, TypeError) as error:
            expected = '{"rewards": [a number or null for each completion]}'
            raise RewardError(f"reward {self.address} returned {_excerpt(response.text)}, expected {expected}") from error


def _excerpt(text: str) -> str:
    return " ".join(text.split())[:200] or "nothing"
