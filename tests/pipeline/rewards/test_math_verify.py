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

PAIRS = [json.loads(line) for line in (ROOT / "tests" / "data" / "math_pairs.jsonl").read_text(encoding="utf-8").splitlines()]


def verdict(completion: str, answer: Any) -> float | None:
    (value,) = BUILTINS["math_verify"]([completion], [answer])
    return value


def test_all_pairs_are_judged_as_a_mathematician_does() -> None:
    assert len(PAIRS) >= 300
    assert [pair for pair in PAIRS if verdict(pair["completion"], pair["reference"]) != float(pair["right"])] == []


RIGHT: dict[str, list[tuple[str, Any]]] = {
    "the last box is the one that ends last": [
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{x = \boxed{3}}", "3"),
        (r"\boxed{5} is wrong, so \boxed{\frac{\boxed{7}}{2}}", "3.5"),
        (r"\boxed{2} and \boxed{\sqrt{\boxed{4}}}", "2"),
        (r"\boxed 5, then \boxed 6.", "6"),
    ],
    "Chinese phrases and punctuation": [
        ("\u56e0\u6b64\uff0c\u7b54\u6848\u662f 42\u3002", "42"),
        ("\u7b54\u6848\uff1a17", "17"),
        ("\u6700\u7ec8\u7b54\u6848\u4e3a$\\frac12$\u3002\u9a8c\u7b97\u5b8c\u6bd5\u3002", "0.5"),
        ("\u7efc\u4e0a\u6240\u8ff0\uff0c\u7b54\u6848\u4e3a\uff1a$2\\sqrt{3}$\u3002", r"2\sqrt3"),
        ("\u7b54\u6848\u662f 3 \u6216 4\u3002", "3, 4"),
        ("\u6240\u4ee5\u6700\u7ec8\u7b54\u6848\u662f\\boxed{\\frac{3}{5}}\u3002", "0.6"),
    ],
    "remainders, numerals with a base, functions of another variable": [
        (r"\boxed{2 \pmod 7}", "2"),
        (r"\boxed{2 \bmod 7}", "2"),
        (r"\boxed{x \equiv 2 \pmod{7}}", "2"),
        (r"\boxed{n \equiv 1 \pmod{4}}", r"n\equiv 1 \pmod 4"),
        (r"\boxed{1011}", "1011_2"),
        (r"\boxed{1011_{2}}", "1011_2"),
        (r"\boxed{f(t) = t^2+1}", "f(x)=x^2+1"),
        (r"\boxed{f(t) = at}", "f(x) = ax"),
    ],
    "names on the left side of an equation": [
        (r"\boxed{\angle ABC = 30^\circ}", "30"),
        (r"\boxed{m\angle B=35^{\circ}}", "35"),
        (r"\boxed{\det A = -2}", "-2"),
        (r"\boxed{\overline{AB} = 3}", "3"),
        (r"\boxed{\frac{dy}{dx} = 2x}", "2x"),
        (r"\boxed{\overline{abc} = 123}", "123"),
    ],
    "a value and its approximation": [
        (r"\boxed{\frac{22}{7} \approx 3.14}", r"\frac{22}{7}"),
        (r"\boxed{x = \sqrt2 \approx 1.41}", r"\sqrt2"),
        (r"\boxed{x \approx 3.14}", "3.14"),
    ],
    "all numbers but one": [
        (r"\boxed{x \neq -2}", r"(-\infty,-2)\cup(-2,\infty)"),
        (r"\boxed{x \ne 1}", r"x \neq 1"),
        (r"\boxed{(-\infty,1)\cup(1,\infty)}", r"x \ne 1"),
    ],
    "two units in one amount": [
        ("The answer is 12 dollars and 50 cents.", "12.50"),
        ("2 hours and 30 minutes", "150 minutes"),
        ("She needs 2 hours 30 minutes.", "2.5"),
        ("5 feet 6 inches", "66 inches"),
        ("1 minute 30 seconds", "90 seconds"),
    ],
    "letters that are symbols and no units, fonts without braces, plurals, ratios": [
        (r"\boxed{\pi r^2 h}", r"\pi h r^2"),
        (r"\boxed{5\text{ h}}", "5"),
        (r"\boxed{k\pi, k\in\mathbb{Z}}", r"k\pi,\ k\in\mathbb Z"),
        (r"\boxed{\text{no solution}}", r"\text{No solutions}"),
        (r"\boxed{3{:}2}", "3:2"),
        (r"\boxed{1,2,\ldots,10}", r"1, 2, \dots, 10"),
    ],
    "a sentence that ends in an exclamation mark has no factorial": [
        ("It's 42!", "42"),
        ("The answer is 42!", "42"),
        ("So there are 18 eggs!", "18"),
        ("Answer: 42!!", "42"),
        ("It's 7! Great job", "7"),
        ("The count is $4!$!", "24"),
        ("The count is 4!.", "24"),
        ("The count is 4! ways.", "24"),
        ("5!", "120"),
        (r"\boxed{3!+1}", "7"),
    ],
    "a logarithm without a base is to e or to 10": [
        (r"\boxed{\log 100}", "2"),
        (r"\boxed{\log 0.01}", "-2"),
        (r"\boxed{\log 2}", r"\ln 2"),
        (r"\boxed{\log_{10} x}", r"\log x"),
        (r"\boxed{1+\log 5}", r"\log 50"),
        (r"\boxed{e^{\log 3}}", "3"),
        (r"\boxed{\frac{\log 8}{\log 2}}", "3"),
    ],
    "binomials": [
        (r"\boxed{C(10,3)}", "120"),
        (r"\boxed{{}_{10}C_{3}}", "120"),
        (r"\boxed{_{10}C_3}", "120"),
        (r"\boxed{^{10}C_3}", "120"),
        (r"\boxed{C_{10}^{3}}", "120"),
        (r"\boxed{\dbinom{10}{3}}", "120"),
        (r"\boxed{{10 \choose 3}}", "120"),
        (r"\boxed{10C3 + 1}", "121"),
        (r"\boxed{_5P_2}", "20"),
        (r"\boxed{C(n,2)}", r"\frac{n(n-1)}{2}"),
        (r"\boxed{2C_1 x}", "2C_1x"),
    ],
    "numbers in words": [
        ("ten", "10"),
        ("There are twelve ways.", "12"),
        ("Twenty one", "21"),
        (r"\boxed{\text{ten apples}}", "10"),
        ("one hundred and five", "105"),
        ("two thousand three hundred", "2300"),
        ("two thirds", r"\frac23"),
        ("It takes two and a half hours.", "2.5"),
        ("seven", 7),
        (r"\boxed{1.2 \text{ million}}", "1200000"),
        (r"\boxed{\$1.2\text{ million}}", "1.2 million"),
        ("The population is 1.2 million people.", "1200000"),
    ],
    "the real numbers": [
        (r"\boxed{\mathbb{R}}", r"(-\infty,\infty)"),
        ("ℝ", r"(-\infty,+\infty)"),
        (r"\boxed{(-\infty,\infty)}", r"\mathbb R"),
        (r"\boxed{x \in \mathbb{R}}", r"(-\infty,\infty)"),
        ("The answer is all real numbers.", r"\mathbb{R}"),
    ],
    "a sentence in the box": [
        (r"\boxed{\text{The answer is } 18}", "18"),
        (r"\boxed{\text{Answer: } 18}", "18"),
        (r"\boxed{\text{The total is } 18 \text{ dollars}}", "18"),
        (r"\boxed{\text{The area is } 12\pi \text{ cm}^2}", r"12\pi"),
        (r"\boxed{\text{The function is even}}", r"\text{even}"),
        ("#### The answer is 42", "42"),
    ],
    "units": [
        ("18 dollars", "18"),
        (r"\boxed{\text{Rs }18}", "18"),
        (r"\boxed{18\,\mathrm{cm}^{2}}", "18"),
        (r"\boxed{18\text{ square cm}}", "18"),
        (r"\boxed{2\pi \text{ cm}}", r"2\pi"),
        (r"\boxed{1.6 \times 10^{-19}\text{ C}}", r"1.6\times 10^{-19}"),
        (r"\boxed{9.8 \text{ m s}^{-2}}", "9.8"),
        (r"\boxed{45\,\text{kg}\cdot\text{m/s}}", "45"),
        ("The force is 5 N.", "5"),
        (r"\boxed{20^\circ\text{C}}", "20"),
        ("She walks 120 cm.", "1.2 m"),
        ("That is 7:30 pm", "7:30 PM"),
    ],
    "money in prose is no formula": [
        ("So she makes 9 * $2 = $18 per day", "18"),
        ("Each bolt costs $2, so 3 bolts cost $6.", "6"),
        ("She makes $18 every day at the market.", "18"),
        ("The answer is **$18**.", "18"),
        (r"From \$2 it rises to \$18", "18"),
    ],
    "prose around the last expression": [
        ("She makes $18 a day.", "18"),
        ("It is 18 or so.", "18"),
        ("It's not 17 but 18.", "18"),
        ("The balance is -$3.", "-3"),
        (r"\boxed{18 \text{ a day}}", "18"),
        ("The point is (1, 2).", "(1,2)"),
        (r"There are $\dbinom{5}{2} = 10$ ways.", "10"),
        (r"So it takes $5 \cdot 4 = 20$ steps.", "20"),
        ("The ratio is 3 to 4.", "3:4"),
        (r"Therefore $x = 5$ or $x = -3$.", "5,-3"),
    ],
    "products, choices, tuples": [
        (r"\boxed{xy}", "yx"),
        (r"\boxed{2\pi r h}", r"2 \pi hr"),
        (r"\boxed{xyz}", "zyx"),
        (r"\boxed{ab}", "ba"),
        ("(b)", "B"),
        ("Option B", "B"),
        ("I choose option (B)", r"\text{(B)}"),
        ("x = 3, y = 4", "(3,4)"),
        ("The solutions are 1, 2, and 3.", "3,2,1"),
        ("The roots are $1$ and $2$.", "1,2"),
    ],
    "digits in groups and other ways to write a number": [
        ("1 000", "1000"),
        ("The total is 10 000.", "10000"),
        ("1'234'567", "1234567"),
        ("1\u202f000", "1000"),
        (r"\boxed{1{,}000}", "1_000"),
        (r"1\over2", "0.5"),
        (r"\boxed{{1 \over 2}}", "0.5"),
        ("⅛", "0.125"),
        ("2⅔", r"\frac83"),
        ("25 per cent", r"\frac14"),
        (r"33\frac{1}{3}\%", r"\frac{1}{3}"),
        ("≈ 42", "42"),
    ],
    "styles of completions": [
        ("*42*", "42"),
        ("```\n42\n```", "42"),
        ("42 ✓", "42"),
        ("Answer - 42", "42"),
        ("**Final Answer**\n42", "42"),
        ("Answer: 42 apples per day", "42"),
        ("<answer>The answer is 42</answer>", "42"),
        ("The answer is 42, which is more than 41.", "42"),
        ("What is 6*7? 42", "42"),
        ("The answer is 'eighteen'", "18"),
    ],
}


