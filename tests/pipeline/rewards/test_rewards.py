"""Rewards: TRL's conventions hold, and a broken reward is a failure with its reason, never a zero."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.sandbox.timed_pool import ChildPool, Done, Failed
from penstock.pipeline.config.plugins import PluginError
from penstock.pipeline.rewards import functions as rewards
from penstock.pipeline.rewards import scoring as reward_child
from penstock.pipeline.rewards.builtin import BUILTINS
from penstock.pipeline.rewards.functions import Score, resolve
from penstock.pipeline.rewards.values import RewardError
from tests.support.paths import EXAMPLES, GSM8K
from tests.support.refusals import one_line

MINE = """
import asyncio, os, time

def length(completions, **kwargs):
    return [float(len(text)) for text in completions]

def named(completions, level):
    return [float(one) for one in level]

def never(completions, **kwargs):
    return [None] * len(completions)

def sometimes(completions, **kwargs):
    return [None if text == "skip" else 1 for text in completions]

async def slowly(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [float(text == "good") for text in completions]

async def breaks_slowly(completions, **kwargs):
    await asyncio.sleep(0)
    raise KeyError("gone")

def talk(prompts, completions, **kwargs):
    return [float(prompt[-1]["role"] == "user" and completion[0]["content"] == "good") for prompt, completion in zip(prompts, completions)]

def array(completions, **kwargs):
    import numpy
    return numpy.ones(len(completions), dtype=numpy.float32)

def breaks(completions, **kwargs):
    return [1 / 0]

def trl_style(completions, completion_ids, trainer_state, **kwargs):
    return [len(ids) + trainer_state.global_step / trainer_state.max_steps for ids in completion_ids]

def by_position(prompts, completions, level, /):
    return [float(level[0] + len(text)) for text in completions]

def mostly_by_position(completions, level=1, /, *others, prompts, **kwargs):
    return [float(level[0] + len(text) + len(others)) for text in completions]

def without_a_column(completions, missing=2, level=5, /):
    return [float(level[0] + missing + len(text)) for text in completions]

def weighty(completions, completion_lengths, *, each=1.0):
    return [each * length for length in completion_lengths]

def hangs(completions, **kwargs):
    if "hang" in completions:
        time.sleep(600)
    if "exit" in completions:
        os._exit(3)
    print("a user's print")
    return [1.0] * len(completions)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def scored(folder: Path, names: list[str], completions: list[str], weights: list[float] | None = None, **columns: Any) -> Score:
    found = resolve([name if name in BUILTINS else f"mine.py:{name}" for name in names], weights, base_dir=folder)
    return found.score(completions, prompt="p", messages=None, columns=columns)


def test_the_reward_is_the_weighted_sum_of_the_components_that_apply(folder: Path) -> None:
    score = scored(folder, ["exact_match", "length", "sometimes"], ["7", " 7\n", "skip"], [1.0, 0.1, 10.0], answer=7)
    assert score.components == ((1.0, 1.0, 1.0), (1.0, 3.0, 1.0), (0.0, 4.0, None))
    assert score.rewards == pytest.approx((11.1, 11.3, 0.4))


def test_a_function_gets_the_columns_it_names_and_misses_are_told_before_the_run(folder: Path) -> None:
    assert scored(folder, ["named"], ["a", "b"], level=3, answer="x", other=1).rewards == (3.0, 3.0)
    with pytest.raises(RewardError, match=r"needs the column 'level', but the data has answer, levle; did you mean 'levle'.$"):
        resolve(["mine.py:named"], base_dir=folder).check({"answer": 1, "levle": 2})
    for columns, hint in (({"solution": 1}, "solution"), ({}, "none")):
        with pytest.raises(RewardError, match=f"but the data has {hint}$"):
            resolve(["mine.py:named"], base_dir=folder).check(columns)
    resolve(["mine.py:named", "exact_match"], base_dir=folder).check({"answer": 1, "level": 2})


@pytest.mark.parametrize(
    ("name", "rewards"), [("by_position", (4.0, 5.0)), ("mostly_by_position", (4.0, 5.0)), ("without_a_column", (6.0, 7.0))]
)
def test_parameters_that_are_positional_only_get_their_columns_by_position(folder: Path, name: str, rewards: tuple[float, ...]) -> None:
    assert scored(folder, [name], ["a", "bb"], level=3).rewards == rewards


def test_a_positional_only_parameter_without_a_column_is_told_before_the_run(folder: Path) -> None:
    with pytest.raises(RewardError, match="needs the column 'level'"):
        resolve(["mine.py:by_position"], base_dir=folder).check({"answer": 1})


def test_a_function_that_asks_for_token_ids_lengths_and_the_trainers_state_gets_them(folder: Path) -> None:
    found = resolve(["mine.py:trl_style", "mine.py:weighty?each=0.5"], base_dir=folder, max_steps=8)
    found.check({})
    score = found.score(["a", "b"], prompt="p", messages=None, columns={}, completion_ids=[[1, 2, 3], [4]], step=2)
    assert score.components == ((3.25, 1.5), (1.25, 0.5))
    own = found.score(["a"], prompt="p", messages=None, columns={"completion_lengths": 7}, completion_ids=[[1]], step=0)
    assert own.components == ((1.0, 0.5),)  # the run's fact, not the column of its name


def test_they_reach_functions_in_a_child_process(folder: Path) -> None:
    init = reward_child.spec(["mine.py:trl_style", "soft_overlong"], base_dir=folder, max_steps=4, max_completion_length=5)
    with closing(ChildPool[int](reward_child.CHILD, size=1, timeout_s=120.0, init=init)) as pool:
        pool.submit(0, reward_child.payload(["a"], prompt="p", messages=None, columns={}, completion_ids=[[1, 2, 3, 4, 5]], step=1))
        (done,) = pool.poll(120.0)
    assert isinstance(done, Done)
    assert Score.of(done.result).components == ((5.25, -1.0),)


@pytest.mark.parametrize(("options", "expected"), [
    ("", [1.0, 0.0, 0.0, 0.0]),
    ("?discount=0.5&wrong=-1&missing=-2&truncated=-3", [0.25, -1.0, -2.0, -3.0]),
    ("?of=exact_match&missing=-2&correct=2", [0.0, 0.0, 0.0, 0.0]),
])  # fmt: skip
def test_the_table_of_rewards_goes_by_status_and_discounts_a_success_by_its_tokens(options: str, expected: list[float]) -> None:
    function = resolve([f"reward_table{options}"], max_completion_length=9)
    completions, lengths = ["so \\boxed{7}", "so \\boxed{8}", "who knows?", "so \\boxed{8} or"], [2, 2, 2, 9]
    ids = [[1] * length for length in lengths]
    score = function.score(completions, prompt="p", messages=None, columns={"answer": "7"}, completion_ids=ids)
    assert score.rewards == tuple(expected)


def test_a_table_of_rewards_that_cannot_be_is_refused_in_one_line() -> None:
    for options, message in (("of=reasoning_gym", "is unknown; choose one of exact_match, math_verify"), ("discount=0", "must be above 0")):
        with pytest.raises(RewardError, match=message):
            resolve([f"reward_table?{options}"]).score(["a"], prompt="p", messages=None, columns={"answer": "7"}, completion_ids=[[1]])


@pytest.mark.parametrize(("name", "expected"), [
    ("soft_overlong", [0.0, 0.0, -0.5, -1.0, -1.0]),  # 20 tokens, the last fifth of them punished
    ("soft_overlong?cache=10", [0.0, -0.6, -0.8, -1.0, -1.0]),
    ("soft_overlong?longest=18&cache=2", [0.0, 0.0, -1.0, -1.0, -1.0]),
])  # fmt: skip
def test_the_soft_overlong_punishment_falls_from_nothing_to_minus_one(name: str, expected: list[float]) -> None:
    found = resolve([name], max_completion_length=20)
    ids = [[0] * length for length in (10, 16, 18, 20, 21)]
    score = found.score(["x"] * 5, prompt="p", messages=None, columns={}, completion_ids=ids)
    assert score.rewards == pytest.approx(expected)
    assert set(rewards.digests([name])) == {name}


def test_an_option_that_a_function_does_not_take_is_told_before_the_run() -> None:
    with pytest.raises(PluginError, match=r"'soft_overlong\?width=3': got an unexpected keyword argument 'width'"):
        resolve(["soft_overlong?width=3"])
    with pytest.raises(RewardError, match="cache = 9 must be between 1 and longest = 5"):
        resolve(["soft_overlong?cache=9"], max_completion_length=5).score(["a"], prompt="p", messages=None, columns={})


def test_async_functions_are_awaited_together_and_again_in_the_next_call(folder: Path) -> None:
    found = resolve(["mine.py:slowly", "mine.py:slowly"], base_dir=folder)
    for _ in range(2):
        assert found.score(["good", "bad"], prompt="p", messages=None, columns={}).rewards == (2.0, 0.0)


def test_a_conversational_prompt_gives_conversational_completions(folder: Path) -> None:
    found = resolve(["mine.py:talk", "exact_match"], base_dir=folder)
    messages = [{"role": "user", "content": "say good"}]
    assert found.score(["good", "bad"], prompt="p", messages=messages, columns={"answer": "good"}).rewards == (2.0, 0.0)


def test_arrays_and_integers_are_numbers(folder: Path) -> None:
    assert scored(folder, ["array", "sometimes"], ["a", "b"]).components == ((1.0, 1.0), (1.0, 1.0))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("breaks", r"reward mine.py:breaks broke: ZeroDivisionError: .* \(mine.py line \d+\)"),
        ("breaks_slowly", r"reward mine.py:breaks_slowly broke: KeyError: 'gone' \(mine.py line \d+\)"),
    ],
)
def test_what_is_no_reward_is_a_failure_with_its_reason(folder: Path, name: str, words: str) -> None:
    with one_line(RewardError, match=words):
        scored(folder, [name], ["a", "b"])


