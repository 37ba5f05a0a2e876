"""Built-in rewards: exact match, mathematical equality, reasoning-gym's scores, the environment's reward, and DAPO's length penalty.

A reward depends on the completion and the row alone, never on time.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from penstock.pipeline.config.plugins import PluginError
from penstock.pipeline.data.references import accepted, matches_reference
from penstock.pipeline.rewards.builtin.final_answer import candidates, last_box


def text_of(completion: str | Sequence[Mapping[str, Any]]) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 if the completion equals the reference answer as text, or in value to a number; surrounding spaces are ignored.

    Example:
        exact_match([" 7\\n", "8", "9.0"], ["7", "7", [8, 9]])  # -> [1.0, 0.0, 1.0]

    Raises:
        InvalidReference: the reference answer is null, empty, or neither text nor number.
    """
    return [float(matches_reference(text_of(completion), gold)) for completion, gold in zip(completions, answer, strict=True)]


def math_verify(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 if the completion's final answer is mathematically equal to the reference answer, or to one of a list.

    None if no reference has a letter or a digit. Raises `InvalidReference` as `exact_match` does.
    docs/reference/mathematics.md defines the final answer and equality.

    Example:
        math_verify(["so it is \\\\boxed{18}", "17"], ["16 + 2\\n#### 18", "18"])  # -> [1.0, 0.0]
    """
    return [_is_correct(text_of(completion), accepted(gold)) for completion, gold in zip(completions, answer, strict=True)]


def reasoning_gym(completions: Sequence[Any], reasoning_gym: Sequence[Mapping[str, Any]], **_: Any) -> list[float]:
    """The task's score, between 0 and 1, of the text in the last `<answer>` tag, else of the completion."""
    return [_task_score(text_of(completion), entry) for completion, entry in zip(completions, reasoning_gym, strict=True)]


def _gym_library() -> Any:
    try:
        import reasoning_gym as library
    except ImportError as error:
        raise PluginError(f"reasoning_gym needs the package reasoning-gym: pip install '.[rewards]' in the checkout ({error})") from error
    return library


@lru_cache(maxsize=1)
def _mathematics() -> Any:
    try:
        from penstock.pipeline.rewards.builtin import math_equal
    except ImportError as error:
        raise PluginError(f"the reward math_verify needs the package mpmath: pip install '.[rewards]' in the checkout ({error})") from error
    return math_equal


def _is_correct(completion: str, accepted_texts: Sequence[str]) -> float | None:
    mathematics = _mathematics()
    texts = [text.rpartition("####")[2] for text in accepted_texts]
    references = [reference for text in texts if mathematics.has_content(reference := last_box(text) or text)]
    if not references:
        return None
    return float(any(mathematics.equal(candidate, reference) for candidate in candidates(completion) for reference in references))


def _task_score(completion: str, entry: Mapping[str, Any]) -> float:
    recipe = {key: value for key, value in entry.items() if key != "index"}
    task, made = _task_entry(json.dumps(recipe, sort_keys=True), entry["index"])
    tagged = re.findall(r"<answer>(.*?)</answer>", completion, flags=re.DOTALL)
    final = (tagged[-1] if tagged else completion).strip()
    try:
        return float(task.score_answer(final, made))
    except (ValueError, KeyError, IndexError, TypeError, SyntaxError, ZeroDivisionError):
        # Some tasks raise on malformed text. If the task can score its own answer, the completion is malformed.
        task.score_answer(made["answer"], made)
        return 0.0


@lru_cache(maxsize=64)
def _task_entry(recipe: str, index: int) -> tuple[Any, Any]:
    from penstock.pipeline.data.generated import make_task

    task = make_task(recipe)
    return task, task[index]


def soft_overlong(
    completion_lengths: Sequence[int], max_completion_length: int, *, longest: int | None = None, cache: int | None = None
) -> list[float]:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to `longest` - `cache` tokens, then falling to -1.

    Defaults: `longest` is `sampling.max_new_tokens`, `cache` is a fifth of it, as in the paper.

    Example:
        soft_overlong([6, 9, 10, 12], 10, cache=4)  # -> [0.0, -0.75, -1.0, -1.0]
    """
    end = max_completion_length if longest is None else longest
    width = max(1, end // 5) if cache is None else cache
    if not 0 < width <= end:
        raise ValueError(f"soft_overlong: cache = {width} has to lie between 1 and longest = {end}")
    return [-min(1.0, max(0.0, (length - (end - width)) / width)) for length in completion_lengths]


def environment(environment_reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """The environment's reward: the sum over a trajectory's turns."""
    return list(environment_reward)


BUILTINS: dict[str, Callable[..., Any]] = {
    "environment": environment,
    "exact_match": exact_match,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    "soft_overlong": soft_overlong,
}
NEED_REFERENCE = ("exact_match", "math_verify")
"""Rewards that need a reference answer in every row."""
WARM_UPS: dict[str, Callable[[], Any]] = {"math_verify": _mathematics, "reasoning_gym": _gym_library}
"""Slow imports, done before the time limit of the first call starts."""
