"""Parses an expression in LaTeX or plain text into a tree, in time linear in its length, and evaluates trees.

A tree is a `Fraction`, `("symbol", name)` or `(operation, tree, ...)`. Its value is exact if rational and small, else it has 100 digits;
the size of operands bounds the time of an operation.
"""

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import reduce
from typing import Any

import mpmath

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
    """A text that is not an expression of the grammar."""


def parse(text: str) -> Tree:
    """Parse a normalised expression into a tree. Raises `Unreadable` for a text that is not one, or is longer than `MAX_CHARACTERS`."""
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
        """Return the next character that is not a space; empty at the end."""
        while self.text.startswith(" ", self.position):
            self.position += 1
        return self.text[self.position : self.position + 1]

    def take(self, *options: str) -> str:
        """Consume and return the first of `options` that comes next; empty if none does."""
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
        """Parse what follows a function's name: base, power and argument; without brackets the argument is a product, as in `sin 2x`."""
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
        r"""Parse a bracketed expression, or one digit or symbol, as in `\frac12`."""
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


_MP = mpmath.mp.clone()
_MP.dps = 100
_ZERO = _MP.mpf(10) ** -70
_MAX_BITS = 20_000
_MAX_EXPONENT = 2**62
_SIGNS = (1, 1, -1, 1)
"""Sign of a symbol's value at each sample point."""
_WHOLE_NUMBERS = frozenset("kmnNMK")
"""Symbols that by convention are positive integers."""
Value = Any
"""A `Fraction` or a number of mpmath."""


class TooLarge(ArithmeticError):
    """A number that is too large to compute, such as 9**9**9**9."""


def same_value(first: Tree, second: Tree) -> bool:
    """True if two expressions have equal values at all sample points where both are defined, preferring points with real values.

    `log` without a base has the same base, e or 10, in both.
    """
    for base in (_MP.e, Fraction(10)) if LOG_BASE[1] in symbols(first) | symbols(second) else (_MP.e,):
        pairs = list(_pairs(first, second, base))
        real = [pair for pair in pairs if all(map(_is_real, pair))] or pairs
        if real and all(_close(*pair) for pair in real):
            return True
    return False


def proportional(first: Tree, second: Tree, *, positive: bool = False) -> bool:
    """True if the quotient of two expressions is a constant other than zero (`positive`: above zero)."""
    pairs = [pair for pair in _pairs(first, second) if any(pair)]
    if not pairs or not all(map(all, pairs)):
        return False
    quotients = [_operate("mul", a, _operate("inverse", b)) for a, b in pairs]
    return all(_close(quotients[0], quotient) for quotient in quotients) and (not positive or _MP.re(_mp(quotients[0])) > 0)


def value(tree: Tree, point: Mapping[str, Value] | None = None) -> Value:
    """Compute a tree with the symbols' values in `point`. Raises `ArithmeticError`, `ValueError`, or `KeyError` for a missing symbol."""
    if isinstance(tree, Fraction):
        return tree
    if tree[0] == "symbol":
        return (point or {})[tree[1]]
    parts = [value(part, point) for part in tree[1:]]
    return reduce(lambda a, b: _operate(tree[0], a, b), parts) if tree[0] in ("add", "mul") else _operate(tree[0], *parts)


def symbols(tree: Tree) -> set[str]:
    if isinstance(tree, Fraction):
        return set()
    return {tree[1]} if tree[0] == "symbol" else set().union(*map(symbols, tree[1:]))


def renamed(tree: Tree, old: str, new: str) -> Tree:
    """Return the tree with the symbol `new` in place of `old`."""
    if isinstance(tree, Fraction) or tree[0] == "symbol":
        return ("symbol", new) if tree == ("symbol", old) else tree
    return (tree[0], *(renamed(part, old, new) for part in tree[1:]))


def _pairs(first: Tree, second: Tree, base: Value = _MP.e) -> Iterator[tuple[Value, Value]]:
    """Yield the values of two expressions at the sample points where both are defined. Raises `TooLarge`."""
    names = (symbols(first) | symbols(second)) - {LOG_BASE[1]}
    for number in range(len(_SIGNS) if names else 1):
        point = {name: _coordinate(name, number) for name in names} | {LOG_BASE[1]: base}
        try:
            yield value(first, point), value(second, point)
        except TooLarge:
            raise
        except (ArithmeticError, ValueError):
            continue


def _coordinate(name: str, number: int) -> Fraction:
    dice = random.Random(f"{name} {number}")
    return Fraction(dice.randint(2, 30)) if name in _WHOLE_NUMBERS else Fraction(dice.randint(20, 480) * _SIGNS[number], 89)


