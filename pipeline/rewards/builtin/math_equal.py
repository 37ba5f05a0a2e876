"""Compares two written answers for mathematical equality, after reading each as words, a quantity, a list, a matrix or an equation."""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from penstock.pipeline.rewards.builtin.math_parser import (
    FUNCTIONS,
    GREEK,
    MAX_CHARACTERS,
    MINUS_ONE,
    Tree,
    Unreadable,
    parse,
    proportional,
    renamed,
    same_value,
    symbols,
    value,
)
from penstock.pipeline.rewards.builtin.math_text import ROW_END, UNITS, compact, normalised

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DATE_OR_TIME = re.compile(r"\d{1,2}:\d\d(?::\d\d)?(?: ?[ap]m)?|\d{4}-\d\d-\d\d|\d{1,2}/\d{1,2}/\d{4}", re.IGNORECASE)
_RELATION = re.compile(r"(\\(?:le|ge|ne|in|approx|equiv)\b|<=|>=|!=|=|<|>)")
_OPERATORS = {r"\le": "<=", r"\ge": ">=", r"\ne": "!=", r"\approx": "=", r"\equiv": "=", r"\in": "="}
_SEPARATOR = re.compile(r",|;|\\cup\b|\band\b|\bor\b")
_MATRIX = re.compile(r"\\begin ?\{(?:[bpvBV]?matrix|array)\}(?: ?\{[clr|]*\})?(.*)\\end ?\{\w+\}", re.DOTALL)
_SYMBOL_NAME = (
    r"(?:(?:m ?)?\\[a-zA-Z]+(?: ?[A-Za-z]+| ?\{[A-Za-z]+\})?|\\frac ?\{d ?\w?\} ?\{d ?\w\}|[A-Za-z]+)"
    r"'?(?: ?_ ?(?:\w|\{[^{}]*\}))?(?: ?\^ ?\{-1\})?(?: ?\([\w, ]+\))?"
)
_NAME = re.compile(rf"{_SYMBOL_NAME}(?: ?[-+] ?{_SYMBOL_NAME})*|\([A-Za-z](?: ?, ?[A-Za-z])+\)")
_UNIT = re.compile(
    r"(.*(?:[\d)}]|\\pi(?! *hr?\b)))\s*(?:(?=[a-zA-Z]{2})|(?<=\s))([a-zA-Z]+°?)(?: ?\^ ?\{?(-?\d)\}?)?"
    r"((?:\.?(?:\s+|\s*(?:/|\\times) ?)[a-zA-Z]+\.?(?: ?\^ ?\{?-?\d\}?)?)*)",
    re.DOTALL,
)
_MODULO = re.compile(r"(.*?\S) ?\(?(?:\\[bp]?mod|mod) ?\{?(\w+)\}?\)?")
_RATIO = re.compile(r"^([^:]+?)(?::| to )([^:]+)$")
_PRODUCT = re.compile(r"(?=.{2,3}$)(?:[b-df-hj-np-tv-z]+|[a-z]*[xzq][a-z]*|[abc]{2})")
"""Letters that are a product of symbols and not a word."""
_MATH_NAME = re.compile(rf"{FUNCTIONS}|{GREEK}|pi|and|or")


class Words(NamedTuple):
    """A text of words, a date or a time."""

    words: tuple[str, ...]


class Quantity(NamedTuple):
    """An expression, its tree if it can be parsed, and its unit if that is in `UNITS`: base unit, power, size in the base unit."""

    text: str
    tree: Tree | None
    unit: tuple[str, int, Fraction] | None = None


class Group(NamedTuple):
    """Items between brackets, which are empty for a list without brackets, and `"|"` for a matrix and its rows."""

    opening: str
    items: "tuple[Reading, ...]"
    closing: str


class Relation(NamedTuple):
    """An equation or inequality: its sides, the difference of their trees if they can be parsed, and the reading of its right side."""

    left: str
    operator: str
    difference: Tree | None
    right: "Reading"
    named: bool
    """True if the left side is a name or has no symbols, as in `x = 3` and `5 + 4 = 9`."""


Reading = Words | Quantity | Group | Relation


