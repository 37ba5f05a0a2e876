"""Wrong verdicts of mathematical rewards on tests/data/math_pairs.jsonl, whose verdicts are a mathematician's, as a table.

python benchmarks/math_rewards.py [--trl CHECKOUT] [--verl CHECKOUT] [--list REWARD]

TRL's `accuracy_reward` and verl's rewards are the files of their checkouts, run as they stand; math-verify is the installed package.
A verdict of None or an exception counts as "not right", a verdict that takes more than ten seconds as wrong.
"""

import argparse
import importlib
import importlib.util
import json
import logging
import signal
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.pipeline.rewards.builtin import math_verify

PAIRS = Path(__file__).resolve().parents[1] / "tests" / "data" / "math_pairs.jsonl"
STYLES = ("gsm8k", "math", "aime", "olympiadbench")
LIMIT_S = 10
Judge = Callable[[str, str], Any]
"""Completion, reference answer -> what the reward gives."""


class Late(BaseException):
    """A verdict took longer than the limit; no `except Exception` of a library catches it."""


def penstock(completion: str, reference: str) -> float | None:
    return math_verify([completion], [reference])[0]


def bare(completion: str, reference: str) -> bool:
    """math-verify as its documentation uses it, the reference answer in dollar signs as it requires of LaTeX."""
    import math_verify as library

    solution = reference.rpartition("####")[2].strip()
    gold = library.parse(solution if "$" in solution or "boxed" in solution else f"${solution}$", parsing_timeout=None)
    return bool(library.verify(gold, library.parse(completion, parsing_timeout=None), timeout_seconds=None))


def trl(checkout: Path) -> Iterator[tuple[str, Judge]]:
    """`accuracy_reward` with the solution in dollar signs, without the timeouts that would end our own alarm."""
    package = types.ModuleType("trl")
    package.__path__ = [str(checkout / "trl")]
    stub = types.ModuleType("trl.import_utils")
    stub.is_math_verify_available = lambda: True  # type: ignore[attr-defined]
    rewards = types.ModuleType("trl.rewards")
    rewards.__path__ = [str(checkout / "trl" / "rewards")]
    sys.modules |= {"trl": package, "trl.import_utils": stub, "trl.rewards": rewards}
    module = importlib.import_module("trl.rewards.accuracy_rewards")
    module.parse = without_timeout(module.parse, "parsing_timeout")  # type: ignore[attr-defined]
    module.verify = without_timeout(module.verify, "timeout_seconds")  # type: ignore[attr-defined]
    yield (
        "TRL accuracy_reward",
        lambda completion, reference: module.accuracy_reward([[{"content": completion}]], [f"${reference.rpartition('####')[2].strip()}$"])[
            0
        ],
    )


def verl(checkout: Path) -> Iterator[tuple[str, Judge]]:
    """`math_dapo` as it stands and with the box, and `prime_math`, which needs the package pylatexenc."""
    for name in ("verl", "verl.utils", "verl.utils.reward_score"):
        package = types.ModuleType(name)
        package.__path__ = [str(checkout.joinpath(*name.split(".")))]
        sys.modules[name] = package
    dapo = importlib.import_module("verl.utils.reward_score.math_dapo")
    yield "verl math_dapo", lambda completion, reference: dapo.compute_score(completion, reference.rpartition("####")[2].strip())["acc"]
    yield (
        "verl math_dapo, strict_box_verify",
        lambda completion, reference: dapo.compute_score(completion, reference.rpartition("####")[2].strip(), strict_box_verify=True)[
            "acc"
        ],
    )
    try:
        prime = importlib.import_module("verl.utils.reward_score.prime_math")
    except ImportError as error:
        print(f"verl prime_math is not run: {error}", file=sys.stderr)
        return
    yield "verl prime_math", lambda completion, reference: prime.compute_score(completion, reference.rpartition("####")[2].strip())[0]


def without_timeout(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    return lambda *arguments, **options: function(*arguments, **{**options, name: None})


def verdict(judge: Judge, pair: dict[str, Any]) -> str:
    """ "right", or how the verdict is wrong."""

    def late(*_: Any) -> None:
        raise Late

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        given = judge(pair["completion"], pair["reference"])
    except Late:
        return "late"
    except Exception:
        return "error"
    finally:
        signal.alarm(0)
    if given is None:
        return "none"
    return "right" if bool(given) == pair["right"] else "correct scored 0" if pair["right"] else "wrong scored 1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, help="a checkout of github.com/huggingface/trl")
    parser.add_argument("--verl", type=Path, help="a checkout of github.com/volcengine/verl")
    parser.add_argument("--list", metavar="REWARD", help="print the wrong verdicts of this reward")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    pairs = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    judges: list[tuple[str, Judge]] = [("Penstock math_verify", penstock), ("math-verify", bare)]
    judges += list(trl(options.trl)) if options.trl else []
    judges += list(verl(options.verl)) if options.verl else []
    sizes = Counter(pair["style"] for pair in pairs)
    columns = " | ".join(f"{style} ({sizes[style]})" for style in STYLES)
    print(f"| reward | errors of {len(pairs)} | correct scored 0 | wrong scored 1 | None, error, late | {columns} | s |")
    print("|---|" + "---|" * (len(STYLES) + 5))
    for name, judge in judges:
        begin = time.perf_counter()
        verdicts = [verdict(judge, pair) for pair in pairs]
        seconds = time.perf_counter() - begin
        counts = Counter(verdicts)
        by_style = Counter(pair["style"] for pair, given in zip(pairs, verdicts, strict=True) if given != "right")
        others = ", ".join(str(counts[kind]) for kind in ("none", "error", "late"))
        kinds = f"{counts['correct scored 0']} | {counts['wrong scored 1']} | {others}"
        styles = " | ".join(str(by_style[style]) for style in STYLES)
        print(f"| {name} | {len(pairs) - counts['right']} | {kinds} | {styles} | {seconds:.1f} |", flush=True)
        if options.list == name:
            for pair, given in zip(pairs, verdicts, strict=True):
                if given != "right":
                    print(f"{given}: {pair['completion']!r} for {pair['reference']!r}")


if __name__ == "__main__":
    main()
