"""The reward math_verify: verdicts are those of a mathematician, for any text and in bounded time."""

import json
import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pipeline.envs.builtin_rewards import BUILTINS
from tests.support.paths import ROOT

PAIRS = [json.loads(line) for line in (ROOT / "tests" / "data" / "math_pairs.jsonl").read_text(encoding="utf-8").splitlines()]
MISSED = {r"\boxed{1.2 million}", r"\boxed{\text{ten}}", r"\boxed{\mathbb{R}}", r"\boxed{\text{The function is even}}"} | {
    r"\boxed{1.6 \times 10^{-19}\text{ C}}",
    "There are 5 + 3 = 8 apples, which is less than the 12 of yesterday.",
}
"""Right answers that are judged wrong: docs/mathematics.md names the kinds."""


def verdict(completion: str, answer: Any) -> float | None:
    (value,) = BUILTINS["math_verify"]([completion], [answer])
    return value


def wrong(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        pair
        for pair in pairs
        if verdict(pair["completion"], pair["reference"]) != float(pair["right"]) and pair["completion"] not in MISSED
    ]


def test_a_sample_of_the_pairs_is_judged_as_a_mathematician_does() -> None:
    assert wrong(PAIRS[::6]) == []


@pytest.mark.slow
def test_all_pairs_are_judged_as_a_mathematician_does_but_for_those_listed() -> None:
    assert len(PAIRS) >= 300
    assert wrong(PAIRS) == []
    assert {pair["completion"] for pair in PAIRS if verdict(pair["completion"], pair["reference"]) != pair["right"]} == MISSED


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        # amounts of money
        (r"The cost is \$18", "18", 1.0),
        (r"The answer is 18", r"\$18", 1.0),
        (r"\boxed{\$18}", "18", 1.0),
        (r"\boxed{\$1,018.50}", "1018.5", 1.0),
        (r"It costs \$17.99.", r"\$17.99", 1.0),
        (r"\boxed{\$18}", r"\$81", 0.0),
        (r"\boxed{18 \text{ dollars}}", r"\$18", 1.0),
        # words, and words with the same letters
        (r"\boxed{listen}", "silent", 0.0),
        (r"\boxed{no}", "on", 0.0),
        (r"\boxed{cat}", "act", 0.0),
        (r"\boxed{\text{Evil}}", "live", 0.0),
        (r"\boxed{\mathrm{cat}}", "Cat", 1.0),
        (r"The answer is New York.", "New York", 1.0),
        ("Monday", "monday", 1.0),
        # the last box
        (r"\boxed{3} apples a day, so in all \boxed{4}", "4", 1.0),
        (r"\boxed{4} and then \boxed{3}", "4", 0.0),
        (r"\boxed{4}\boxed{}", "4", 0.0),
        (r"\boxed{\frac{1}{\sqrt{2}}}, no: \fbox{2}", "2", 1.0),
        (r"\boxed{4} but \boxed{5", "4", 1.0),
        (r"\boxed{\boxed{4}}", "4", 1.0),
        # numbers near each other, tiny and huge
        (r"\boxed{0.000000001}", "0.000000002", 0.0),
        (r"$\frac{1}{2^{99}}$", r"\frac{1}{2^{98}}", 0.0),
        (r"\boxed{10^{-400}}", r"10^{-401}", 0.0),
        (r"\boxed{\sqrt{2} \cdot 10^{-50}}", r"\sqrt{2} \cdot 10^{-51}", 0.0),
        (r"\boxed{10^{400}+1}", r"10^{400}", 0.0),
        (r"\boxed{e^{-300}}", "0", 0.0),
        (r"\boxed{0.0000000020}", r"2 \times 10^{-9}", 1.0),
        (r"\boxed{\frac{2004!}{2006!}}", r"\frac{1}{2005 \cdot 2006}", 1.0),
        (r"\boxed{0.1+0.2}", "0.3", 1.0),
        # answers that say nothing
        ("", "18", 0.0),
        (r"\boxed{}", "18", 0.0),
        (r"\boxed{?}", "18", 0.0),
        ("I do not know if the answer is 18.", "18", 0.0),
        ("The answer is not 18", "18", 0.0),
        (r"\boxed{17, 18, 19}", "18", 0.0),
        # references that say nothing, and several that are accepted
        ("18", "####", None),
        ("...", ["...", "?"], None),
        (r"\boxed{18}", ["17", "18"], 1.0),
        (r"\boxed{18}", 18.0, 1.0),
        (r"\boxed{18}", {"ground_truth": "18"}, 1.0),
    ],
)
def test_math_verify_is_right_on(completion: str, answer: Any, value: float | None) -> None:
    assert verdict(completion, answer) == value