def read(text: str, depth: int = 0) -> Reading:
    """Parse a normalised text as words, a quantity, a group or a relation; `depth` is the number of enclosing brackets."""
    text = text.rstrip(" .").lstrip()
    if depth > 8:
        return Quantity(text, None)
    if _DATE_OR_TIME.fullmatch(text) or _is_date(text):
        return Words(_words_of(text))
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        rows = [row for row in matrix[1].split(ROW_END) if row.strip()]
        return Group("|", tuple(Group("|", tuple(read(cell, depth + 1) for cell in row.split("&")), "|") for row in rows), "|")
    parts = split(text, _SEPARATOR)
    if len(parts) > 1:
        return _list(tuple(read(part, depth + 1) for part in parts if part.strip()))
    sides = split(text, _RELATION)
    if len(sides) > 2:
        return _relation(sides, depth)
    if re.search(r"\\(?:pm|mp)\b", text):
        signs = (("+", "-"), ("-", "+"))
        return Group("", tuple(read(text.replace(r"\pm", up).replace(r"\mp", down), depth + 1) for up, down in signs), "")
    return _bracketed(text, depth) or _quantity(text) or Words(_words_of(text))


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split a text at separators outside of brackets; a separator with a capturing group is part of the result."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(rf"(?P<bracket>\\[{{}}]|[()\[\]{{}}])|{separator.pattern}", text):
        if match["bracket"]:
            depth += 1 if match[0][-1] in "([{" else -1
        elif depth == 0:
            parts += [text[start : match.start()], *([match[0]] if separator.groups else [])]
            start = match.end()
    return [*parts, text[start:]]


def _list(items: tuple[Reading, ...]) -> Reading:
    """Return a list without brackets as a group, or its only item; the name in `x = 1, 2` is dropped."""
    first, *others = items or (Quantity("", None),)
    if isinstance(first, Relation) and first.named and others and not any(isinstance(item, Relation) for item in others):
        items = (first.right, *others)
    return items[0] if len(items) == 1 else Group("", items, "")


def _relation(sides: list[str], depth: int) -> Reading:
    """Return a relation, or the interval that it describes; `sides` alternate with operators. `1/3 ≈ 0.33` is read as `1/3`."""
    if sides[-2] == r"\approx" and not _NAME.fullmatch(sides[-3].strip()):
        return read("".join(sides[:-2]), depth + 1)
    operators = [_OPERATORS.get(operator, operator) for operator in sides[1::2]]
    values = [side.strip() for side in sides[::2]]
    interval = _interval(values, operators, depth)
    if interval:
        return interval
    left, right = values[0], values[-1]
    operator = operators[-1] if set(operators) != {"="} else "="
    if operator == "=" and _NAME.fullmatch(right) and not _NAME.fullmatch(left):
        left, right = right, left
    if operator in (">", ">="):
        left, right, operator = right, left, operator.replace(">", "<")
    trees = [tree_of(side) for side in (left, right)]
    difference = None if None in trees else ("add", trees[0], ("mul", MINUS_ONE, trees[1]))
    named = operator == "=" and (_NAME.fullmatch(left) is not None or (trees[0] is not None and not symbols(trees[0])))
    return Relation(left, operator, difference, read(right, depth + 1), named)


def _interval(values: list[str], operators: list[str], depth: int) -> Group | None:
    """Return the interval of `x > a` or `a < x < b`, or both intervals of `x != a`; None for other relations."""
    if operators == ["!="] and re.fullmatch("[a-zA-Z]", values[0]):
        excluded, below, above = read(values[1], depth + 1), read(r"-\infty"), read(r"\infty")
        return Group("", (Group("(", (below, excluded), ")"), Group("(", (excluded, above), ")")), "")
    if any(operator not in ("<", "<=", ">", ">=") for operator in operators) or len({operator[0] for operator in operators}) != 1:
        return None
    if operators[0].startswith(">"):
        values, operators = values[::-1], [operator.replace(">", "<") for operator in operators[::-1]]
    if len(values) == 2:
        if re.fullmatch("[a-zA-Z]", values[0]):
            values, operators = [r"-\infty", *values], ["<", *operators]
        else:
            values, operators = [*values, r"\infty"], [*operators, "<"]
    if len(values) != 3 or not re.fullmatch("[a-zA-Z]", values[1]):
        return None
    opening, closing = "(" if operators[0] == "<" else "[", ")" if operators[1] == "<" else "]"
    return Group(opening, (read(values[0], depth + 1), read(values[2], depth + 1)), closing)


def _bracketed(text: str, depth: int) -> Reading | None:
    """Return a set, tuple or interval, or the content of redundant brackets; None for other texts."""
    if text.replace(" ", "") in (r"\emptyset", r"\{\}"):
        return Group("{", (), "}")
    whole = re.fullmatch(r"(\\\{|[(\[{])(.*?)(\\\}|[)\]}])", text, re.DOTALL)
    if not whole or not _closes_at_end(text):
        return None
    opening, closing = whole[1][-1], whole[3][-1]
    parts = split(whole[2], re.compile(",|;"))
    if len(parts) > 1 or whole[1] == r"\{":
        return Group(opening, tuple(read(part, depth + 1) for part in parts), closing)
    return read(whole[2], depth + 1) if (opening, closing) in (("{", "}"), ("(", ")"), ("[", "]")) and whole[2].strip() else None