def test_names_and_weights_are_checked() -> None:
    with pytest.raises(PluginError, match=r"^reward.functions: 'exact_mach' is not a reward function: .*did you mean 'exact_match'"):
        resolve(["exact_mach"])
    with pytest.raises(ValueError, match="expected 2 finite numbers"):
        resolve(["exact_match", "math_verify"], [1.0])
    with pytest.raises(ValueError, match="finite"):
        resolve(["exact_match"], [float("inf")])
    with pytest.raises(ValueError, match="name at least one"):
        resolve([])


def test_the_source_behind_each_reward_has_a_digest(folder: Path) -> None:
    first = rewards.digests(["exact_match", "mine.py:length"], base_dir=folder)
    assert set(first) == {"exact_match", "mine.py:length"}
    (folder / "mine.py").write_text(MINE + "\n")
    second = rewards.digests(["exact_match", "mine.py:length"], base_dir=folder)
    assert second["exact_match"] == first["exact_match"]
    assert second["mine.py:length"] != first["mine.py:length"]


def test_the_example_reward_gives_credit_up_to_the_first_mistake() -> None:
    found = resolve(["own_reward.py:prefix"], base_dir=EXAMPLES)
    score = found.score(["abcd", "abxd", "", "abcdef"], prompt="p", messages=None, columns={"answer": "abcd"})
    assert score.rewards == (1.0, 0.5, 0.0, 4 / 6)


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("so it is \\boxed{18}", "16 - 3 - 4 = 9\n#### 18", 1.0),
        ("#### 18", "#### 18", 1.0),
        ("The answer is 1,000 dollars.", "#### 1,000", 1.0),
        ("17", "#### 18", 0.0),
        ("", "#### 18", 0.0),
        ("no numbers here", "#### 18", 0.0),
        ("$\\frac{2}{4}$", "\\frac{1}{2}", 1.0),
        ("$x^2+1$", "x^2+1", 1.0),
        ("$9^{9^{9^{9}}}$", "#### 18", 0.0),
        ("$10000000!$", "#### 18", 0.0),
        ("18", "####", None),
    ],
)
def test_math_verify_compares_expressions_without_a_clock(completion: str, answer: str, value: float | None) -> None:
    assert BUILTINS["math_verify"]([completion], [answer]) == [value]


