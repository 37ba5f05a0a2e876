"""A data set by its name in the configuration, and the check of all its rows before a run starts."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from penstock.pipeline.envs.datasets.files import open_files
from penstock.pipeline.envs.datasets.generated import ReasoningGym, open_function, open_tiny
from penstock.pipeline.envs.datasets.hub import Hub
from penstock.pipeline.envs.datasets.rows import DataError, Dataset, Fields, Row, Source

GENERATED_ROWS_CHECKED = 8
SHOWN_PROBLEMS = 3


def open_dataset(
    source: str,
    *,
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    split: str = "train",
    limit: int | None = None,
    start: int = 0,
    base_dir: str | Path | None = None,
    seed: int = 0,
    size: int | None = None,
) -> Dataset:
    """Open a data set by its source.

    `x.jsonl` or `x.parquet` (also folders and globs), `hf:NAME` or `hf:FOLDER`, `reasoning-gym:TASK`, `tiny:successor`,
    `file.py:function` or `module:function`. Options of the source follow a question mark: `hf:openai/gsm8k?config=main`,
    `reasoning-gym:chain_sum?max_terms=3`. `split` is not for files, whose rows are all used; `seed` and `size` are for sources that
    make their rows. The rows [start, start + limit) are the data set.

    Raises:
        DataError: one line that names the source and what is wrong. Rows are not read yet: see `check`.
        PluginError: a function that cannot be loaded.
    """
    base = Path(base_dir or ".").resolve()
    plain, options = _split_options(source)
    scheme, _, rest = plain.partition(":")
    fields = Fields(prompt=prompt_field, answer=answer_field)
    found: Source
    if scheme == "hf" and rest:
        found = Hub(rest, base_dir=base, split=split, options=options)
    elif scheme == "reasoning-gym" and rest:
        made = size if size is not None or limit is None else start + limit
        seed, made = int(options.pop("seed", seed)), int(options.pop("size", made or 0)) or None
        found = ReasoningGym(rest, seed=seed, size=made, split=split, options=options)
    elif scheme == "tiny" and rest:
        found = open_tiny(rest, seed=seed, size=size, split=split)
    elif ".py:" in plain or re.fullmatch(r"[\w.]+:[\w.]+", plain):
        found = open_function(plain, base_dir=base, seed=seed, size=size, split=split, options=options)
    elif options:
        raise DataError(f"{source}: files take no options after '?'")
    else:
        found = open_files(plain, base_dir=base)
    return Dataset(found, fields=fields, start=start, limit=limit, name=source)


def check(dataset: Dataset, *, also: Callable[[Row], object] | None = None) -> None:
    """Read every row once (of generated ones only the first few), and give each to `also`, whose ValueErrors count too.

    Raises:
        DataError: one line with the first rows that cannot be used, their places, and how many more there are.
    """
    problems: list[str] = []
    more = 0
    for index in range(min(len(dataset), GENERATED_ROWS_CHECKED) if dataset.generated else len(dataset)):
        try:
            row = dataset[index]
            if also is not None:
                also(row)
        except ValueError as error:
            if len(problems) < SHOWN_PROBLEMS:
                problems.append(str(error))
            else:
                more += 1
    if problems:
        rest = f" | and {more} more rows" if more else ""
        raise DataError(" | ".join(problems) + rest)


def _split_options(source: str) -> tuple[str, dict[str, Any]]:
    # In a glob `?` stands for one character, so that only what looks like name=value after it is taken for options.
    plain, mark, query = source.partition("?")
    if not mark or not re.match(r"\w+=", query):
        return source, {}
    return plain, {name: _value(text) for name, text in parse_qsl(query, keep_blank_values=True)}


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
