"""The reward math_verify: verdicts are those of a mathematician, for any text and in bounded time."""

import json
import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pipeline.rewards.builtin import BUILTINS
from tests.support.paths import ROOT


def _read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "tests" / "data" / name).read_text(encoding="utf-8").splitlines()]


PAIRS, CASES = _read("math_pairs.jsonl"), _read("math_cases.jsonl")


def verdict(completion: str, answer: Any) -> float | None:
    (value,) = BUILTINS["math_verify"]([completion], [answer])
    return value


def test_all_pairs_are_judged_as_a_mathematician_does() -> None:
    assert len(PAIRS) >= 300
    assert [pair for pair in PAIRS if verdict(pair["completion"], pair["reference"]) != float(pair["right"])] == []


@pytest.mark.parametrize("kind", dict.fromkeys(case["kind"] for case in CASES))
def test_completions_are_judged_right_or_wrong_in_cases_of_the_kind(kind: str) -> None:
    """The kinds include public bug reports; "right" is null if the reference says nothing."""
    assert [case for case in CASES if case["kind"] == kind and verdict(case["completion"], case["reference"]) != case["right"]] == []


LARGE = [
    r"(3+4i)^{9999}",
    r"(2+i)^{5000}",
    r"9^{9^{9^{9}}}",
    r"2^{-9^{9^{9}}}",
    r"((((9!)!)!)!)!",
    r"10000000!",
    r"\binom{100000}{50000}",
    r"\binom{10^{9}}{10^{8}}",
    r"e^{e^{e^{e^{9}}}}",
    r"\sin(9^{9^{9}})",
    r"\lfloor 10^{10^{5}} \rfloor",
    "(((x+1)^{50}+1)^{50}+1)^{50}",
    "+".join(rf"\frac{{1}}{{{n}^{{300}}}}" for n in range(2, 50)),
    "(" * 400 + "1" + ")" * 400,
    r"\frac{1}{" * 80 + "2" + "}" * 80,
    "2^" * 400 + "2",
    "1,2," * 200 + "3",
    r"\text{" * 300,
    "<answer>" * 3000,
    "$" * 3000 + r"\[" * 3000,
    r"1 \pm " * 200 + "1",
    *(
        part * (20_000 // len(part))
        for part in ("1 ", "1, ", "$1 ", r"\text{", "answer is ", "ten and ", "C(n,", "_1_ ", "1! ", "5 m/s ", "(1, ", "(a, ")
    ),
]


@pytest.mark.parametrize("number", range(len(LARGE)))
def test_what_cannot_be_computed_is_judged_in_bounded_time(number: int) -> None:
    begin = time.process_time()
    for completion in (rf"\boxed{{{LARGE[number]}}}", f"so ${LARGE[number]}$", LARGE[number]):
        assert verdict(completion, "1234567") == 0.0
        verdict(completion, LARGE[number])
    assert time.process_time() - begin < 30


def test_equal_powers_that_cannot_be_computed_are_equal() -> None:
    assert verdict(r"\boxed{3^{2^{2024}} - 1}", "3^{2^{2024}}-1") == 1.0
    assert verdict(r"\boxed{3^{2^{2025}} - 1}", "3^{2^{2024}}-1") == 0.0


SOUP = st.lists(
    st.sampled_from(
        [*r"{}()[]129xn^_!+-*/,=<%°$:.&| ", r"\frac", r"\sqrt", r"\pi", r"\cup", r"\pm", r"\boxed{", " and ", r"\text{", "answer is ", "cm"]
    ),
    max_size=20,
).map("".join)


@settings(max_examples=40)
@given(st.text(max_size=20) | SOUP, (st.text(max_size=20) | SOUP).filter(str.strip))
def test_any_text_gets_a_verdict_and_no_error(completion: str, answer: str) -> None:
    assert verdict(completion, answer) in (0.0, 1.0, None)
    assert verdict("", answer) in (0.0, None)
    assert verdict(r"\boxed{ }", answer) in (0.0, None)


def written(number: Fraction) -> list[str]:
    """Several ways to write a number."""
    top, bottom, sign = abs(number.numerator), number.denominator, "-" if number < 0 else ""
    forms = [rf"{sign}\frac{{{top}}}{{{bottom}}}", f"{sign}{top}/{bottom}", rf"\dfrac{{{number.numerator * 3}}}{{{bottom * 3}}}"]
    forms += [rf"\frac{{{number.numerator - 7 * bottom}}}{{{bottom}}} + 7", rf"x = {sign}\left({top} \cdot {bottom}^{{-1}}\right)"]
    forms += [rf"{sign}{top // bottom}\frac{{{top % bottom}}}{{{bottom}}}"] if top > bottom > 1 else []
    forms += [f"{sign}{top:,}", f"{sign}{top}.0", rf"\text{{{sign}{top}}}"] if bottom == 1 else []
    return forms + ([str(float(number))] if 1000 % bottom == 0 and top < 10**6 else [])


NUMBERS = st.fractions(-2000, 2000, max_denominator=60)


@settings(max_examples=60)
@given(NUMBERS, NUMBERS, st.randoms(use_true_random=False))
def test_equal_numbers_are_equal_however_they_are_written_and_different_ones_never(first: Fraction, second: Fraction, chance: Any) -> None:
    one, other, third = chance.choice(written(first)), chance.choice(written(first)), chance.choice(written(second))
    assert verdict(rf"\boxed{{{one}}}", other) == verdict(rf"\boxed{{{other}}}", one) == 1.0
    assert verdict(rf"\boxed{{{one}}}", third) == verdict(rf"\boxed{{{third}}}", one) == float(first == second)


LEAVES = st.sampled_from(["x", "y", "2", "3", r"\sqrt{2}", r"\pi"])
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda parts: st.builds(
        lambda a, b, form: form.format(a=a, b=b), parts, parts, st.sampled_from(["({a}+{b})", "({a})({b})", r"\frac{{{a}}}{{{b}}}"])
    ),
    max_leaves=5,
)


@settings(max_examples=40)
@given(EXPRESSIONS)
def test_rewritten_expressions_are_equal_and_changed_ones_are_not(text: str) -> None:
    rewritten = rf"\frac{{2({text})^2+({text})}}{{1+2({text})}}"
    assert verdict(rf"\boxed{{{rewritten}}}", text) == verdict(rf"\boxed{{{text}}}", rewritten) == 1.0
    assert verdict(rf"\boxed{{{text}+1}}", text) == verdict(rf"\boxed{{{text}}}", f"{text}+1") == 0.0
