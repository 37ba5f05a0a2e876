"""Environments behind an OpenEnv server: over the wire by default, and on OpenEnv's own server among the slow tests."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from penstock.pipeline.agents.environments.interfaces import Episode, Observation
from penstock.pipeline.agents.environments.sources import open_environment
from penstock.pipeline.config.plugins import PluginError
from tests.support.environments import Policy, play, texts, walked
from tests.support.openenv_server import BROKEN, SESSIONS, SLOW, openenv_server, wire_server

pytestmark = pytest.mark.costly  # starts processes, and waits


@pytest.fixture(scope="module", params=["wire", pytest.param("openenv", marks=pytest.mark.slow)])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of a guessing game, with two sessions."""
    with wire_server() if request.param == "wire" else openenv_server(tmp_path_factory.mktemp("openenv")) as found:
        yield found


def run(address: str, story: Callable[[Callable[[], Episode]], Awaitable[Any]], *, options: str = "timeout_s=60") -> Any:
    """What a story of episodes returns."""
    kind = open_environment(f"openenv:{address}?{options}")
    return asyncio.run(story(kind.episode))


def played(address: str, *words: object, options: str = "timeout_s=60", **row: Any) -> list[Observation]:
    """What a game says to its beginning and to these words."""
    return walked(open_environment(f"openenv:{address}?{options}").episode(), *words, **row)


def said(number: object) -> dict[str, str]:
    return {"role": "assistant", "content": str(number)}


def test_a_game_is_played_to_its_end_and_follows_from_the_seed_and_the_row(address: str) -> None:
    hidden = random.Random(7).randint(1, 9)
    seen = played(address, 0, hidden, largest=9)
    assert texts(seen) == ["a number from 1 to 9", "higher", "right"]
    assert [(one.reward, one.ended) for one in seen] == [(None, False), (0.0, False), (1.0, True)]


def test_what_is_no_action_is_told_to_the_policy_and_the_game_goes_on(address: str) -> None:
    _, *seen = played(address, "twelve", '"12"x', "[3]", 0)
    assert texts(seen)[0] == "'twelve' is not an action: write an integer"
    assert "number: Input should be a valid integer" in texts(seen)[2]  # the server's own words
    assert texts(seen)[3] == "higher"
    assert not any(one.ended for one in seen)


def test_what_breaks_in_the_game_is_an_error_of_the_environment(address: str) -> None:
    with pytest.raises(RuntimeError, match="openenv: step: EXECUTION_ERROR: the game broke"):
        played(address, BROKEN)


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one(address: str) -> None:
    async def story(episode: Callable[[], Episode]) -> Observation:
        game = episode()
        await game.reset(seed=7, row={})
        with pytest.raises(RuntimeError, match=r"did not respond to step within 3 s"):
            await game.step(said(SLOW))
        with pytest.raises(RuntimeError, match="the session is closed"):
            await game.step(said(0))
        await game.reset(seed=7, row={})
        seen = await game.step(said(0))
        await game.close()
        return seen

    assert texts([run(address, story, options="timeout_s=3")])[0] == "higher"


def test_a_reset_waits_for_a_free_session_and_says_so_when_none_comes(address: str) -> None:
    impatient = open_environment(f"openenv:{address}?timeout_s=2").episode()

    async def story(episode: Callable[[], Episode]) -> Observation:
        taken = [episode() for _ in range(SESSIONS)]
        for game in taken:
            await game.reset(seed=1, row={})
        with pytest.raises(RuntimeError, match=rf"reset waited 2 s for {address}/ws: all {SESSIONS} sessions of the server are in use"):
            await impatient.reset(seed=1, row={})
        waiting = episode()
        coming = asyncio.create_task(waiting.reset(seed=1, row={}))
        await taken[0].close()
        seen = await coming
        for game in (taken[1], waiting):
            await game.close()
        return seen

    assert texts([run(address, story)])[0] == "a number from 1 to 20"


def test_trajectories_in_a_child_process_give_their_sessions_back(address: str) -> None:
    class Guesses(Policy):
        """Says `7` at every turn."""

        async def __call__(self, token_ids: Any, *, turn: int, max_new_tokens: int) -> Any:
            draw = await super().__call__(token_ids, turn=turn, max_new_tokens=max_new_tokens)
            draw.token_ids[:] = [ord("7"), 2]
            return draw

    source = f"openenv:{address}?timeout_s=60"
    policy, count = Guesses(length=1), 2 * SESSIONS
    trajectories, lost = play(source, [{"largest": 5}] * count, draw=policy, max_turns=3, step_timeout_s=120.0)
    assert [one.finish for one in trajectories] == ["length"] * count
    assert len(policy.asked) == 3 * count
    assert {one.environment_version for one in trajectories} == {"1.0.0"}
    assert lost == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("openenv:{}?action=nummer", "the server's actions have no field 'nummer'; their fields are number"),
        ("openenv:{}?observation=picture", "observations have no field 'picture', but"),
        ("openenv:{}?retries=3", "unknown option 'retries'; choose from action, observation, timeout_s"),
        ("openenv:http://127.0.0.1:1", "expected an address such as openenv:ws://127.0.0.1:8000"),
    ],
)
def test_a_source_that_does_not_fit_its_server_is_refused_by_name(address: str, source: str, said: str) -> None:
    with pytest.raises(PluginError, match=said):
        open_environment(source.format(address))


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pipeline.agents.environments.openenv.CONNECT_S", 0.0)
    message = r"openenv:ws://127.0.0.1:1: no OpenEnv server responds at http://127.0.0.1:1/schema .*start the server"
    with pytest.raises(PluginError, match=message):
        open_environment("openenv:ws://127.0.0.1:1")