@pytest.mark.parametrize("kind", RIGHT)
def test_answers_that_are_right_of_the_kind(kind: str) -> None:
    assert [case for case in RIGHT[kind] if verdict(*case) != 1.0] == []


WRONG: dict[str, list[tuple[str, Any]]] = {
    "Chinese phrases and punctuation": [
        ("\u7b54\u6848\u662f 3 \u6216 4\u3002", "3"),
        ("\u7b54\u6848\u662f 43\u3002", "42"),
        ("\u7b54\u6848\u5728\u7b2c 42 \u9875\uff0c\u662f 17\u3002", "42"),
    ],
    "remainders, numerals with a base, functions of another variable": [
        (r"\boxed{2 \pmod 7}", r"2 \pmod 5"),
        (r"\boxed{n \equiv 1 \pmod{4}}", r"n\equiv 3 \pmod 4"),
        (r"\boxed{12_5}", "12_6"),
        (r"\boxed{11}", "1011_2"),
        (r"\boxed{x_1}", "x"),
        (r"\boxed{g(t) = 3t}", "f(x) = 3x"),
        (r"\boxed{g(t) = 3x}", "g(x) = 3t"),
        (r"\boxed{f(x) = xt}", "f(t) = t^2"),
    ],
    "approximations, all numbers but one, two units, words": [
        (r"\boxed{\frac{22}{7} \approx 3.14}", "3.14"),
        (r"\boxed{x \ne 1}", r"x \neq 2"),
        (r"\boxed{x \ne 1}", "1"),
        ("12 dollars and 50 cents", "50"),
        ("5 km and 3 hours", "5"),
        ("3 apples and 4 pears", "7"),
        (r"\boxed{\text{is}}", "i"),
        (r"\boxed{\angle ABC = 30^\circ}", "60"),
    ],
    "several answers or none": [
        ("either 3 or 4", "4"),
        ("It's 41, 42, or 43.", "43"),
        ("It is 42 or maybe 43.", "43"),
        ("The answer is 42. Or 43. Or 44.", "42"),
        ("x=42 or x=43", "43"),
        ("41 and 42", "42"),
        ("41 to 43", "43"),
        ("Numbers: 41; 42; 43", "43"),
        ("x is 3 or x is 4", "4"),
        ("x is 3, or else it is 4", "3"),
        ("The answer is one of 40, 41, 42.", "41"),
        ("The answer could be any number from 1 to 100.", "100"),
        ("one, two, three, four", "4"),
        ("The answer is either seventeen or eighteen", "18"),
        (" ".join(map(str, range(1, 101))), "100"),
        (", ".join(map(str, range(1, 101))), "100"),
        ("\n".join(map(str, range(1, 101))), "100"),
        ("A, B, C, D", "D"),
    ],
    "the question, doubt, denial": [
        ("What is 42 + 0?", "42"),
        ("Compute 6*7.", "42"),
        ("Janet has 42 eggs. How many does she have?", "42"),
        ("Let x = 42. Find x.", "42"),
        ("Maybe 42? Maybe 43?", "43"),
        ("If the answer were 42, then...", "42"),
        ("The answer is less than 42", "42"),
        ("The answer is anything but 42", "42"),
        (r"\boxed{\text{The answer is not } 42}", "42"),
        (r"\boxed{\text{I do not know if it is } 42}", "42"),
        (r"\boxed{\text{The answer is } 42 \text{ or } 43}", "42"),
    ],
    "near a right one": [
        ("The answer is 5!", "120"),
        (r"\boxed{\ln 100}", "2"),
        (r"\boxed{\log_{10} 2}", r"\ln 2"),
        (r"\boxed{C(10,3)}", "121"),
        ("1.2 billion", "1.2 million"),
        ("5 million", "5"),
        ("one third", "1"),
        ("sixteen", "6"),
        ("Two Towers", "Two Gentlemen"),
        (r"\boxed{[0,\infty)}", r"\mathbb{R}"),
        (r"\boxed{\text{The function is not even}}", r"\text{even}"),
        ("3 hours", "3 minutes"),
        ("8 pm", "8 am"),
        ("20 °C", "20 °F"),
        (r"\boxed{5x}", "5"),
        ("12 34", "1234"),
        ("0.5", "50"),
        ("99 100", "100"),
    ],
}


@pytest.mark.parametrize("kind", WRONG)
def test_answers_that_are_wrong_of_the_kind(kind: str) -> None:
    assert [case for case in WRONG[kind] if verdict(*case) != 0.0] == []


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
        ("Math-Verify 61", r"$\boxed{28 pct}", r"$28\%$", 1.0),
        ("Math-Verify 61", r"$\boxed{28 percentage}", r"$28\%$", 1.0),
        ("open-instruct 1530", "The temperature is 3.", "#### -3", 0.0),
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
