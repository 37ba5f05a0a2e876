"""Built-in rewards: functions of the completion and the row alone, never of time."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from penstock.pipeline.config.plugins import PluginError
from penstock.pipeline.data.references import accepted, matches_reference
from penstock.pipeline.rewards.builtin.math_text import NUMBER_WORD, is_unit

_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
_TAIL = 8_000
"""Characters at the end of a completion that are searched for an unmarked answer."""
_MARKDOWN = re.compile(r"\*\*(?=\W|$)|(?<![\w)])\*\*|^\s*(?:```\w*|[*•] )", re.MULTILINE)
_MONEY = re.compile(r"\\\$|\$(?=\d[\d,.]*(?:[\s.,;:?!)*/=+-]|$))(?![^$\n]{1,500}[^\s$]\$)")
_WIDE = str.maketrans({"\u3002": ". ", "\uff0c": ", ", "\uff1a": ":", "\uff1b": "; ", "\uff01": "!", "\uff1f": "?", "\u6216": " or "})
"""Chinese punctuation, and the word "or"."""
_SYMBOLS = re.compile("[\u2600-\u27bf\ufe0f\U0001f300-\U0001faff]")
_EMPHASIS = re.compile(r"(?<![\w*])([*_'])([^\s*_']{1,100})\1(?![\w*])")
_ANNOUNCED = re.compile(
    r"\b(?:answers?|option|choice)\b(?:[^\n.:=]{0,60}?\b(?:is|are|equals)\b|[ *_]*[:=]|\s[-–—]\s|[ *_]*\n)[\s:*_]*(?=[^\s.*_:])"
    r"|\u7b54\u6848[^\n.:=\d]{0,10}?[\u662f\u4e3a\u70ba:][\s:*_]*|\b(?:options?|choices?|choose|select|pick)\s(?:option\s)?(?=\(?[A-J]\)?\.?$)",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[A-Za-z', ]{0,100}\b(?:is|are|equals|answer:)(?=[\s:])[\s:]*(.*)", re.DOTALL | re.IGNORECASE)
_DELIMITED = re.compile(r"\$\$[^$]{1,500}\$\$|(?<!\\)\$(?:\\\$|[^$\n]){1,500}(?<!\\)\$|\\\[.{1,500}?\\\]|\\\(.{1,500}?\\\)", re.DOTALL)
_TUPLE = re.compile(r"[(\[](?:[-+]?(?:\d[\d./^]*|\\?[a-zπ∞]\w*)(?:,\s+(?=.{1,99}[)\]])|(?=[)\]]))){2,9}[)\]]")
_JOINED_BY = re.compile(r"\$\s*(?:,?\s*(?:and|or)|,)\s*\$")
_NEXT_NUMBER = re.compile(r"((?:^|(?<=\s))\$?-?\d[\d.]*[,;])\s+(?=-?\d[\d.]*(?:[\s,;]|$))")
_OR = re.compile(r"(?:[.,;?!]?\s(?:or|Or)(?:\s(?:maybe|perhaps|possibly|even|else|rather|also))?|,\s(?P<and>and))\s")
_SENTENCE_END = re.compile(r"(?<=[.;?])(?=\s|$)|(?<=[^\s!])!+(?=\s*$|\s+[^a-z\s\d=+*/<>-])|\n\s*\n")
_DOUBT = re.compile(
    r"\b(?:know|sure|unsure|unknown|unclear|cannot|can't|couldn't|no idea|guess|impossible|undetermined|were)\b"
    r"|\b(?:if|whether)(?: (?:the|my|your|this|that|final|correct|right)){0,3} $",
    re.IGNORECASE,
)
_TASK = re.compile(
    r"\b(?:what|how|which|who|when|where)\b.*\?$|^\W*(?:find|calculate|compute|determine|evaluate|solve|simplify)\b[^=]*$",
    re.IGNORECASE | re.DOTALL,
)
_DENIAL = re.compile(
    r"(?:\bnot|n't|\bnever|\bneither|\bnor|\bthan|\bone of|\banything but|\bor)\b(?:(?!\bbut\b)[\w\s]){0,20}$", re.IGNORECASE
)
_JOINS = ("or", "and", "to")
_MATH_WORD = re.compile(rf".*(?:\d|\\[a-zA-Z]|\$).*|[-+*/^=<>|()≤≥±]+|[b-zB-HJ-Z]|(?i:{NUMBER_WORD}|half)\W?", re.DOTALL)


def candidates(text: str) -> list[str]:
    r"""Return the texts that may be the final result of a completion, most likely first; empty if it gives none or is in doubt.

    Example:
        candidates(r"\boxed{3} first, then \boxed{4}")  # -> ["4"]
    """
    text = text.rpartition("</think>")[2].strip() or text
    if "</answer>" in text:
        text = text.rpartition("</answer>")[0].rpartition("<answer>")[2]
    marked = last_box(text)
    if marked is None and "####" in text:
        marked = text.rpartition("####")[2].strip().partition("\n")[0]
    if marked is None:
        return _in_prose(text[-_TAIL:])
    plain = re.sub(r"\\text\w*\s*\{([^{}]*)\}", r" \1 ", marked[:_TAIL]).strip()
    sentence = _SENTENCE.fullmatch(plain)
    clear = sentence and not _DOUBT.search(plain) and len(re.findall(r"(?i)\b(?:is|are|not|or|equals)\b|answer:|\?", plain)) == 1
    return ([marked, sentence[1]] if sentence and clear else [marked]) if marked.strip() else []


def _in_prose(text: str) -> list[str]:
    """Return the possible final results in a text without a box or tag, from its last sentences; empty if it has none."""
    text = re.sub(r"\b([ap])\.m\.", r"\1m", re.sub(_BOX.pattern + r"\{?", "", text.translate(_WIDE).strip()))
    text = _SYMBOLS.sub("", _MONEY.sub("", text)).replace(" or so", "").replace(" and a half", " and one half")
    text = _JOINED_BY.sub(", ", _EMPHASIS.sub(r"\2", _MARKDOWN.sub("", text)).strip())
    text = _NEXT_NUMBER.sub(r"\1~", _OR.sub(lambda match: f" {match['and'] or 'or'} ", text))
    whole = [text] if "\n" not in text else []
    announced = list(_ANNOUNCED.finditer(text))
    if not announced and not re.search(r"[A-Za-z]{2}", text):
        return whole
    if announced:
        start, end = announced[-1].span()
        before, tail = _SENTENCE_END.split(text[max(0, start - 200) : start])[-1], _sentences(text[end:])[0]
        return [] if _DOUBT.search(before) or _DOUBT.search(announced[-1][0]) else [tail, *_expressions(tail)[:1]]
    sentences = _sentences(text)
    if _TASK.search(sentences[-1]):
        return []
    last = next((part for part in reversed(sentences) if not part.endswith("?") and _expressions(part)), "")
    return whole + ([] if _DOUBT.search(last) else _expressions(last)[-1:])


def last_box(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` or `\fbox{...}`; None if there is none."""
    closed, opened = dict[int, int](), list[int]()
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closed[opened.pop()] = match.start()
    last, end = None, -1
    for match in _BOX.finditer(text):
        start = match.end()
        bare = re.compile(r"[^\s$.,{]+").match(text, start, start + 50)
        if closed.get(start, -1) > end:
            last, end = text[start + 1 : closed[start]], closed[start]
        elif bare and bare.end() > end:
            last, end = bare[0], bare.end()
    return last


