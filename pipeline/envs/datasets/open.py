"""Opens a data set by its name in the configuration, and checks all its rows before a run starts."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.pipeline.config.plugins import split_options
from penstock.pipeline.envs.datasets.files import open_files
from penstock.pipeline.envs.datasets.generated import ReasoningGym, open_function, open_tiny
from penstock.pipeline.envs.datasets.hub import Hub
from penstock.pipeline.envs.datasets.rows import DataError, Dataset, Fields, Row, Source

GENERATED_ROWS_CHECKED = 8
SHOWN_PROBLEMS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """The arguments with which a source is opened."""

    name: str
    """The part of the source after the scheme and its colon."""
    base: Path
    """Folder that relative paths start from."""
    split: str
    seed: int
    size: int | None
    """Number of rows to make; None leaves it to the source."""
    rows: int | None
    """Number of rows that are used; None for all."""
    options: dict[str, Any]


def _reasoning_gym(given: SourceSpec) -> Source:
    options = dict(given.options)
    seed, size = int(options.pop("seed", given.seed)), int(options.pop("size", given.rows or 0)) or None
    return ReasoningGym(given.name, seed=seed, size=size, split=given.split, options=options)


SCHEMES: Mapping[str, Callable[[SourceSpec], Source]] = {
    "hf": lambda given: Hub(given.name, base_dir=given.base, split=given.split, options=given.options),
    "reasoning-gym": _reasoning_gym,
    "tiny": lambda given: open_tiny(given.name, seed=given.seed, size=given.size, split=given.split),
}
"""Scheme of a source -> the function that opens it."""


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
    `reasoning-gym:chain_sum?max_terms=3`. `split` does not apply to files, whose rows are all used; `seed` and `size` apply to sources that
    make their rows. The rows [start, start + limit) are the data set.

    Raises:
        DataError: one line that names the source and what is wrong. Rows are not read yet: see `check`.
        PluginError: a function that cannot be loaded.
    """
    plain, options = split_options(source)
    scheme, _, name = plain.partition(":")
    rows = size if size is not None or limit is None else start + limit
    given = SourceSpec(name=name, base=Path(base_dir or ".").resolve(), split=split, seed=seed, size=size, rows=rows, options=options)
    opened: Source
    if scheme in SCHEMES and name:
        opened = SCHEMES[scheme](given)
    elif ".py:" in plain or re.fullmatch(r"[\w.]+:[\w.]+", plain):
        opened = open_function(plain, base_dir=given.base, seed=seed, size=size, split=split, options=options)
    elif options:
        raise DataError(f"{source}: files take no options after '?'")
    else:
        opened = open_files(plain, base_dir=given.base)
    return Dataset(opened, fields=Fields(prompt=prompt_field, answer=answer_field), start=start, limit=limit, name=source)


def check(dataset: Dataset, *, also: Callable[[Row], object] | None = None) -> None:
    """Read every row once (of generated data only the first few) and pass it to `also`, whose ValueErrors count too.

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
        rest = f" | and {more} more row{'s' if more > 1 else ''}" if more else ""
        raise DataError(" | ".join(problems) + rest)
