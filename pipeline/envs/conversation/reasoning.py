"""Thinking, apart from what a model says aloud."""

import re

_HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?P<head>[^<]*)(?:<\|channel\|>(?P<channel>[^<]*))?(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>(?P<body>.*?)(?=<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>|$)(?:<\|(?:end|call|return)\|>)?",
    re.DOTALL,
)


def split_reasoning(text: str, *, opened: bool) -> tuple[str | None, str]:
    """What stands in `<think>` ... `</think>`, None without it, and the rest.

    `opened`: the prompt ends inside of it. Thinking that was cut off has no rest.
    """
    opened = opened or text.lstrip().startswith("<think>")
    if not opened and "</think>" not in text:
        return None, text
    reasoning, _, rest = text.partition("</think>")
    return reasoning.lstrip().removeprefix("<think>").strip("\n"), rest.lstrip("\n")


def split_harmony(text: str) -> tuple[str | None, str]:
    """The "analysis" channel of gpt-oss, None without it, and the rest: the other channels' text, calls of tools as written."""
    if "<|message|>" not in text:
        return None, text
    thoughts: list[str] = []
    rest: list[str] = []
    for message in _HARMONY.finditer(text):
        channel = f"{message['head'] or ''} {message['channel'] or ''}"
        if "to=" in channel:
            rest.append(message[0])
        else:
            (thoughts if "analysis" in channel else rest).append(message["body"])
    return "\n".join(thoughts) if thoughts else None, "".join(rest)
