"""Mutated configurations and data files in `penstock run --dry-run`: counts tracebacks, hangs, and refusals without key or row.

    python -m benchmarks mutated_inputs --count 10000 --processes 2

Case n depends only on the seed and n: `--first N --count 1` repeats it. Reward functions run in this process, without a child.
"""

import contextlib
import io
import json
import os
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.support.command import parser_of, with_numbers
from penstock.infra.sandbox.timed_pool import Done, Failed
from penstock.pipeline.cli import app
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.launch.check import preflight
from penstock.pipeline.rewards import scoring as reward_child
from tests.support.light_model import light_model

BAD = ("traceback", "hang", "vague")
SHOWN = 8
SECTIONS = "|".join(Config.model_fields)
NAMED = re.compile(rf"unknown key|rows\.(jsonl|parquet)|config\.toml|--\w+|\b({SECTIONS})(\.\w+|:|\])|\[({SECTIONS})\]")
TABLE: dict[str, dict[str, Any]] = {
    "run": {"steps": 4, "name": "case", "seed": 0}, "model": {"path": "model"},
    "data": {"source": "rows.jsonl", "answer_field": "answer", "max_prompt_tokens": 64, "shuffle": True, "limit": 40},
    "reward": {"functions": ["exact_match", "rew.py:level"], "weights": [1.0, 0.5], "timeout_s": 5.0},
    "schedule": {"mode": "one_step_off", "prompts_per_step": 2, "samples_per_prompt": 4, "max_lag": 1},
    "sampling": {"temperature": 1.0, "max_new_tokens": 16, "top_p": 0.9, "top_k": 50}, "algorithm": {"loss": "grpo", "advantage": "grpo"},
    "trainer": {"lr": 1e-4, "dtype": "float32", "micro_batch_tokens": 256}, "rollout": {"engine": "transformers", "workers": 1},
    "eval": {"source": "rows.jsonl", "every": 2, "limit": 2}, "weights": {"keep": "all", "anchor_every": 4},
}  # fmt: skip
ROWS = [
    {"prompt": f"{n}+{n}=", "answer": str(2 * n), "level": n % 3, "tests": [{"in": str(n)}], "made": None if n % 2 else "by hand"}
    for n in range(12)
]
RUNS_OWN = ("completion_ids", "prompts", "completions", "data_source", "columns", "trainer_state", "")
REWARD = "def level(completions, level, **columns):\n    return [float(each or 0) for each in level]\n"
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 10**6, 10**30, -(10**30), 0.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"),
    "", " ", "a", "0", "null", "None", "\u00e9\u4e2d\U0001f600", "\ud800", "\x00", "<s></s>", "x" * 5000, "../rows.jsonl", "no_such",
    [], [[]], [None], ["a"], [1, "a", None], {}, {"a": 1}, {"ground_truth": "4"}, {"role": "user", "content": "hi"},
    [{"role": "user", "content": "hi"}], [{"role": "user"}], [{"role": "user", "content": None}],
    [{"role": "x", "content": "hi"}, {"role": "assistant", "content": "4"}],
)  # fmt: skip


class Hang(BaseException):
    """A case took longer than its limit."""


class InProcess:
    """The `ChildPool` of reward functions, in this process."""

    def __init__(self, init: Mapping[str, Any]) -> None:
        self._score, self._ended = reward_child.child(init), list[Any]()

    def submit(self, key: int, payload: Mapping[str, Any]) -> None:
        """Score at once."""
        try:
            self._ended.append(Done(key=key, result=self._score(json.loads(json.dumps(payload))), seconds=0.0))
        except ValueError as error:
            self._ended.append(Failed(key=key, reason=str(error)))

    def poll(self, _: float) -> list[Any]:
        """Results since the last call."""
        ended, self._ended = self._ended, []
        return ended


@contextlib.contextmanager
def in_process(_target: str, init: Mapping[str, Any], *, timeout_s: float, **_: Any) -> Iterator[InProcess]:
    """Replaces `preflight._children`."""
    assert timeout_s > 0
    yield InProcess(init)


