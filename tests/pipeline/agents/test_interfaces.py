"""The two interfaces of an environment: texts with steps, and tools; what the policy does wrong is told to the policy."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline.agents.environments.interfaces import EnvironmentFault, ToolEpisode, episode_of
from penstock.pipeline.agents.environments.sources import check_source, open_environment
from penstock.pipeline.config.plugins import PluginError
from penstock.pipeline.data.tiny.lake import HABIT_AT, Lake, demonstration, distances, holes_of, lake_rows


class Shop:
    """TRL's interface."""

    def reset(self, item: str, **_: Any) -> str:
        self.item, self.bought = item, False
        return f"buy a {item}"

    def buy(self, item: str, count: int = 1) -> dict[str, Any]:
        """Buy something.

        Args:
            item: What to buy.
            count: How many.
        """
        if count < 1:
            raise ValueError("nothing to buy")
        self.bought = item == self.item
        return {"paid": 2 * count}

    async def wait(self) -> str:
        """Wait a little."""
        await asyncio.sleep(0)
        return "ok"

    def get_reward(self) -> float:
        return float(self.bought)


def call(name: str, arguments: str, number: int = 0) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def played(episode: Any, *steps: dict[str, Any], **row: Any) -> tuple[list[Any], float | None]:
    """What an episode observes, its beginning first, and its reward."""

    async def play() -> tuple[list[Any], float | None]:
        observed = [await episode.reset(seed=1, row=row)]
        return observed + [await episode.step(step) for step in steps], await episode.reward()

    return asyncio.run(play())


def test_public_methods_are_tools_with_their_docstrings_and_types() -> None:
    shop = ToolEpisode(Shop())
    assert [tool["function"]["name"] for tool in shop.tools] == ["buy", "wait"]
    buy = shop.tools[0]["function"]
    assert buy["description"] == "Buy something."
    assert buy["parameters"]["properties"]["count"] == {"type": "integer", "description": "How many."}
    assert buy["parameters"]["required"] == ["item"]


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        (call("buy", '{"item": "hat", "count": 2}'), '{"paid": 4}'),
        (call("wait", "{}"), "ok"),
        (call("steal", "{}"), "error: there is no tool 'steal'; there are: buy, wait"),
        (call("buy", "{hat"), "error: wrong arguments for buy: Expecting property name"),
        (call("buy", '{"size": 3}'), "error: wrong arguments for buy: missing a required argument: 'item'"),
        (call("buy", '{"item": "hat", "count": 0}'), "error: ValueError: nothing to buy"),
    ],
)
def test_the_policy_reads_what_its_tool_call_gave_and_what_was_wrong_with_it(tool: dict[str, Any], said: str) -> None:
    (_, observed), _ = played(ToolEpisode(Shop()), {"role": "assistant", "content": None, "tool_calls": [tool]}, item="hat")
    (message,) = observed.messages
    assert message["role"] == "tool" and message["tool_call_id"] == "c0" and message["content"].startswith(said)
    assert not observed.ended


class Long:
    """Tools with long results."""

    def reset(self, **row: Any) -> str:
        return "go"

    def shows(self) -> str:
        """Show."""
        return "é\n" * 50_000

    def breaks(self) -> str:
        """Break."""
        raise ValueError("é\n" * 50_000)

    def lists(self) -> dict[str, str]:
        """List."""
        return {"é": "é\n" * 50_000}


@pytest.mark.parametrize(
    ("name", "said"),
    [("shows", "é\n" * 50_000), ("breaks", "error: ValueError: " + "é\n" * 50_000), ("lists", '{"é": "' + "é\\n" * 50_000 + '"}')],
)
def test_no_result_of_a_tool_is_cut_by_its_environment(name: str, said: str) -> None:
    (_, observed), _ = played(ToolEpisode(Long()), {"role": "assistant", "content": None, "tool_calls": [call(name, "{}")]})
    assert observed.messages[0]["content"] == said


def test_an_episode_of_tools_ends_with_a_turn_without_a_call_and_then_has_its_reward() -> None:
    buys = {"tool_calls": [call("buy", json.dumps({"item": "hat"}))]}
    (first, _, last), reward = played(ToolEpisode(Shop()), buys, {"content": "done"}, item="hat", unused=3)
    assert first.messages == ({"role": "user", "content": "buy a hat"},)
    assert (last.ended, last.messages, reward) == (True, (), 1.0)


class Half:
    def reset(self) -> None:
        """Nothing."""