def _sentences(text: str) -> list[str]:
    """Split a text into sentences, with the spaces in each delimited formula and each tuple replaced by `~`."""
    for whole in (_DELIMITED, _TUPLE):
        text = whole.sub(lambda match: re.sub(r"\s+", "~", match[0]), text)
    return [part.strip() for part in _SENTENCE_END.split(text) if part.strip()] or [""]


def _expressions(text: str) -> list[str]:
    """Return the mathematical expressions of a sentence, without those that it denies; a number in words only if none has digits.

    An equation is reduced to the part after its last equals sign.
    """
    expressions, words, start = [], list[str](), 0
    for match in re.finditer(r"\S+", text + " END"):
        word = match[0]
        if _MATH_WORD.fullmatch(word) or (words and (word in _JOINS or is_unit(word.rstrip(".,;:?")))):
            start = start if words else match.start()
            words.append(word.rstrip(".,;:?"))
            if word[-1] not in ",;:?":
                continue
        while words and words[-1] in _JOINS:
            words = [] if words[-1] == "or" else words[:-1]
        expression = " ".join(words)
        if words and not _DENIAL.search(text[max(0, start - 40) : start]):
            expressions.append(expression if re.search(r"\$|\\\(| or ", expression) else expression.rpartition("=")[2])
        words = []
    in_digits = [expression for expression in expressions if re.search(r"\d|\\[a-zA-Z]|\$", expression)]
    in_words = [expression for expression in expressions if re.search(rf"(?i){NUMBER_WORD}", expression) and expression != "one"]
    return in_digits or (in_words if len(in_words) == 1 else [])