@pytest.mark.skipif(not GSM8K.is_file(), reason="no GSM8K beside the repository")
def test_math_verify_finds_every_gsm8k_answer_equal_to_itself_and_not_to_another() -> None:
    with GSM8K.open(encoding="utf-8") as stream:
        answers = [json.loads(next(stream))["answer"] for _ in range(64)]
    verify = BUILTINS["math_verify"]
    assert verify([f"so the answer is \\boxed{{{answer.rsplit('#### ')[-1]}}}." for answer in answers], answers) == [1.0] * 64
    assert verify([f"{answer.rsplit('#### ')[-1]}1" for answer in answers], answers) == [0.0] * 64


@pytest.mark.costly
def test_reasoning_gym_scores_by_the_task_itself() -> None:
    pytest.importorskip("reasoning_gym")
    from penstock.pipeline.data.open import open_dataset

    for task in ("chain_sum", "countdown", "prime_factorization", "knights_knaves"):
        row = open_dataset(f"reasoning-gym:{task}", seed=1, size=4)[2]
        columns = json.loads(json.dumps(row.columns))
        answer = str(columns["answer"])
        completions = [answer, f"I think <answer>4</answer>, no: <answer> {answer} </answer>", "gibberish, one"]
        score = resolve(["reasoning_gym"]).score(completions, prompt=row.prompt or "", messages=None, columns=columns)
        assert score.rewards[:2] == (1.0, 1.0), task
        assert score.rewards[2] < 0.1, task


