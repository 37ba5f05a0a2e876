r"""Parses an expression in LaTeX or plain text into a tree, in time linear in its length.

A tree is a `Fraction`, `("symbol", name)` or `(operation, tree, ...)` with the operations of `math_values.py`.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

Tree = Any
MAX_CHARACTERS = 1_000
MINUS_ONE = Fraction(-1)
LOG_BASE = ("symbol", "base of log")
"""Base of `log` without a base: e or 10."""
FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|exp|log|ln|lg"
GREEK = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|varphi|chi|psi|omega"
    "|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega|ell|infty"
)
_NUMBER = re.compile(r"(\d*)\.?(?<=[\d.])(\d*)(?:\\overline ?\{(\d+)\})?(?:[eE]([-+]?\d{1,4})(?![\d.]))?")
_FUNCTION = re.compile(rf"\\?({FUNCTIONS}) ?")
_SYMBOL = re.compile(rf"(?:\\(?:{GREEK})\b|[a-zA-Z])(?: ?_ ?(?:\{{[\w, ]+\}}|\w))?'*")
_CLOSING = {"(": ")", "{": "}", "[": "]"}


class Unreadable(ValueError):
    """The text is not an expression of the grammar."""


def parse(text: str) -> Tree:
    """The tree of a normalised text. Raises `Unreadable`."""
    parser = _Parser(text[:MAX_CHARACTERS])
    try:
        tree = parser.sum()
    except RecursionError as error:
        raise Unreadable("too deep") from error
    if parser.peek() or len(text) > MAX_CHARACTERS:
        raise Unreadable(text[parser.position :])
    return tree


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = self.bars = 0

    def peek(self) -> str:
        """The next character that is not a space; empty at the end."""
        while self.text.startswith(" ", self.position):
            self.position += 1
        return self.text[self.position : self.position + 1]

    def take(self, *options: str) -> str:
        """Consume and return the first option that comes next; empty if none does."""
        self.peek()
        for option in options:
            end = self.position + len(option)
            if self.text.startswith(option, self.position) and not (option[-1].isalpha() and self.text[end : end + 1].isalpha()):
                self.position = end
                return option
        return ""

    def expect(self, option: str) -> None:
        if not self.take(option):
            raise Unreadable(f"{option} is missing")

    def sum(self) -> Tree:
        terms = [self.product()]
        while sign := self.take("+", "-"):
            terms.append(self.product() if sign == "+" else ("mul", MINUS_ONE, self.product()))
        tree = terms[0] if len(terms) == 1 else ("add", *terms)
        if operator := self.take(r"\over", r"\choose"):
            return ("binomial", tree, self.sum()) if operator == r"\choose" else ("mul", tree, ("inverse", self.sum()))
        return tree

    def product(self, continues: "Callable[[_Parser], bool] | None" = None) -> Tree:
        factors = [self.signed()]
        while continues is None or continues(self):
            if operator := self.take("*", r"\times", "/"):
                factors.append(("inverse", self.signed()) if operator == "/" else self.signed())
            elif self.starts_factor():
                factors.append(self.power())
            else:
                break
        return factors[0] if len(factors) == 1 else ("mul", *factors)

    def signed(self) -> Tree:
        negative = False
        while sign := self.take("-", "+"):
            negative ^= sign == "-"
        return ("mul", MINUS_ONE, self.power()) if negative else self.power()

    def starts_factor(self) -> bool:
        char = self.peek()
        closing = self.text.startswith((r"\rfloor", r"\rceil", r"\over", r"\choose"), self.position) or (char == "|" and self.bars)
        return char.isalnum() or (char != "" and char in "({[\\.|" and not closing)

    def power(self) -> Tree:
        tree = self.atom()
        while operator := self.take("!", "°", "%", "^"):
            if operator == "^":
                return ("pow", tree, self.signed())
            tree = {"!": ("factorial", tree), "°": ("mul", tree, ("pi",), Fraction(1, 180)), "%": ("mul", tree, Fraction(1, 100))}[operator]
        return tree

    def atom(self) -> Tree:
        char = self.peek()
        if char and char in _CLOSING:
            self.position += 1
            bars, self.bars = self.bars, 0
            tree = self.sum()
            self.bars = bars
            self.expect(_CLOSING[char])
            return tree
        number = _NUMBER.match(self.text, self.position)
        if number and number[0] not in ("", "."):
            self.position = number.end()
            return _number(*number.groups())
        return self.named()

    def named(self) -> Tree:
        if self.take("|"):
            self.bars += 1
            tree = self.sum()
            self.bars -= 1
            self.expect("|")
            return ("abs", tree)
        if command := self.take(r"\frac", r"\binom"):
            first, second = self.argument(), self.argument()
            return ("mul", first, ("inverse", second)) if command == r"\frac" else ("binomial", first, second)
        if self.take(r"\sqrt"):
            degree = self.argument() if self.peek() == "[" else Fraction(2)
            return ("pow", self.argument(), ("inverse", degree))
        if side := self.take(r"\lfloor", r"\lceil"):
            tree = self.sum()
            self.expect(side.replace("l", "r", 1))
            return (side[2:], tree)
        if self.take(r"\pi", "pi"):
            return ("pi",)
        if function := _FUNCTION.match(self.text, self.position):
            self.position = function.end()
            return self.applied(function[1])
        symbol = _SYMBOL.match(self.text, self.position)
        if not symbol:
            raise Unreadable(self.text[self.position :])
        self.position = symbol.end()
        name = re.sub("[ {}]", "", symbol[0])
        return (name,) if name in ("e", "i") else ("symbol", name)

    def applied(self, name: str) -> Tree:
        """A function with base, power and argument; an argument without brackets is a product, as in `sin 2x`."""
        base = self.argument() if name == "log" and self.take("_") else LOG_BASE
        exponent = self.argument() if self.take("^") else Fraction(1)
        if self.peek() in ("(", "{"):
            argument = self.atom()
        else:
            argument = self.product(lambda parser: parser.peek() != "(" and not _FUNCTION.match(parser.text, parser.position))
        if exponent == ("mul", MINUS_ONE, Fraction(1)):
            return ("arc" + name, argument)
        tree = ("mul", ("ln", argument), ("inverse", ("ln", base))) if name == "log" else (name, argument)
        return tree if exponent == 1 else ("pow", tree, exponent)

    def argument(self) -> Tree:
        r"""A bracketed expression, or one digit or symbol, as in `\frac12`."""
        char = self.peek()
        if char.isdecimal():
            self.position += 1
            return Fraction(int(char))
        return self.atom()


def _number(whole: str, decimals: str, repeated: str | None, exponent: str | None) -> Fraction:
    value = Fraction(int((whole or "0") + decimals), 10 ** len(decimals))
    if repeated:
        value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(decimals))
    return value * Fraction(10) ** int(exponent or 0)