def _closes_at_end(text: str) -> bool:
    """True if the first bracket of a text is closed by its last character."""
    depth = 0
    for match in re.finditer(r"[()\[\]{}]", text):
        depth += 1 if match[0] in "([{" else -1
        if depth == 0:
            return match.end() == len(text)
    return False


def _quantity(text: str) -> Quantity | None:
    """Return an expression with or without a unit; None for words."""
    modulo = _MODULO.fullmatch(text)
    if modulo:
        return Quantity(modulo[1], tree_of(modulo[1]), (f"modulo {modulo[2]}", 1, Fraction(1)))
    unit = _UNIT.fullmatch(text)
    if unit and not _has_words(unit[1], 2):
        tree = tree_of(unit[1])
        if (
            tree is not None
            and (len(unit[2]) > 1 or (unit[2] in UNITS and not symbols(tree)) or (unit[2] == "a" and unit[4]))
            and not _MATH_NAME.fullmatch(unit[2])
        ):
            name = unit[2] if unit[2] in UNITS else unit[2].lower().removesuffix("s")
            base = UNITS.get(name) if not unit[4].strip(". ") else None
            power = int(unit[3] or 1)
            return Quantity(unit[1], tree, base and (base[0], power, base[1] ** power))
    if not _PRODUCT.fullmatch(text) and _has_words(text, 4 if re.search(r"[\d+*/^=<>\\]", text) else 2):
        return None
    return Quantity(text, tree_of(_RATIO.sub(r"(\1)/(\2)", text)))


def tree_of(text: str) -> Tree | None:
    """Parse an expression; None if it cannot be parsed."""
    try:
        return parse(text)
    except Unreadable:
        return None


def _has_words(text: str, length: int) -> bool:
    runs = re.findall(r"[a-zA-Z]+", re.sub(r"\\[a-zA-Z]+", " ", text))
    return any(len(run) >= length and not _MATH_NAME.fullmatch(run) for run in runs)


def _is_date(text: str) -> bool:
    return any(word[:3].lower() in _MONTHS for word in re.findall(r"[A-Za-z]{3,9}", text)) and re.search(r"\d", text) is not None


def _words_of(text: str) -> tuple[str, ...]:
    """Return the words of a text in lower case and singular, without articles and leading zeros; those of a date are sorted."""
    plain = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b|\b(?:the|an?)\s", "", re.sub(r"\\[a-zA-Z]+", " ", text).lower())
    words = [re.sub(r"(?<=[a-z]{3})s$", "", word.lstrip("0")) or "0" for word in re.findall(r"[^\W\d_]+|\d+", plain)]
    if _is_date(text):
        return tuple(sorted(word[:3] if word[:3] in _MONTHS else word for word in words))
    return tuple(words)


_CHOICE = re.compile(r"(?:[Oo]ption |[Cc]hoice )?(?:\(?([A-J])(?:\)|[.:](?=\s|$))(?:\s.*)?|\(([a-j])\)|([A-J]))", re.DOTALL)
_FUNCTION = re.compile(r"[a-zA-Z] ?\( ?([a-z]) ?\)")
_MAX_ITEMS = 30


def equal(first: str, second: str) -> bool:
    """True if two answers, in LaTeX or plain text, are equal; symmetric, and False for texts without content."""
    if max(len(first), len(second)) > 2 * MAX_CHARACTERS:
        return first.strip() == second.strip()
    plain = [normalised(text) for text in (first, second)]
    if not (has_content(first) and has_content(second)):
        return False
    choices = [_CHOICE.fullmatch(text) for text in plain]
    if choices[0] and choices[1]:
        first_option, second_option = (next(filter(None, choice.groups())).upper() for choice in choices if choice)
        return first_option == second_option
    # `100,200` may be two numbers. `1,000` stays one number, because numbers in a list do not start with 0.
    lists = [normalised(text, thousands=re.search(r",0\d\d", text) is not None) for text in (first, second)]
    readings = [{text: None, as_list: None} for text, as_list in zip(plain, lists, strict=True)]
    return any(compact(a) == compact(b) or _same(read(a), read(b)) for a in readings[0] for b in readings[1])