@pytest.mark.parametrize(
    ("report", "completion", "answer", "value"),
    [
        ("Math-Verify 14", "$12:00$", "$1:00$", 0.0),
        ("Math-Verify 14", r"$1:4:9:\ldots$", r"$1:2:3:\ldots$", 0.0),
        ("Math-Verify 14", "$F_n = F_{n-2}$", "$F_n = F_{n-1}$", 0.0),
        ("Math-Verify 25", r"the solution is $m \in [\sqrt{2}, +\infty)$", r"\[\boxed{m \geq \sqrt{2}}\]", 1.0),
        ("Math-Verify 25", r"\[\boxed{m \geq \sqrt{2}}\]", r"$m \in [\sqrt{2}, +\infty)$", 1.0),
        ("Math-Verify 26", "$y = -1/2*x + 3/4$", "$2x+4y-3=0$", 1.0),
        ("Math-Verify 35", r"$\frac12$", r"$\frac{1}{2}$", 1.0),
        ("Math-Verify 37", r"$\text{13}$", "$13$", 1.0),
        ("Math-Verify 40", r"\boxed{\frac{x^2}{16}+\frac{y^2}{12}=1}", r"\frac{x^2}{4}+\frac{y^2}{3}=1", 0.0),
        ("Math-Verify 41", r"$4\sqrt(2)$", "$4$", 0.0),
        ("Math-Verify 56", r"(3, \frac{2\pi}{3})", r"\left( 3, \frac{\pi}{2} \right)", 0.0),
        ("Math-Verify 60", "3x + 4y + 14=0", "3*x-1*y+13=0", 0.0),
        ("Math-Verify 64", r"$\frac{1}{\sqrt{n}}$", r"$\sqrt{1/n}$", 1.0),
        ("Math-Verify 64", r"\boxed{\forall x>0, f(x) = 0}", "f(x) = 0", 0.0),
        ("Math-Verify 69", "-1 + exp(16)", "e^{16} - 1", 1.0),
        ("Math-Verify 69", "14.0 + -1.0i", "14 - i", 1.0),
        ("Math-Verify 69", "-2*pi", r"-2\pi", 1.0),
        ("Math-Verify 76", "Right: 122 + 294 + 489 = 905\n\n✅ Final Answer: **73**", "73", 1.0),
        ("open-r1 628", "Therefore, the answer is: 180.", "180", 1.0),
        ("open-r1 503", r"**Answer:** \( \boxed{10 - 2\sqrt{5}} \)", "10 - 2√5", 1.0),
        ("open-r1 293", r"\boxed{\foo}", r"\frac{63}{400}", 0.0),
    ],
)
def test_public_reports_of_wrong_verdicts(report: str, completion: str, answer: str, value: float) -> None:
    assert verdict(completion, answer) == value, report


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
]


@pytest.mark.parametrize("number", range(len(LARGE)))
def test_what_cannot_be_computed_is_judged_in_bounded_time(number: int) -> None:
    begin = time.monotonic()
    for completion in (rf"\boxed{{{LARGE[number]}}}", f"so ${LARGE[number]}$", LARGE[number]):
        assert verdict(completion, "1234567") == 0.0
        verdict(completion, LARGE[number])
    assert time.monotonic() - begin < 30


def test_equal_powers_that_cannot_be_computed_are_equal() -> None:
    assert verdict(r"\boxed{3^{2^{2024}} - 1}", "3^{2^{2024}}-1") == 1.0
    assert verdict(r"\boxed{3^{2^{2025}} - 1}", "3^{2^{2024}}-1") == 0.0


SOUP = st.lists(
    st.sampled_from(
        [*r"{}()[]129xn^_!+-*/,=<%°$:.&| ", r"\frac", r"\sqrt", r"\pi", r"\cup", r"\pm", r"\boxed{", " and ", r"\text{", "answer is ", "cm"]
    ),
    max_size=20,
).map("".join)


@settings(max_examples=40, deadline=None, derandomize=True)
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


@settings(max_examples=60, deadline=None, derandomize=True)
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


@settings(max_examples=40, deadline=None, derandomize=True)
@given(EXPRESSIONS)
def test_rewritten_expressions_are_equal_and_changed_ones_are_not(text: str) -> None:
    rewritten = rf"\frac{{2({text})^2+({text})}}{{1+2({text})}}"
    assert verdict(rf"\boxed{{{rewritten}}}", text) == verdict(rf"\boxed{{{text}}}", rewritten) == 1.0
    assert verdict(rf"\boxed{{{text}+1}}", text) == verdict(rf"\boxed{{{text}}}", f"{text}+1") == 0.0
