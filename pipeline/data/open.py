"""Opens a data set by its source, and checks all rows before a run starts."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.pipeline.config.plugins import nearest, split_options
from penstock.pipeline.data.generated import ReasoningGym, open_function, open_tiny
from penstock.pipeline.data.read_files import DataError, Dataset, Fields, Row, Source, open_files, row_of

GENERATED_ROWS_CHECKED = 8
SHOWN_PROBLEMS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """A parsed data source: name, options, and the run's settings for it."""

    name: str
    """The part of the source after the scheme and its colon."""
    base: Path
    """Base folder of relative paths."""
    split: str
    seed: int
    size: int | None
    """Number of rows to make; None for the source's default."""
    rows: int | None
    """Number of rows needed; None for all."""
    options: dict[str, Any]


class Hub:
    """Rows of a Hugging Face data set on the hub, in a folder of data files, or in a folder that `save_to_disk` wrote."""

    generated = False

    def __init__(self, name: str, *, base_dir: Path, split: str, options: Mapping[str, Any]) -> None:
        rows, self._name = _load_hub(name, base_dir=base_dir, split=split, options=dict(options)), f"hf:{name}[{split}]"
        self.digest = hashlib.sha256(str(rows._fingerprint).encode()).hexdigest()
        self._rows = rows.with_format("arrow")  # stored values: images and audio are not decoded

    def __len__(self) -> int:
        return len(self._rows)

    def raw(self, index: int) -> dict[str, Any]:
        return row_of(self._rows[index], 0)

    def origin(self, index: int) -> str:
        return f"{self._name}:{index + 1}"


def _load_hub(name: str, *, base_dir: Path, split: str, options: dict[str, Any]) -> Any:
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


def _reasoning_gym(spec: SourceSpec) -> Source:
    options = dict(spec.options)
    seed, size = int(options.pop("seed", spec.seed)), int(options.pop("size", spec.rows or 0)) or None
    return ReasoningGym(spec.name, seed=seed, size=size, split=spec.split, options=options)


SCHEMES: Mapping[str, Callable[[SourceSpec], Source]] = {
    "hf": lambda spec: Hub(spec.name, base_dir=spec.base, split=spec.split, options=spec.options),
    "reasoning-gym": _reasoning_gym,
    "tiny": lambda spec: open_tiny(spec.name, seed=spec.seed, size=spec.size, split=spec.split),
}


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
    `file.py:function` or `module:function`. Options follow a question mark: `hf:openai/gsm8k?config=main`,
    `reasoning-gym:chain_sum?max_terms=3`. `split` does not apply to files; `seed` and `size` apply to sources that make their rows. The
    data set has the rows [start, start + limit).

    Raises:
        DataError: the source and the problem in one line. Rows are not read yet: see `check`.
        PluginError: a function cannot be loaded.
    """
    plain, options = split_options(source)
    scheme, _, name = plain.partition(":")
    rows = size if size is not None or limit is None else start + limit
    spec = SourceSpec(name=name, base=Path(base_dir or ".").resolve(), split=split, seed=seed, size=size, rows=rows, options=options)
    opened: Source
    if scheme in SCHEMES and name:
        opened = SCHEMES[scheme](spec)
    elif ".py:" in plain or re.fullmatch(r"[\w.]+:[\w.]+", plain):
        opened = open_function(plain, base_dir=spec.base, seed=seed, size=size, split=split, options=options)
    elif options:
        raise DataError(f"{source}: options after '?' are not supported for files")
    else:
        opened = open_files(plain, base_dir=spec.base)
    return Dataset(opened, fields=Fields(prompt=prompt_field, answer=answer_field), start=start, limit=limit, name=source)


def check(dataset: Dataset, *, also: Callable[[Row], object] | None = None) -> None:
    """Read every row (of generated data only the first few) and pass it to `also`, whose `ValueError`s are reported too.

    Raises:
        DataError: one line with the origins and problems of the first unusable rows, and the number of others.
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
