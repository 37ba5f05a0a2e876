"""Opens a data set by its source, makes the rows that code defines, and checks all rows before a run starts."""

import hashlib
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.pipeline.config.plugins import load, nearest, source_digest, split_options
from penstock.pipeline.data.read_files import DataError, Dataset, Fields, Row, Source, jsonable, open_files, row_of

SUCCESSOR_ROWS = 256
REASONING_GYM_ROWS = 10_000
"""Default number of rows; they are made on demand, so that a large number costs nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """A parsed data source: name, options, and the run's settings for it."""

    name: str
    """The part of the source after the scheme and its colon; the whole source for a function."""
    base: Path
    """Base folder of relative paths."""
    split: str
    seed: int
    size: int | None
    """Number of rows to make; None for the source's default."""
    rows: int | None
    """Number of rows needed; None for all."""
    options: dict[str, Any]


class Rows:
    """Rows of a sequence of dicts; `name` is that of the source in error messages."""

    generated = False

    def __init__(self, rows: Any, *, name: str, digest: str) -> None:
        self._rows, self._name, self.digest = rows, name, digest

    def __len__(self) -> int:
        return len(self._rows)

    def raw(self, index: int) -> Mapping[str, Any]:
        row = self._rows[index]
        if not isinstance(row, Mapping):
            raise DataError(f"{self.origin(index)}: expected a dict, got a {type(row).__name__}")
        return row

    def origin(self, index: int) -> str:
        return f"{self._name}:{index + 1}"


def open_function(spec: SourceSpec) -> Rows:
    """Return the rows of a user's function that returns an iterable of dicts; it gets `seed`, `size` and `split` if it takes them.

    `size` limits the rows taken from an iterator; `options` are further arguments. Raises `DataError` if the function raises or does not
    take an argument, `PluginError` if it cannot be loaded.
    """
    name, size = spec.name, spec.size
    function = load(name, base_dir=spec.base)
    offered: dict[str, Any] = {"seed": spec.seed, "split": spec.split, **({} if size is None else {"size": size})}
    parameters = inspect.signature(function).parameters
    arguments = {**{key: value for key, value in offered.items() if key in parameters}, **spec.options}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if unknown := [key for key in arguments if key not in parameters and not takes_any]:
        raise DataError(f"{name}: the function has no parameter {unknown[0]!r}{nearest(unknown[0], parameters)}")
    try:
        rows = function(**arguments)
        sequence = rows if isinstance(rows, Sequence) else list(rows if size is None else islice(rows, size))
    # The boundary to a user's function: report any error in one line.
    except Exception as error:
        raise DataError(f"{name}: the function raised {type(error).__name__}: {' '.join(str(error).split())}") from error
    return Rows(sequence, name=name, digest=_digest([source_digest(name, base_dir=spec.base), name.rpartition(":")[2], arguments]))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str, sort_keys=True).encode()).hexdigest()


def open_tiny(spec: SourceSpec) -> Rows:
    """Return the rows of a built-in task, `successor` or `lake`; a split other than `train` has held-out rows. Raises `DataError`."""
    from penstock.pipeline.data.tiny import lake_rows, successor_rows

    makers: dict[str, Callable[..., Sequence[Mapping[str, Any]]]] = {"successor": successor_rows, "lake": lake_rows}
    if spec.name not in makers:
        raise DataError(f"tiny:{spec.name}: no such task{nearest(spec.name, makers)}")
    rows = list(makers[spec.name](spec.size or SUCCESSOR_ROWS, spec.seed, split="train" if spec.split == "train" else "held_out"))
    return Rows(rows, name=f"tiny:{spec.name}", digest=_digest(rows))


class ReasoningGym(Rows):
    """Rows of a reasoning-gym task. A column has the recipe of the row, because JSON loses types that scoring needs."""

    generated = True

    def __init__(self, spec: SourceSpec) -> None:
        options = dict(spec.options)
        seed, size = int(options.pop("seed", spec.seed)), int(options.pop("size", spec.rows or 0)) or REASONING_GYM_ROWS
        if spec.split != "train":
            # The tasks have no splits: each split has a seed of its own.
            seed = int.from_bytes(hashlib.sha256(f"{spec.split}/{seed}".encode()).digest()[:4], "big")
        self._recipe = {"task": spec.name, "seed": seed, "size": size, "options": options}
        made = make_task(json.dumps(self._recipe, sort_keys=True))
        super().__init__(made, name=f"reasoning-gym:{spec.name}", digest=_digest([self._recipe, version("reasoning-gym")]))

    def raw(self, index: int) -> dict[str, Any]:
        try:
            entry = self._rows[index]
        # The boundary to a library's 100 tasks: report any error with the row.
        except Exception as error:
            raise DataError(f"{self.origin(index)}: the task raised {type(error).__name__}: {' '.join(str(error).split())}") from error
        return {
            "prompt": entry["question"],
            "question": entry["question"],
            "answer": entry["answer"],
            "metadata": jsonable(entry.get("metadata", {}), lenient=True),
            "reasoning_gym": {**self._recipe, "index": index},
        }


