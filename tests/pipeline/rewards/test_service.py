"""Reward services: what a function would get is posted, what is away is waited for, what refuses fails with its words."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from penstock.infra.sandbox.program import Loopback
from penstock.infra.sandbox.spawn import REWARD_TOKEN as TOKEN
from penstock.infra.sandbox.timed_pool import ChildPool, Done
from penstock.pipeline.config.load import ConfigError
from penstock.pipeline.rewards.functions import digests, resolve
from penstock.pipeline.rewards.scoring import CHILD, payload, spec
from penstock.pipeline.rewards.values import RewardError
from tests.support.least_config import least_config

pytestmark = pytest.mark.costly  # starts processes

Answer = Callable[[Request], Coroutine[Any, Any, Response]]
Serve = Callable[[Answer], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves an answer at an address, from a loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    servers: list[Loopback] = []

    async def start(answer: Answer) -> None:
        servers.append(Loopback(Starlette(routes=[Route("/score", answer, methods=["POST"])])))

    def at(answer: Answer) -> str:
        asyncio.run_coroutine_threadsafe(start(answer), loop).result()
        return f"http://127.0.0.1:{servers[-1].port}/score"

    yield at
    for server in servers:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def lengths(request: Request) -> Response:
    group = await request.json()
    return JSONResponse({"rewards": [float(len(text)) for text in group["completions"]]})


def scored(address: str, completions: list[str], *, timeout_s: float = 10.0, **columns: Any) -> tuple[float, ...]:
    found = resolve([address], timeout_s=timeout_s)
    return found.score(completions, prompt="p", messages=None, columns=columns, completion_ids=[[1]] * len(completions)).rewards


def test_a_service_gets_what_a_function_would_get_and_its_numbers_are_the_rewards(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Any] = []

    async def keep(request: Request) -> Response:
        got.append((request.headers.get("authorization"), await request.json()))
        return JSONResponse({"rewards": [0.5, None]})

    monkeypatch.setenv(TOKEN, "word")
    found = resolve([serve(keep), "exact_match"], [2.0, 1.0])
    score = found.score(["a", "b"], prompt="p", messages=None, columns={"answer": "b"}, completion_ids=[[1], [2, 3]], step=3)
    assert score.components == ((0.5, 0.0), (None, 1.0))
    assert score.rewards == (1.0, 1.0)
    assert got == [
        (
            "Bearer word",
            {
                "prompts": ["p", "p"], "completions": ["a", "b"], "answer": ["b", "b"], "completion_lengths": [1, 2],
                "max_completion_length": 0, "environment_reward": [None, None], "conversations": [None, None],
                "trainer_state": {"global_step": 3, "max_steps": 0},
            },
        )
    ]  # fmt: skip


def test_a_service_that_is_busy_is_asked_again_when_it_says(serve: Serve) -> None:
    asked: list[float] = []

    async def third_time(request: Request) -> Response:
        asked.append(asyncio.get_running_loop().time())
        if len(asked) < 3:
            return Response(status_code=503, headers={"retry-after": "1"} if len(asked) == 2 else {})
        return await lengths(request)

    assert scored(serve(third_time), ["ab"]) == (2.0,)
    assert asked[1] - asked[0] >= 0.2
    assert asked[2] - asked[1] >= 0.9


def test_a_service_that_stays_away_fails_the_group_in_time_with_what_it_said_last(serve: Serve) -> None:
    async def busy(_request: Request) -> Response:
        return Response(status_code=429)

    async def silent(_request: Request) -> Response:
        await asyncio.sleep(30)
        return Response()

    with pytest.raises(RewardError, match=r"/score: no rewards within 3 s \(reward.timeout_s\), \d+ attempts?: 429 Too"):
        scored(serve(busy), ["a"], timeout_s=3.0)
    with pytest.raises(RewardError, match=r"no rewards within 0.4 s \(reward.timeout_s\), 1 attempt: .*Timeout"):
        scored(serve(silent), ["a"], timeout_s=0.4)
    with pytest.raises(RewardError, match=r"\d+ attempts?: .*(connect|Connect)"):
        scored("http://127.0.0.1:1/score", ["a"], timeout_s=1.5)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (PlainTextResponse("no such\n rubric", 404), r"/score: 404 Not Found: no such rubric$"),
        (PlainTextResponse("", 500), r"/score: 500 Internal Server Error: nothing$"),
        (PlainTextResponse("1.0"), r'returned 1.0, expected \{"rewards": \[a number or null for each completion\]\}$'),
        (JSONResponse({"rewards": [1.0]}), "returned 1 values for 2 completions"),
        (JSONResponse({"rewards": ["good", "bad"]}), "returned 'good' for completion 0, expected a number or None"),
    ],
)
def test_what_is_no_answer_fails_at_once_with_its_words(serve: Serve, answer: Response, words: str) -> None:
    asked: list[int] = []

    async def notify(_request: Request) -> Response:
        asked.append(1)
        return answer

    with pytest.raises(RewardError, match=words):
        scored(serve(notify), ["a", "b"])
    assert len(asked) == 1


def test_one_child_has_many_groups_at_a_service_at_a_time(serve: Serve) -> None:
    under_way: set[int] = set()

    async def meet(request: Request) -> Response:  # answers nobody before all have come
        under_way.add((await request.json())["number"][0])
        while len(under_way) < 40:
            await asyncio.sleep(0.005)
        return JSONResponse({"rewards": [1.0]})

    with closing(ChildPool[int](CHILD, size=1, timeout_s=120.0, init=spec([serve(meet)], concurrency=40))) as pool:
        for number in range(40):
            pool.submit(number, payload(["a"], prompt="p", messages=None, columns={"number": number}))
        ended: list[Any] = []
        while pool.pending:
            ended += pool.poll(1.0)
    assert all(isinstance(one, Done) and one.result["rewards"] == [1.0] for one in ended)
    requests, busy_s, request_s = (
        sum(one.result["load"].get(f"service_{name}", 0.0) for one in ended) for name in ("requests", "busy_s", "request_s")
    )
    assert requests == 40
    assert 0 < busy_s < request_s <= 40 * busy_s * (1 + 1e-9)


def test_an_address_is_recorded_by_its_digest_and_one_with_a_password_is_refused_without_saying_it() -> None:
    assert len(set(digests(["http://judge:8000/a", "http://judge:8000/b"]).values())) == 2
    reward = {"functions": ["https://me:secret@judge/a"]}
    with pytest.raises(ConfigError, match=r"the address of judge contains a password") as caught:
        least_config(reward=reward)
    assert "secret" not in str(caught.value)