def _mp(number: Value) -> Any:
    return _MP.mpf(number.numerator) / number.denominator if isinstance(number, Fraction) else number


def _is_real(number: Value) -> bool:
    return isinstance(number, Fraction) or abs(_MP.im(number)) <= abs(number) * _ZERO


def _close(first: Value, second: Value) -> bool:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    a, b = _mp(first), _mp(second)
    return bool(abs(a - b) <= max(abs(a), abs(b)) * _MP.mpf(10) ** -50)


def _bits(number: Fraction) -> int:
    return max(number.numerator.bit_length(), number.denominator.bit_length())


def _operate(name: str, *numbers: Value) -> Value:
    """Apply an operation; the result is exact if rational and small, else it has 100 digits. Raises `TooLarge`."""
    if name in _EXACT and all(isinstance(number, Fraction) and _bits(number) <= _MAX_BITS for number in numbers):
        exact = _EXACT[name](*numbers)
        if exact is not None:
            return exact
    limit = _LIMITS.get(name, _MAX_EXPONENT)
    operands = [_mp(number) for number in numbers]
    if any(number and _MP.mag(number) > limit for number in operands):
        raise TooLarge(name)
    result = _INEXACT[name](*operands)
    if not _MP.isfinite(result):
        raise TooLarge(name)
    return result


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Return the value of a power as a fraction; None if it is irrational or too large."""
    power, degree = exponent.as_integer_ratio()
    if degree > 1:
        if base < 0 or degree > 64:
            return None
        root = Fraction(*(int(_MP.nint(_MP.root(part, degree))) for part in base.as_integer_ratio()))
        return _exact_power(root, Fraction(power)) if root**degree == base else None
    if abs(base) in (0, 1):
        return base ** (power if abs(power) < 2 else 2 + power % 2)
    return base**power if abs(power) * _bits(base) <= _MAX_BITS else None


def _exact_count(function: Callable[..., int]) -> Callable[..., Fraction | None]:
    return lambda *numbers: Fraction(function(*map(int, numbers))) if all(n.denominator == 1 and 0 <= n <= 2100 for n in numbers) else None


def _sum(first: Any, second: Any) -> Any:
    total = first + second
    return total if abs(total) > max(abs(first), abs(second)) * _ZERO else _MP.zero


def _power(base: Any, exponent: Any) -> Any:
    """Compute a power; an odd root of a negative number is the real one. Raises `TooLarge`."""
    if base and abs(exponent * _MP.log(abs(base), 2)) > _MAX_EXPONENT:
        raise TooLarge("power")
    if _is_real(base) and _MP.re(base) < 0 and _is_real(exponent) and not _MP.isint(exponent):
        for degree in range(3, 64, 2):  # the real root of a negative number
            if abs(exponent * degree - _MP.nint(exponent * degree)) < _ZERO:
                return (-1) ** int(_MP.nint(exponent * degree) % 2) * _MP.power(-base, exponent)
    return _MP.power(base, int(exponent) if _MP.isint(exponent) else exponent)


_COUNTS = ("floor", "ceil", "factorial", "binomial")
_PERIODIC = ("sin", "cos", "tan", "cot", "sec", "csc")
_GROWING = ("sinh", "cosh", "tanh", "exp")
_EXACT: dict[str, Callable[..., Fraction | None]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "inverse": lambda a: 1 / a,
    "pow": _exact_power,
    "abs": abs,
    "floor": lambda a: Fraction(math.floor(a)),
    "ceil": lambda a: Fraction(math.ceil(a)),
    "factorial": _exact_count(math.factorial),
    "binomial": _exact_count(math.comb),
}
_INEXACT: dict[str, Callable[..., Any]] = {
    "add": _sum,
    "mul": lambda a, b: a * b,
    "inverse": lambda a: 1 / a,
    "pow": _power,
    "abs": abs,
    **{name: getattr(_MP, name) for name in (*_COUNTS, *_PERIODIC, *_GROWING, "ln")},
    **{f"arc{name}": getattr(_MP, f"a{name}") for name in _PERIODIC},
    "lg": lambda a: _MP.log(a, 10),
    "pi": lambda: +_MP.pi,
    "e": lambda: +_MP.e,
    "i": lambda: _MP.mpc(0, 1),
}
_LIMITS = dict.fromkeys(_COUNTS, 40) | dict.fromkeys((*_PERIODIC, *_GROWING), 60)
"""Largest binary exponent of an operand; other operations are fast for all representable numbers."""