def text_of(completion: str | Sequence[Mapping[str, Any]]) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """Return 1.0 if the completion equals the reference answer as text, or in value if that is a number, else 0.0.

    Spaces around them are ignored. Raises `InvalidReference` if the reference answer is null, empty, or neither text nor number.

    Example:
        exact_match([" 7\\n", "8", "9.0"], ["7", "7", [8, 9]])  # -> [1.0, 0.0, 1.0]
    """
    return [float(matches_reference(text_of(completion), gold)) for completion, gold in zip(completions, answer, strict=True)]


def math_verify(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """Return 1.0 if the completion's final answer is mathematically equal to the reference answer, or to one of a list, else 0.0.

    None if no reference has a letter or a digit. Raises `InvalidReference` as `exact_match` does. docs/reference/mathematics.md defines the
    final answer and equality.

    Example:
        math_verify(["so it is \\\\boxed{18}", "17"], ["16 + 2\\n#### 18", "18"])  # -> [1.0, 0.0]
    """
    return [_is_correct(text_of(completion), accepted(gold)) for completion, gold in zip(completions, answer, strict=True)]


def reasoning_gym(completions: Sequence[Any], reasoning_gym: Sequence[Mapping[str, Any]], **_: Any) -> list[float]:
    """Return the score, 0 to 1, that the row's task gives to the text in the last `<answer>` tag, or to the full completion without one."""
    return [_task_score(text_of(completion), entry) for completion, entry in zip(completions, reasoning_gym, strict=True)]


def _gym_library() -> Any:
    """Import reasoning-gym. Raises `PluginError` if it is not installed."""
    try:
        import reasoning_gym as library
    except ImportError as error:
        raise PluginError(f"reasoning_gym needs the package reasoning-gym: pip install '.[rewards]' in the checkout ({error})") from error
    return library


@lru_cache(maxsize=1)
def _mathematics() -> Any:
    """Import the comparison of results, which needs mpmath. Raises `PluginError` if that is not installed."""
    try:
        from penstock.pipeline.rewards.builtin import math_equal
    except ImportError as error:
        raise PluginError(f"the reward math_verify needs the package mpmath: pip install '.[rewards]' in the checkout ({error})") from error
    return math_equal


def _is_correct(completion: str, accepted_texts: Sequence[str]) -> float | None:
    """Return 1.0 if a final result of the completion equals an accepted one, else 0.0; None if no accepted text can be compared.

    An accepted text is reduced to the part after `####`, as in GSM8K, and to its last box.
    """
    mathematics = _mathematics()
    texts = [text.rpartition("####")[2] for text in accepted_texts]
    references = [reference for text in texts if mathematics.has_content(reference := last_box(text) or text)]
    if not references:
        return None
    return float(any(mathematics.equal(candidate, reference) for candidate in candidates(completion) for reference in references))


def _task_score(completion: str, entry: Mapping[str, Any]) -> float:
    """Return reasoning-gym's score of one completion. `entry` is the column `reasoning_gym`: the task's recipe and the row's index."""
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
    """Return the data set of a recipe (JSON) and its entry `index`."""
    from penstock.pipeline.data.open import make_task

    task = make_task(recipe)
    return task, task[index]


def soft_overlong(
    completion_lengths: Sequence[int], max_completion_length: int, *, longest: int | None = None, cache: int | None = None
) -> list[float]:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to `longest` - `cache` tokens, then falling to -1.

    Defaults: `longest` is `sampling.max_new_tokens`, `cache` is a fifth of it, as in the paper.

    Example:
        soft_overlong([6, 9, 10, 12], 10, cache=4)  # -> [0.0, -0.75, -1.0, -1.0]
    """
    end = max_completion_length if longest is None else longest
    width = max(1, end // 5) if cache is None else cache
    if not 0 < width <= end:
        raise ValueError(f"soft_overlong: cache = {width} must be between 1 and longest = {end}")
    return [-min(1.0, max(0.0, (length - (end - width)) / width)) for length in completion_lengths]


def reward_table(
    completions: Sequence[Any],
    answer: Sequence[Any],
    completion_lengths: Sequence[int],
    max_completion_length: int,
    *,
    of: str = "math_verify",
    discount: float = 1.0,
    correct: float = 1.0,
    wrong: float = 0.0,
    missing: float | None = None,
    truncated: float | None = None,
) -> list[float | None]:
    """A reward by status (PipelineRL, arXiv 2509.19128): `correct` times `discount` per token, `wrong`, or `missing`.

    `of` decides: `math_verify` or `exact_match`; only `math_verify` has the third status. `truncated` replaces `wrong` and `missing` of a
    completion that ran to the limit of tokens. Defaults: `missing` is `wrong`, `truncated` changes nothing.

    Example:
        reward_table(["7", "8"], ["7", "7"], [2, 2], 16, of="exact_match", discount=0.9, wrong=-0.5)  # -> [0.81, -0.5]
    """
    successes: dict[str, Callable[..., Sequence[float | None]]] = {"exact_match": exact_match, "math_verify": math_verify}
    if of not in successes:
        raise ValueError(f"reward_table: of = {of!r} is unknown; choose one of {', '.join(successes)}")
    if not 0 < discount <= 1:
        raise ValueError(f"reward_table: discount = {discount} must be above 0 and at most 1")

    def reward(success: float | None, completion: Any, length: int) -> float | None:
        """The reward of one completion by its status and length."""
        if success is None:
            return None
        if success:
            return correct * discount**length
        if truncated is not None and length >= max_completion_length:
            return truncated
        if missing is not None and of == "math_verify" and not candidates(text_of(completion)):
            return missing
        return wrong

    return [reward(*each) for each in zip(successes[of](completions, answer), completions, completion_lengths, strict=True)]


def environment(environment_reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """Return the environment's reward, which is the sum over a trajectory's turns."""
    return list(environment_reward)


BUILTINS: dict[str, Callable[..., Any]] = {
    "environment": environment,
    "exact_match": exact_match,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    "reward_table": reward_table,
    "soft_overlong": soft_overlong,
}
NEED_REFERENCE = ("exact_match", "math_verify", "reward_table")
"""Rewards that need a reference answer in every row."""
WARM_UPS: dict[str, Callable[[], Any]] = {"math_verify": _mathematics, "reasoning_gym": _gym_library, "reward_table": _mathematics}
"""Slow imports, done before the time limit of the first call starts."""