def toml(table: Mapping[str, Any]) -> str:
    """A table of sections as TOML; null and surrogates, which TOML lacks, as text."""

    def value(each: Any) -> str:
        if isinstance(each, bool) or each is None:
            return json.dumps(each) if each is not None else '"null"'
        if isinstance(each, float):
            return repr(each)
        if isinstance(each, list):
            return f"[{', '.join(map(value, each))}]"
        if isinstance(each, dict):
            return "{" + ", ".join(f"{json.dumps(key)} = {value(inner)}" for key, inner in each.items()) + "}"
        return json.dumps(each, ensure_ascii="\ud800" in str(each)) if isinstance(each, str) else str(each)

    lines = []
    for name, section in table.items():
        keys = section.items() if isinstance(section, dict) else ()
        lines += [f"[{name}]", *(f"{json.dumps(key)} = {value(each)}" for key, each in keys), ""]
    return "\n".join(lines)


def spoiled(data: bytes, rng: random.Random) -> bytes:
    """Bytes with flipped bits, a range removed, duplicated or overwritten, or the end cut off."""
    if not data:
        return b"\x00"
    start, length, changed = rng.randrange(len(data)), rng.choice((1, 1, 2, 8, 64)), bytearray(data)
    match rng.randrange(6):
        case 0 | 1:
            changed[start] ^= 1 << rng.randrange(8)
        case 2:
            del changed[start : start + length]
        case 3:
            changed[start:start] = changed[start : start + length]
        case 4:
            changed[start : start + length] = rng.randbytes(length)
        case _:
            del changed[start:]
    return bytes(changed)


def changed_table(table: dict[str, dict[str, Any]], rng: random.Random) -> None:
    """Change a value, a key's name, a key of the schema or a section of a configuration."""
    section = rng.choice(list(table))
    keys = table[section]
    key = rng.choice(list(keys)) if keys else "steps"
    match rng.randrange(8):
        case 0 | 1 | 2:
            keys[key] = rng.choice(VALUES)
        case 3:
            keys.pop(key, None)
        case 4:
            keys[key[:-1] or "a"] = keys.pop(key, 1)
        case 5 | 6:
            name, field = rng.choice(list(Config.model_fields.items()))
            fields = list(getattr(field.annotation, "model_fields", ())) or ["a"]
            table.setdefault(name, {})[rng.choice(fields)] = rng.choice(VALUES)
        case _:
            table.pop(section)


def changed_rows(rows: list[Any], rng: random.Random) -> None:
    """Change a value, a column's name, a row or a whole column of the data."""
    index = rng.randrange(len(rows))
    row = rows[index]
    if not isinstance(row, dict) or not row:
        return
    name = rng.choice(list(row))
    match rng.randrange(8):
        case 0 | 1 | 2:
            row[name] = rng.choice(VALUES)
        case 3:
            row.pop(name)
        case 4:
            row[name[:-1] or "a"] = row.pop(name)
        case 5:
            row[rng.choice(RUNS_OWN)] = rng.choice(VALUES)
        case 6:
            rows[index] = rng.choice(VALUES)
        case _:
            value = rng.choice(VALUES)
            for each in rows:
                if isinstance(each, dict):
                    each[name] = value


def write_rows(folder: Path, rows: list[Any], *, parquet: bool) -> Path:
    """The rows as a file; as JSON lines if Arrow finds no common type for a column."""
    if parquet:
        with contextlib.suppress(pa.ArrowException, TypeError, AttributeError, OverflowError, UnicodeError):
            pq.write_table(pa.Table.from_pylist([row for row in rows if isinstance(row, dict)]), folder / "rows.parquet")
            return folder / "rows.parquet"
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / "rows.jsonl"