def test_children_score_groups_and_outlive_what_hangs_crashes_and_prints(folder: Path) -> None:
    init = reward_child.spec(["exact_match", "mine.py:hangs"], [1.0, 0.5], base_dir=folder)
    with closing(ChildPool[str](reward_child.CHILD, size=1, timeout_s=2.0, init=init)) as pool:
        for key, completions in (("good", ["7", "8"]), ("hung", ["7", "hang"]), ("gone", ["exit", "8"]), ("last", ["7", "7"])):
            pool.submit(key, reward_child.payload(completions, prompt="p", messages=None, columns={"answer": "7"}))
        ended: dict[str, Done[str] | Failed[str]] = {}
        while pool.pending:
            ended |= {one.key: one for one in pool.poll(1.0)}
    good, last, hung, gone = (ended[key] for key in ("good", "last", "hung", "gone"))
    assert isinstance(good, Done)
    assert Score.of(good.result) == Score(rewards=(1.5, 0.5), components=((1.0, 1.0), (0.0, 1.0)))
    assert isinstance(last, Done) and isinstance(hung, Failed) and isinstance(gone, Failed)
    assert hung.reason == "reward mine.py:hangs took longer than 2 s and was killed"
    assert gone.reason == "reward mine.py:hangs ended with exit status 3"


def test_a_childs_failure_names_the_reward_and_the_line(folder: Path) -> None:
    with closing(
        ChildPool[int](reward_child.CHILD, size=1, timeout_s=120.0, init=reward_child.spec(["mine.py:breaks"], base_dir=folder))
    ) as pool:
        pool.submit(0, reward_child.payload(["a"], prompt="p", messages=None, columns={}))
        (failed,) = pool.poll(120.0)
    assert isinstance(failed, Failed)
    assert failed.reason.startswith("reward mine.py:breaks broke: ZeroDivisionError: division by zero (mine.py line ")
