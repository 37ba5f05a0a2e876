"""Errors of mathematical rewards on tests/data/math_pairs.jsonl, which a mathematician has scored, as a table.

    python -m benchmarks rewards math [--trl CHECKOUT] [--verl CHECKOUT] [--list REWARD]

TRL's `accuracy_reward` and verl's rewards are the files of their checkouts, unchanged; math-verify is the installed package.
A score of None, an exception, and a score that takes more than ten seconds count as errors.
"""

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.command import ROOT, parser_of
from penstock.pipeline.rewards.builtin import math_verify

PAIRS = ROOT / "tests" / "data" / "math_pairs.jsonl"
STYLES = ("gsm8k", "math", "aime", "olympiadbench")
LIMIT_S = 10
Reward = Callable[[str, str], Any]
"""(completion, reference answer) -> score."""


class Late(BaseException):
    """A score took longer than the limit; not caught by `except Exception` in a library."""


def penstock(completion: str, reference: str) -> float | None:
    return math_verify([completion], [reference])[0]


def bare(completion: str, reference: str) -> bool:
    """math-verify as in its documentation, with the reference answer in dollar signs, which it requires for LaTeX."""
    import math_verify as library

    solution = reference.rpartition("####")[2].strip()
    gold = library.parse(solution if "$" in solution or "boxed" in solution else f"${solution}$", parsing_timeout=None)
    return bool(library.verify(gold, library.parse(completion, parsing_timeout=None), timeout_seconds=None))


def trl(checkout: Path) -> Iterator[tuple[str, Reward]]:
    """`accuracy_reward` with the solution in dollar signs, without its timeouts, which would cancel our alarm."""
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


def verl(checkout: Path) -> Iterator[tuple[str, Reward]]:
    """`math_dapo` without and with `strict_box_verify`, and `prime_math`, which needs the package pylatexenc."""
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
        print(f"verl prime_math skipped: {error}", file=sys.stderr)
        return
    yield "verl prime_math", lambda completion, reference: prime.compute_score(completion, reference.rpartition("####")[2].strip())[0]


def without_timeout(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    return lambda *arguments, **options: function(*arguments, **{**options, name: None})


def outcome(reward: Reward, pair: dict[str, Any]) -> str:
    """ "right", or the kind of error."""

    def late(*_: Any) -> None:
        raise Late

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        score = reward(pair["completion"], pair["reference"])
    except Late:
        return "late"
    except Exception:
        return "error"
    finally:
        signal.alarm(0)
    if score is None:
        return "none"
    return "right" if bool(score) == pair["right"] else "correct scored 0" if pair["right"] else "wrong scored 1"


def main(arguments: Sequence[str]) -> None:
    """Score, print."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--trl", type=Path, help="a checkout of github.com/huggingface/trl")
    parser.add_argument("--verl", type=Path, help="a checkout of github.com/volcengine/verl")
    parser.add_argument("--list", metavar="REWARD", help="print the errors of this reward")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    pairs = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    rewards: list[tuple[str, Reward]] = [("Penstock math_verify", penstock), ("math-verify", bare)]
    rewards += list(trl(options.trl)) if options.trl else []
    rewards += list(verl(options.verl)) if options.verl else []
    sizes = Counter(pair["style"] for pair in pairs)
    columns = " | ".join(f"{style} ({sizes[style]})" for style in STYLES)
    print(f"| reward | errors of {len(pairs)} | correct scored 0 | wrong scored 1 | None, error, late | {columns} | s |")
    print("|---|" + "---|" * (len(STYLES) + 5))
    for name, reward in rewards:
        started = time.perf_counter()
        outcomes = [outcome(reward, pair) for pair in pairs]
        seconds = time.perf_counter() - started
        counts = Counter(outcomes)
        errors = [(kind, pair) for kind, pair in zip(outcomes, pairs, strict=True) if kind != "right"]
        by_style = Counter(pair["style"] for _, pair in errors)
        others = ", ".join(str(counts[kind]) for kind in ("none", "error", "late"))
        kinds = f"{counts['correct scored 0']} | {counts['wrong scored 1']} | {others}"
        styles = " | ".join(str(by_style[style]) for style in STYLES)
        print(f"| {name} | {len(pairs) - counts['right']} | {kinds} | {styles} | {seconds:.1f} |", flush=True)
        if options.list == name:
            for kind, pair in errors:
                print(f"{kind}: {pair['completion']!r} for {pair['reference']!r}")