def case(number: int, folder: Path, *, seed: int) -> None:
    """Write the configuration and the data of a case."""
    rng = random.Random(f"{seed}/{number}")
    table, rows = json.loads(json.dumps(TABLE)), json.loads(json.dumps(ROWS))
    of_table, at_bytes, parquet = rng.random() < 0.5, rng.random() < 0.35, rng.random() < 0.4
    changes: Callable[[], None] = partial(changed_table, table, rng) if of_table else partial(changed_rows, rows, rng)
    for _ in range(0 if at_bytes else rng.choice((1, 1, 2, 3))):
        changes()
    file = write_rows(folder, rows, parquet=parquet)
    if isinstance(table.get("data"), dict) and table["data"].get("source") == "rows.jsonl":
        table["data"]["source"] = file.name
    if isinstance(table.get("eval"), dict) and table["eval"].get("source") == "rows.jsonl":
        table["eval"]["source"] = file.name
    text = toml(table).encode("utf-8", "surrogatepass")
    for _ in range(rng.choice((1, 1, 2, 4)) if at_bytes else 0):
        if of_table:
            text = spoiled(text, rng)
        else:
            file.write_bytes(spoiled(file.read_bytes(), rng))
    (folder / "config.toml").write_bytes(text)


def tried(number: int, *, seed: int, limit_s: float) -> tuple[int, str, str, float]:
    """(number, outcome, last line printed, seconds) of a case."""

    def stop(*_: Any) -> None:
        raise Hang

    preflight._children = in_process  # type: ignore[assignment]
    with tempfile.TemporaryDirectory(prefix="mutated-") as name:
        folder = Path(name)
        light_model(folder / "model", context=512)
        (folder / "rew.py").write_text(REWARD)
        case(number, folder, seed=seed)
        out, err, started = io.StringIO(), io.StringIO(), time.monotonic()
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = app.main(["run", "--dry-run", str(folder / "config.toml")])
            outcome = _outcome(status, err.getvalue())
        except Hang:
            outcome = "hang"
        except BaseException as error:  # not caught by the command
            outcome = "traceback"
            err.write(f"{type(error).__name__}: {error}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        line = (err.getvalue().strip().splitlines() or [""])[-1].replace(f"{folder}/", "")
        return number, outcome, line, time.monotonic() - started


def _outcome(status: int, errors: str) -> str:
    last = (errors.strip().splitlines() or [""])[-1]
    if "Traceback" in errors or ("unexpected " in last and "--debug" in last):
        return "traceback"
    if status == 0:
        return "accepted"
    return "refused" if last.startswith("penstock: ") and NAMED.search(last) else "vague"


def main(arguments: Sequence[str]) -> int:
    """Run all cases and print their outcomes; 1 if any is bad."""
    parser = parser_of(__name__, __doc__)
    with_numbers(parser, count=500, first=0, seed=0, processes=2)
    parser.add_argument("--limit", type=float, default=30.0, help="seconds of a case after which it counts as a hang")
    parser.add_argument("--show", action="store_true", help="print every case")
    chosen = parser.parse_args(arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    trying = partial(tried, seed=chosen.seed, limit_s=chosen.limit)
    started, counts, seconds, shown = time.monotonic(), Counter[str](), list[float](), Counter[str]()
    with ProcessPoolExecutor(chosen.processes) as pool:
        for number, outcome, line, took in pool.map(trying, range(chosen.first, chosen.first + chosen.count), chunksize=16):
            counts[outcome] += 1
            seconds.append(took)
            shown[outcome] += 1
            if chosen.show or (outcome in BAD and shown[outcome] <= SHOWN):
                print(f"{outcome}  case {number}: {line[:300]}", flush=True)
    print(
        f"{chosen.count} cases of seed {chosen.seed} in {time.monotonic() - started:.0f} s: "
        + ", ".join(f"{counts[name]} {name}" for name in ("accepted", "refused", *BAD))
        + f"; median {sorted(seconds)[len(seconds) // 2] * 1000:.0f} ms, longest {max(seconds):.1f} s"
    )
    return int(any(counts[name] for name in BAD))
