"""Control tokens in rendered prompts: the template's are encoded as tokens, the same strings in messages as text.

Control tokens are the added tokens of a tokenizer that are flagged special, and the other added tokens that start with a bracket, such as
`<think>` or `[TOOL]`. The remaining added tokens are words. In an assistant message only the special ones are escaped, because the policy
writes the others itself.
"""

import json
import re
from collections.abc import Iterator, Mapping, Set
from functools import cached_property
from typing import Any

from penstock.pipeline.data.conversation.messages import TemplateRefused

_MARK = "QZJX"
"""Start of the placeholder for a literal while a template renders; ASCII letters, which no filter, JSON or repr changes."""
_MARKS = re.compile(_MARK + r"(\d+)XJZQ")
_JOINT = ""
"""Empty separator: keeps two adjacent texts from forming a control token together."""
_BRACKETS = ("<", "[", "{", "|")


class ControlTokens:
    """Escapes texts before a template renders them, and encodes the rendered text; `tokenizer` is from the `tokenizers` library."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._added = tokenizer, tokenizer.get_added_tokens_decoder()
        self._ids = {token.content: number for number, token in self._added.items()}
        special = {token.content for token in self._added.values() if token.special}
        self._control = special | {content for content in self._ids if content.startswith(_BRACKETS)}
        self._literals = [*sorted(self._control), _MARK, _JOINT]
        self._numbers = {literal: number for number, literal in enumerate(self._literals)}
        self._in_assistant, self._in_texts, self._anywhere = (
            _Finder({_MARK, *special}),
            _Finder({_MARK, *self._control}),
            _Finder({*self._ids}),
        )
        loose = {number for number, token in self._added.items() if token.normalized and token.content in self._control}
        self._loose = loose if tokenizer.normalizer is not None else set()
        """Ids of control tokens that the tokenizer also matches in normalised spellings, such as full-width letters."""

    def escape(self, message: Mapping[str, Any]) -> dict[str, Any]:
        finder = self._in_assistant if message.get("role") == "assistant" else self._in_texts
        return {key: self._escaped(value, finder) for key, value in message.items()}

    def escape_text(self, value: Any) -> Any:
        return self._escaped(value, self._in_texts)

    def jointed(self, value: Any) -> Any:
        """Return the value with separators around texts that could form a control token with adjacent text; roles are unchanged."""
        if isinstance(value, str):
            joint = self._mark(_JOINT)
            prefixes, suffixes = self._edges
            longest = range(1, min(len(value), self._in_texts.longest) + 1)
            before = joint if any(value[:size] in suffixes for size in longest) else ""
            return before + value + (joint if any(value[-size:] in prefixes for size in longest) else "")
        if isinstance(value, Mapping):
            return {key: inner if key == "role" else self.jointed(inner) for key, inner in value.items()}
        return [self.jointed(inner) for inner in value] if isinstance(value, list | tuple) else value

    def joined(self, text: str, apart: str) -> bool:
        """True if a rendered text has control tokens that the same text with separators (`apart`) does not have."""
        return self.restore(text) == self.restore(apart) and self._written(text) != self._written(apart)

    def restore(self, text: str) -> str:
        """Return a rendered text with the literals in place of their placeholders."""
        return _MARKS.sub(lambda mark: self._literals[int(mark[1])], text) if _MARK in text else text

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered text, without the special tokens that the tokenizer would add."""
        if _MARK not in text:
            ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
            if not self._loose or sum(token in self._loose for token in ids) <= sum(
                self._ids[word] in self._loose for word in self._written(text)
            ):
                return ids
        ids, done = [], 0
        for match_start, match_end, content in self._anywhere.find(text):
            start, end = self._with_spaces(text, match_start, match_end, self._added[self._ids[content]])
            if start >= done:
                ids += [*self._as_text(text[done:start], first=done == 0), self._ids[content]]
            done = max(done, end)
        return ids + self._as_text(text[done:], first=done == 0)

    def _escaped(self, value: Any, finder: "_Finder") -> Any:
        if isinstance(value, str):
            return finder.replace(value, self._mark)
        if isinstance(value, Mapping):
            return {self._escaped(key, finder): self._escaped(inner, finder) for key, inner in value.items()}
        return [self._escaped(inner, finder) for inner in value] if isinstance(value, list | tuple) else value

    def _written(self, text: str) -> list[str]:
        return [content for _, _, content in self._anywhere.find(text)]

    def _mark(self, literal: str) -> str:
        return f"{_MARK}{self._numbers[literal]}XJZQ"

    @staticmethod
    def _with_spaces(text: str, start: int, end: int, token: Any) -> tuple[int, int]:
        """Return the range of a token in a text; some tokens include adjacent white space."""
        if token.lstrip:
            start = len(text[:start].rstrip())
        return start, len(text) - len(text[end:].lstrip()) if token.rstrip else end

    def _as_text(self, text: str, *, first: bool) -> list[int]:
        """Return the token ids of a part of a text that has no control tokens; `first`: the part starts the rendered text.

        Raises `TemplateRefused` for a character that can only be encoded as a control token.
        """
        text = self.restore(text)
        plain = self._plain(first)
        ids, done = [], 0
        for start, _, content in self._stubborn.find(text):
            if len(content) == 1:
                raise TemplateRefused(f"the text {content!r} can only be encoded as a control token; remove it")
            ids += plain.encode(text[done : start + 1], add_special_tokens=False).ids
            done = start + 1
        return [*ids, *plain.encode(text[done:], add_special_tokens=False).ids] if done < len(text) else ids

    @cached_property
    def _stubborn(self) -> "_Finder":
        """Control tokens that are also words of the tokenizer's vocabulary; as text they are encoded in two pieces."""
        plain, control = self._plain(False), {self._ids[content] for content in self._control}
        unknown = self._added.keys() & set(plain.encode("\U0010fffe", add_special_tokens=False).ids)
        return _Finder(
            {word for word in self._control if (control - unknown).intersection(plain.encode(word, add_special_tokens=False).ids)}
        )

    @cached_property
    def _plains(self) -> tuple[Any, Any]:
        """Tokenizers without added tokens, for the start of a text and for the rest."""
        settings = json.loads(self._tokenizer.to_str())
        text = json.dumps({**settings, "added_tokens": [], "post_processor": None}, separators=(",", ":"))
        kind = type(self._tokenizer)
        return kind.from_str(text), kind.from_str(text.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"'))

    def _plain(self, first: bool) -> Any:
        return self._plains[not first]

    @cached_property
    def _edges(self) -> tuple[Set[str], Set[str]]:
        """Proper prefixes and suffixes of the control tokens."""
        parts = [(word[:cut], word[cut:]) for word in self._control for cut in range(1, len(word))]
        return {prefix for prefix, _ in parts}, {suffix for _, suffix in parts}


class _Finder:
    """Finds words in a text, leftmost-longest."""

    def __init__(self, words: Set[str]) -> None:
        self._words = words
        self._lengths = sorted({len(word) for word in words}, reverse=True)
        starts = sorted({word[:2] for word in words}, key=len, reverse=True)
        self._starts = re.compile("|".join(map(re.escape, starts)) or "(?!)")
        self.longest = max(self._lengths, default=0)

    def find(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Yield (start, end, word) of each occurrence of a word, without overlaps."""
        done = 0
        for match in self._starts.finditer(text):
            start = match.start()
            if start < done:
                continue
            word = next((text[start : start + size] for size in self._lengths if text[start : start + size] in self._words), None)
            if word:
                done = start + len(word)
                yield start, done, word

    def replace(self, text: str, made: Any) -> str:
        """Return the text with each word replaced by `made(word)`."""
        pieces, done = [], 0
        for start, end, word in self.find(text):
            pieces += [text[done:start], made(word)]
            done = end
        return "".join([*pieces, text[done:]]) if pieces else text
