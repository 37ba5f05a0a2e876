r"""Compares two written answers for mathematical equality."""

import re
from collections.abc import Sequence
from typing import Any

from penstock.pipeline.rewards.builtin.math_parser import MAX_CHARACTERS, Tree
from penstock.pipeline.rewards.builtin.math_reading import Group, Quantity, Reading, Relation, read
from penstock.pipeline.rewards.builtin.math_text import compact, normalised
from penstock.pipeline.rewards.builtin.math_values import proportional, renamed, same_value, symbols, value

_CHOICE = re.compile(r"(?:[Oo]ption |[Cc]hoice )?(?:\(?([A-J])(?:\)|[.:](?=\s|$))(?:\s.*)?|\(([a-j])\)|([A-J]))", re.DOTALL)
_FUNCTION = re.compile(r"[a-zA-Z] ?\( ?([a-z]) ?\)")
_MAX_ITEMS = 30


def equal(first: str, second: str) -> bool:
    r"""True if two answers, in LaTeX or plain text, are equal; symmetric, and False for texts without content.

    Example:
        equal(r"\frac{1}{2}", "0.5")  # -> True
    """
    if max(len(first), len(second)) > 2 * MAX_CHARACTERS:
        return first.strip() == second.strip()
    plain = [normalised(text) for text in (first, second)]
    if not (has_content(first) and has_content(second)):
        return False
    choices = [_CHOICE.fullmatch(text) for text in plain]
    if choices[0] and choices[1]:
        first_option, second_option = (next(filter(None, choice.groups())).upper() for choice in choices if choice)
        return first_option == second_option
    readings = [{text: None, _with_commas(original): None} for text, original in zip(plain, (first, second), strict=True)]
    return any(compact(a) == compact(b) or _same(read(a), read(b)) for a in readings[0] for b in readings[1])


def has_content(text: str) -> bool:
    """True if the text has a letter, a digit or an empty set."""
    return re.search(r"[^\W_]|\\\{ ?\\\}|\N{EMPTY SET}", text) is not None


def _with_commas(text: str) -> str:
    """The text with `100,200` as two numbers. `1,000` stays one number, because numbers in a list do not start with 0."""
    return normalised(text, thousands=re.search(r",0\d\d", text) is not None)


def _same(first: Reading, second: Reading) -> bool:
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
    """True if the first is the second with a percent or degree sign; a number below 1 without a sign is not a percentage."""
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
    """True if the relation holds; equality of the trees if their values cannot be computed."""
    try:
        return bool(relation(first, second, **options))
    except (ArithmeticError, ValueError, TypeError, RecursionError):
        return first == second
