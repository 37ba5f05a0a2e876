"""TextArena's games as environments, on the package itself."""

import asyncio
import random

import pytest

from penstock.pipeline.agents.environments.interfaces import Observation
from penstock.pipeline.agents.environments.sources import open_environment
from penstock.pipeline.config.plugins import PluginError
from tests.support.environments import Policy, play, texts

pytestmark = pytest.mark.costly  # the package takes seconds to load
GUESS, LAKE = "textarena:GuessTheNumber-v0", "textarena:FrozenLake-v0"


def played(source: str, *actions: str, seed: int = 7, between: int = 0) -> list[Observation]:
    """What a game says to these actions, its rules first; `between` other random numbers are drawn before each."""
    episode = open_environment(source).episode()

    async def with_environments() -> list[Observation]:
        said = [await episode.reset(seed=seed, row={})]
        for action in actions:
            for _ in range(between):
                random.random()
            said.append(await episode.step({"role": "assistant", "content": action}))
        return said

    return asyncio.run(with_environments())


def test_the_right_guess_ends_the_game_and_is_worth_one() -> None:
    assert "guess the number between 1 and 20" in texts(played(GUESS, seed=3))[0]
    low, high = 1, 20
    while True:
        said = played(GUESS, f"[{(low + high) // 2}]", seed=3)
        if said[-1].ended:
            break
        low, high = ((low + high) // 2 + 1, high) if "higher" in texts(said)[-1] else (low, (low + high) // 2 - 1)
    assert said[-1].reward == 1.0


def test_each_text_is_only_what_is_new() -> None:
    said = texts(played(LAKE, "[right]", "[left]"))
    assert "Welcome" in said[0]
    assert all("Welcome" not in text and "Current Board" in text for text in said[1:])


def test_a_game_follows_from_its_seed_whatever_else_draws_random_numbers() -> None:
    name = "textarena:2048-v0"  # every move draws
    first, again = (texts(played(name, "[up]", "[left]", "[down]", "[right]", between=between)) for between in (0, 3))
    assert first == again != texts(played(name, "[up]", "[left]", "[down]", "[right]", seed=8))


def test_a_game_that_is_not_there_or_for_several_players_is_refused() -> None:
    with pytest.raises(PluginError, match="textarena:Chess-v7: TextArena has no such game"):
        open_environment("textarena:Chess-v7").episode()
    with pytest.raises(PluginError, match=r"textarena:ConnectFour-v0: .*only single-player games are supported"):
        played("textarena:ConnectFour-v0")


@pytest.mark.slow
def test_a_trajectory_is_played_in_a_child_process() -> None:
    (trajectory,), lost = play(GUESS, [{}], draw=Policy(), max_turns=1, trajectory_tokens=2000, reset_timeout_s=60.0)
    assert (trajectory.finish, trajectory.environment, trajectory.environment_seed, lost) == ("length", GUESS, 4, [])
    assert "guess the number" in trajectory.messages