class OneWay:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def reset(self, *, seed: int) -> str:
        return str(seed)

    def step(self, text: str) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("no", r"expected \(text, reward, ended\)"),
        (("x", float("nan"), False), "expected a finite number"),
        ((3, 1.0, False), "expected a text"),
    ],
)
def test_an_environment_that_answers_in_another_shape_is_at_fault(answer: Any, problem: str) -> None:
    with pytest.raises(EnvironmentFault, match=problem):
        asyncio.run(episode_of(OneWay(answer)).step({"content": "a"}))


def test_what_has_neither_interface_is_refused_in_one_line() -> None:
    with pytest.raises(EnvironmentFault, match="neither step"):
        episode_of(Half())
    with pytest.raises(PluginError, match=r"is not an environment: expected file\.py:Class"):
        open_environment("lake")


def test_a_map_follows_from_its_seed_and_a_way_leads_through_it() -> None:
    for seed in range(200):
        holes = holes_of(seed)
        assert holes == holes_of(seed) and (0, 0) in distances(holes)
    assert lake_rows(3, 0, split="held_out") == lake_rows(3, 5, split="held_out")
    assert {row["seed"] for row in lake_rows(9, 0)}.isdisjoint(row["seed"] for row in lake_rows(9, 0, split="held_out"))


def test_a_demonstration_is_what_the_environment_says_to_its_actions() -> None:
    import random

    pieces = demonstration(random.Random(3))
    assert [said for _, said in pieces[:3]] == [False, False, True]
    lake = Lake()
    assert pieces[1][0] in {lake.reset(seed=seed) for seed in range(60)}
    assert all(text in "LDRU" for text, said in pieces if said)


def test_halfway_a_demonstration_mostly_turns_back_and_elsewhere_rarely() -> None:
    import random

    rng, back = random.Random(5), {True: [0, 0], False: [0, 0]}
    for _ in range(300):
        pieces = demonstration(rng)
        for (seen, _), (action, said) in itertools.pairwise(pieces):
            if said:
                here = (int(seen[-3]), int(seen[-2])) in HABIT_AT
                back[here][0] += action in "UL"
                back[here][1] += 1
    assert 0.55 < back[True][0] / back[True][1] < 0.95
    assert back[False][0] / back[False][1] < 0.35


class Library:
    """Tools without a reward of their own."""

    def reset(self, **_: Any) -> str:
        return "find it"

    def search(self, words: str) -> str:
        """Search."""
        return words * 10_000


class Undecided(Library):
    """A judge that gave no verdict."""

    def get_reward(self) -> None:
        return None


@pytest.mark.parametrize("environment", [Library, Undecided])
def test_a_class_of_tools_without_a_reward_leaves_it_to_reward_functions(environment: type[Library]) -> None:
    (_, observed), reward = played(episode_of(environment()), {"tool_calls": [call("search", '{"words": "abc"}')]})
    assert reward is None and observed.messages[0]["content"] == "abc" * 10_000  # no hidden cut


SOURCES = {
    "class Shop:\n    def reset(self): ...\n    def search(self): ...": True,
    "class Shop:\n    def reset(self): ...\n    def search(self): ...\n    def get_reward(self): ...": False,
    "class Shop:\n    def reset(self): ...\n    def step(self, text): ...": False,
    "def Shop(): ...": False,
    "class Base:\n    def get_reward(self): ...\nclass Shop(Base):\n    def reset(self): ...": False,
}


@pytest.mark.parametrize(("code", "unrewarded"), SOURCES.items())
def test_a_class_whose_episodes_could_have_no_reward_is_refused_where_nothing_else_gives_one(
    code: str, unrewarded: bool, tmp_path: Path
) -> None:
    (tmp_path / "env.py").write_text(code)
    source = f"{tmp_path / 'env.py'}:Shop?size=3"
    check_source(source, rewards=[["exact_match"], ["environment", "exact_match"]])
    for rewards in (["environment"], ["environment", "environment"]):
        if unrewarded:
            said = r"^environment\.source: .*Shop.* returns no rewards \(it has neither step nor get_reward\(\)\), .*reward function"
            with pytest.raises(PluginError, match=said):
                check_source(source, rewards=[["exact_match"], rewards])
        else:
            check_source(source, rewards=[rewards])


@pytest.mark.parametrize("source", ["gymnasium:CartPole-v1", "tiny:lake", "there.is.no.such:Class"])
def test_environments_that_are_no_classes_of_this_machine_are_not_looked_into(source: str) -> None:
    check_source(source, rewards=[["environment"]])