@lru_cache(maxsize=8)
def make_task(recipe: str) -> Any:
    """Return reasoning-gym's data set for a recipe (JSON: task, seed, size, options). Raises `DataError` for an unknown task or option."""
    arguments = json.loads(recipe)
    task, options = arguments["task"], arguments["options"]
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(f"reasoning-gym:{task} needs the package reasoning-gym: pip install '.[data]' in the checkout ({error})") from error
    if task not in DATASETS:
        raise DataError(f"reasoning-gym:{task}: no such task{nearest(task, DATASETS)} (there are {len(DATASETS)})")
    settings = [field.name for field in fields(DATASETS[task][1])]
    for name in options:
        if name not in settings:
            raise DataError(f"reasoning-gym:{task}: no option {name!r}{nearest(name, settings)} (its options: {', '.join(settings)})")
    try:
        return reasoning_gym.create_dataset(task, seed=arguments["seed"], size=arguments["size"], **options)
    # The boundary to a library: each task raises its own errors for invalid options.
    except Exception as error:
        reason = " ".join(str(error).split()) or "the data set's validation failed"
        raise DataError(f"reasoning-gym:{task} does not accept {options or 'its defaults'}: {reason}") from error


GENERATED_ROWS_CHECKED = 8
SHOWN_PROBLEMS = 3


class Hub(Rows):
    """Rows of a Hugging Face data set on the hub, in a folder of data files, or in a folder that `save_to_disk` wrote."""

    def __init__(self, spec: SourceSpec) -> None:
        rows = _load_hub(spec.name, base_dir=spec.base, split=spec.split, options=dict(spec.options))
        digest = hashlib.sha256(str(rows._fingerprint).encode()).hexdigest()
        # Rows are read as Arrow tables, so that images and audio are not decoded.
        super().__init__(rows.with_format("arrow"), name=f"hf:{spec.name}[{spec.split}]", digest=digest)

    def raw(self, index: int) -> dict[str, Any]:
        return row_of(self._rows[index], 0)


def _load_hub(name: str, *, base_dir: Path, split: str, options: dict[str, Any]) -> Any:
    """Return the rows of one split as an object of the package `datasets`; raises `DataError` if that is missing or cannot load them."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"hf:{name} needs the package datasets: pip install '.[data]' in the checkout ({error})") from error
    folder = base_dir / Path(name).expanduser()
    config = options.pop("config", None)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
        else:
            # A plain split is selected below, so that an error can list the existing ones; the library resolves slices.
            part = {"split": split} if any(sign in split for sign in "[+") else {}
            loaded = datasets.load_dataset(str(folder) if folder.is_dir() else name, config, **part, **options)
    # The boundary to a library that reads the network, caches and files: its errors have no common type.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise DataError(f"cannot load the data set hf:{name}: {type(error).__name__}: {reason[:300]}") from error
    if not isinstance(loaded, dict):
        return loaded
    if split not in loaded:
        raise DataError(f"hf:{name}: no split {split!r}{nearest(split, loaded)} (its splits: {', '.join(loaded)})")
    return loaded[split]


SCHEMES: Mapping[str, Callable[[SourceSpec], Source]] = {"hf": Hub, "reasoning-gym": ReasoningGym, "tiny": open_tiny}


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

    `x.jsonl` or `x.parquet` (also folders and globs), `hf:NAME` or `hf:FOLDER`, `reasoning-gym:TASK`, `tiny:successor`, `file.py:function`
    or `module:function`. Options follow a question mark: `hf:openai/gsm8k?config=main`, `reasoning-gym:chain_sum?max_terms=3`. `split` does
    not apply to files; `seed` and `size` apply to sources that make their rows.

    The data set has the rows [start, start + limit). They are validated when they are read, or all by `check`. Raises `DataError` with the
    source and the problem in one line, `PluginError` if a function cannot be loaded.
    """
    plain, options = split_options(source)
    scheme, _, name = plain.partition(":")
    rows = size if size is not None or limit is None else start + limit
    spec = SourceSpec(name=name, base=Path(base_dir or ".").resolve(), split=split, seed=seed, size=size, rows=rows, options=options)
    opened: Source
    if scheme in SCHEMES and name:
        opened = SCHEMES[scheme](spec)
    elif ".py:" in plain or re.fullmatch(r"[\w.]+:[\w.]+", plain):
        opened = open_function(replace(spec, name=plain))
    elif options:
        raise DataError(f"{source}: options after '?' are not supported for files")
    else:
        opened = open_files(plain, base_dir=spec.base)
    return Dataset(opened, fields=Fields(prompt=prompt_field, answer=answer_field), start=start, limit=limit, name=source)


def check(dataset: Dataset, *, also: Callable[[Row], object] | None = None) -> None:
    """Read every row (of generated data only the first few), and pass it to `also`, whose `ValueError`s are reported too.

    Raises `DataError` in one line: the first problems, each with the first row that has it and the number of others.
    """
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    rows = min(len(dataset), GENERATED_ROWS_CHECKED) if dataset.generated else len(dataset)
    for index in range(rows):
        try:
            row = dataset[index]
            if also is not None:
                also(row)
        except ValueError as error:
            problem = str(error).partition(": ")[2]  # without the row's origin
            if len(first) < SHOWN_PROBLEMS:
                first.setdefault(problem, str(error))
            counts[problem if problem in first else ""] += 1
    if first:
        lines = [text + (f" (all {rows:,} rows)" if counts[of] == rows > 1 else _more(counts[of] - 1)) for of, text in first.items()]
        others = f" | {counts['']:,} more row{'s have' if counts[''] > 1 else ' has'} other problems" if counts[""] else ""
        raise DataError(" | ".join(lines) + others)


def _more(rows: int) -> str:
    return f" (and {rows:,} more row{'s' if rows > 1 else ''})" if rows else ""
