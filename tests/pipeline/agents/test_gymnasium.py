"""Gymnasium's environments as texts, on the package itself."""

import pytest

from penstock.pipeline.agents.environments.interfaces import Observation
from penstock.pipeline.agents.environments.sources import open_environment
from penstock.pipeline.config.plugins import PluginError
from tests.support import environments
from tests.support.environments import Policy, play, texts

LAKE = "gymnasium:FrozenLake-v1?is_slippery=false"


def walked(source: str, *actions: str, seed: int = 7) -> list[Observation]:
    """What an episode says to these actions, its beginning first."""
    return environments.walked(open_environment(source).episode(), *actions, seed=seed)


def test_what_an_environment_draws_is_the_text_with_what_it_highlights_in_brackets() -> None:
    said = walked(LAKE, "2", "1")
    assert texts(said)[0].splitlines()[-4:] == ["[S]FFF", "FHFH", "FFFH", "HFFG"]
    assert [one.ended for one in said] == [False, False, True]
    assert "[H]" in texts(said)[2]


def test_the_goal_of_the_frozen_lake_is_worth_one() -> None:
    said = walked(LAKE, "1", "1", "2", "2", "1", "2")
    assert [one.reward for one in said[1:]] == [0.0] * 5 + [1.0]
    assert said[-1].ended


def test_an_observation_that_cannot_be_drawn_is_json_and_follows_from_the_seed() -> None:
    first, again, other = (texts(walked("gymnasium:CartPole-v1", "0", "1", seed=seed)) for seed in (3, 3, 4))
    assert first == again != other
    assert first[0].startswith("[") and len(first) == 3


def test_a_text_that_is_no_action_costs_a_turn_and_changes_nothing() -> None:
    said = walked(LAKE, "left", "4", "1")
    assert texts(said)[1] == "'left' is not an action: write a number from 0 to 3"
    assert texts(said)[2] == "'4' is not an action: write a number from 0 to 3"
    assert "[F]" in texts(said)[3]


def test_an_environment_with_other_than_discrete_actions_is_refused() -> None:
    with pytest.raises(PluginError, match=r"gymnasium:Pendulum-v1: the action space is Box.*; it must be discrete"):
        open_environment("gymnasium:Pendulum-v1").episode()


def test_a_trajectory_is_played_in_a_child_process() -> None:
    policy = Policy()
    (trajectory,), lost = play(LAKE, [{}], draw=policy, max_turns=2, trajectory_tokens=500)
    assert (trajectory.finish, trajectory.environment, trajectory.environment_seed, lost) == ("length", "gymnasium:FrozenLake-v1", 4, [])
    assert "'abc' is not an action" in trajectory.messages
