r"""Finds the final answer in a completion: the last box, `####`, `<answer>`, "the answer is", else the last expression of the text."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
_TAIL = 8_000
"""Characters at the end of a completion in which an answer without a mark is looked for."""
_BOLD = re.compile(r"\*\*(?=\W|$)|(?<![\w)])\*\*")
_ANNOUNCED = re.compile(
    r"\b(?:answers?|option|choice)\b(?:[^\n.:=]{0,60}?\b(?:is|are|equals)\b|[ *_]*[:=]|[ *_]*\n)[\s:*_]*(?=[^\s.*_:])", re.IGNORECASE
)
_DELIMITED = re.compile(r"\$\$[^$]{1,500}\$\$|(?<!\\)\$(?:\\\$|[^$\n]){1,500}(?<!\\)\$|\\\[.{1,500}?\\\]|\\\(.{1,500}?\\\)", re.DOTALL)
_JOINED_BY = re.compile(r"\$\s*(?:,?\s*(?:and|or)|,)\s*\$")
_SENTENCE_END = re.compile(r"[.;](?=\s|$)|\n\s*\n")
_DOUBT = re.compile(r"\b(?:know|sure|unsure|unknown|unclear|cannot|can't|couldn't|no idea|guess|impossible|undetermined)\b", re.IGNORECASE)
_DENIAL = re.compile(r"(?:\bnot|n't|\bnever|\bneither|\bnor)\b[\w\s]{0,20}$", re.IGNORECASE)
_MATH_WORD = re.compile(r".*(?:\d|\\[a-zA-Z]|\$).*|[-+*/^=<>|()≤≥±]+|[b-zB-HJ-Z]|or", re.DOTALL)


def final_answers(text: str) -> list[str]:
    r"""What may be meant as the answer of a completion, best first; empty if it gives none.

    Example:
        final_answers(r"\boxed{3} first, then \boxed{4}")  # -> ["4"]
    """
    text = text.rpartition("</think>")[2].strip() or text
    if "</answer>" in text:
        text = text.rpartition("</answer>")[0].rpartition("<answer>")[2]
    box = last_box(text)
    if box is not None:
        return [box] if box.strip() else []
    if "####" in text:
        return [text.rpartition("####")[2].strip().partition("\n")[0]]
    text = re.sub(r"\b([ap])\.m\.", r"\1m", text[-_TAIL:].strip())
    text = _JOINED_BY.sub(", ", _BOLD.sub("", re.sub(_BOX.pattern + r"\{?", "", text)))
    announced = list(_ANNOUNCED.finditer(text))
    if announced:
        start = announced[-1].end()
        before, tail = _SENTENCE_END.split(text[max(0, start - 200) : start])[-1], _sentences(text[start:])[0]
        return [] if _DOUBT.search(before) else [tail, *_expressions(tail)[:1]]
    whole = [text] if "\n" not in text else []
    if not re.search(r"[A-Za-z]{2}", text):
        return whole
    last = next((part for part in reversed(_sentences(text)) if _expressions(part)), "")
    return whole + ([] if _DOUBT.search(last) else _expressions(last)[-1:])


def last_box(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` or `\fbox{...}`; None if there is none."""
    closed, opened = dict[int, int](), list[int]()
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closed[opened.pop()] = match.start()
    for match in reversed(list(_BOX.finditer(text))):
        if match.end() in closed:
            return text[match.end() + 1 : closed[match.end()]]
        bare = re.match(r"[^\s$.,{]+", text[match.end() : match.end() + 50])
        if bare:
            return bare[0]
    return None


def _one_word(text: str) -> str:
    """The text with each delimited formula as one word."""
    return _DELIMITED.sub(lambda match: re.sub(r"\s+", "~", match[0]), text)


def _sentences(text: str) -> list[str]:
    return [part for part in _SENTENCE_END.split(_one_word(text)) if part.strip()] or [""]


def _expressions(text: str) -> list[str]:
    """The expressions among the words of a sentence, each the part after its last equals sign, without those that it denies."""
    expressions, words, start = [], list[str](), 0
    for match in re.finditer(r"\S+", text + " END"):
        word = match[0]
        if _MATH_WORD.fullmatch(word):
            start = start if words else match.start()
            words.append(word.rstrip(",;:?"))
            if word[-1] not in ",;:?":
                continue
        expression = " ".join(words)
        if re.search(r"\d|\\[a-zA-Z]|\$", expression) and not _DENIAL.search(text[max(0, start - 40) : start]):
            expressions.append(expression if re.search(r"\$|\\\(", expression) else expression.rpartition("=")[2])
        words = []
    return expressions