def has_content(text: str) -> bool:
    """True if the text has a letter, a digit or an empty set."""
    return re.search(r"[^\W_]|\\\{ ?\\\}|\N{EMPTY SET}", text) is not None


def _same(first: Reading, second: Reading) -> bool:
    """True if two parsed texts are equal. A relation such as `x = 3` equals its right side, and a group of one item equals the item."""
    match first, second:
        case Relation(), Relation():
            return _same_relation(first, second)
        case (Relation() as relation, other) | (other, Relation() as relation):
            return relation.named and _same(relation.right, other)
        case Group(), Group():
            return _same_group(first, second)
        case (Group() as group, other) | (other, Group() as group):
            return len(group.items) == 1 and group.opening in ("", "{") and _same(group.items[0], other)
        case Quantity(), Quantity():
            return _same_quantity(first, second)
    return first == second


def _same_relation(first: Relation, second: Relation) -> bool:
    """True if two relations have the same solutions: the differences of their sides are proportional."""
    if first.operator != second.operator:
        return False
    if first.difference is None or second.difference is None:
        return compact(first.left) == compact(second.left) and _same(first.right, second.right)
    other = second.difference
    variables = [_FUNCTION.fullmatch(relation.left) for relation in (first, second)]
    if variables[0] and variables[1] and variables[0][1] not in symbols(other):
        other = renamed(other, variables[1][1], variables[0][1])
    return _holds(proportional, first.difference, other, positive=first.operator.startswith("<"))


def _same_group(first: Group, second: Group) -> bool:
    """True if two groups have equal items; in any order for sets and for lists without brackets."""
    kinds = {first.opening + first.closing, second.opening + second.closing}
    if max(len(first.items), len(second.items)) > _MAX_ITEMS:
        return first == second
    if kinds <= {"", "{}"}:
        return _same_items(first.items, second.items, repeated="{}" not in kinds)
    if len(first.items) != len(second.items) or (len(kinds) > 1 and not ("" in kinds and kinds <= {"", "()", "[]"})):
        return False
    return all(_same(a, b) for a, b in zip(first.items, second.items, strict=True))


def _same_items(first: Sequence[Reading], second: Sequence[Reading], *, repeated: bool) -> bool:
    """True if the items are equal in any order, with equal multiplicities if `repeated`."""
    if not repeated:
        return all(any(_same(a, b) for b in second) for a in first) and all(any(_same(a, b) for a in first) for b in second)
    rest = list(second)
    for item in first:
        match = next((number for number, other in enumerate(rest) if _same(item, other)), None)
        if match is None:
            return False
        del rest[match]
    return not rest


def _same_quantity(first: Quantity, second: Quantity) -> bool:
    """True if two expressions are equal in value and unit; a quantity without a known unit equals one with it."""
    if first.tree is None or second.tree is None:
        return compact(first.text) == compact(second.text) or _same_digits(first.text, second.text)
    if first.unit and second.unit:
        scaled = [("mul", quantity.tree, quantity.unit[2]) for quantity in (first, second) if quantity.unit]
        return first.unit[:2] == second.unit[:2] and _holds(same_value, *scaled)
    if _holds(same_value, first.tree, second.tree):
        return True
    return _same_without_sign(first, second) or _same_without_sign(second, first)


def _same_digits(first: str, second: str) -> bool:
    """True if the texts are equal except that one has a base, as `1011_2` and `1011`."""
    digits = [re.fullmatch(r"(\d[\dA-F]*)(?:_\{?(\w+)\}?)?", compact(text)) for text in (first, second)]
    return all(digits) and len({match[1] for match in digits if match}) == 1 and any(match[2] is None for match in digits if match)


def _same_without_sign(first: Quantity, second: Quantity) -> bool:
    """True if `first` is `second` with a percent or degree sign; a number below 1 without a sign is not a percentage."""
    sign = first.text.rstrip()[-1:]
    if sign not in ("%", "°") or second.text.rstrip().endswith(sign) or first.tree is None:
        return False
    bare = first.tree[1]
    try:
        large = sign == "°" or abs(value(bare)) >= 1
    except (ArithmeticError, ValueError, LookupError, TypeError, RecursionError):
        return False
    return large and _holds(same_value, bare, second.tree)


def _holds(relation: Any, first: Tree, second: Tree, **options: bool) -> bool:
    """Return `relation` of two trees; if their values cannot be computed, True if the trees are identical."""
    try:
        return bool(relation(first, second, **options))
    except (ArithmeticError, ValueError, TypeError, RecursionError):
        return first == second
