"""Rows made by code: a user's function, the built-in tiny tasks, and reasoning-gym's tasks.

Row i depends on the seed alone.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.pipeline.config.plugins import load, nearest, source_digest
from penstock.pipeline.data.read_files import DataError, jsonable

SUCCESSOR_ROWS = 256
REASONING_GYM_ROWS = 10_000
"""Default number of rows; they are made on demand, so that a large number costs nothing."""


class Rows:
    """Rows of a sequence of dicts."""

    generated = False

    def __init__(self, rows: Sequence[Any], *, name: str, digest: str) -> None:
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


def open_function(spec: str, *, base_dir: Path, seed: int, size: int | None, split: str, options: Mapping[str, Any]) -> Rows:
    """Rows of a user's function that returns an iterable of dicts; it receives `seed`, `size` and `split` if it has these parameters.

    Raises:
        DataError: the function cannot be loaded, raises, or returns something else.
    """
    function = load(spec, base_dir=base_dir)
    offered: dict[str, Any] = {"seed": seed, "split": split, **({} if size is None else {"size": size})}
    parameters = inspect.signature(function).parameters
    arguments = {**{name: value for name, value in offered.items() if name in parameters}, **options}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if unknown := [name for name in arguments if name not in parameters and not takes_any]:
        raise DataError(f"{spec}: the function has no parameter {unknown[0]!r}{nearest(unknown[0], parameters)}")
    try:
        rows = function(**arguments)
        sequence = rows if isinstance(rows, Sequence) else list(rows if size is None else islice(rows, size))
    # The boundary to a user's function: report any error in one line.
    except Exception as error:
        raise DataError(f"{spec}: the function raised {type(error).__name__}: {' '.join(str(error).split())}") from error
    text = json.dumps([source_digest(spec, base_dir=base_dir), spec.rpartition(":")[2], arguments], default=str, sort_keys=True)
    return Rows(sequence, name=spec, digest=hashlib.sha256(text.encode()).hexdigest())


def open_tiny(task: str, *, seed: int, size: int | None, split: str) -> Rows:
    """Rows of a built-in task, `successor` or `lake`. Other splits than `train` have held-out rows. Raises `DataError`."""
    from penstock.pipeline.data.tiny import lake_rows, successor_rows

    makers: dict[str, Callable[..., Sequence[Mapping[str, Any]]]] = {"successor": successor_rows, "lake": lake_rows}
    if task not in makers:
        raise DataError(f"tiny:{task}: no such task{nearest(task, makers)}")
    rows = list(makers[task](size or SUCCESSOR_ROWS, seed, split="train" if split == "train" else "held_out"))
    digest = hashlib.sha256(json.dumps(rows, default=str, sort_keys=True).encode()).hexdigest()
    return Rows(rows, name=f"tiny:{task}", digest=digest)


class ReasoningGym:
    """Rows of a reasoning-gym task. Columns include the recipe of the entry, as JSON loses types that scoring needs."""

    generated = True

    def __init__(self, task: str, *, seed: int, size: int | None, split: str, options: Mapping[str, Any]) -> None:
        self._task, self._size = task, size or REASONING_GYM_ROWS
        if split != "train":
            # The tasks have no splits: each split has a seed of its own.
            seed = int.from_bytes(hashlib.sha256(f"{split}/{seed}".encode()).digest()[:4], "big")
        self._recipe = {"task": task, "seed": seed, "size": self._size, "options": dict(options)}
        self._made = make_task(json.dumps(self._recipe, sort_keys=True))
        text = json.dumps([self._recipe, _version()], sort_keys=True)
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def __len__(self) -> int:
        return self._size

    def raw(self, index: int) -> dict[str, Any]:
        try:
            entry = self._made[index]
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

    def origin(self, index: int) -> str:
        return f"reasoning-gym:{self._task}:{index + 1}"


@lru_cache(maxsize=8)
def make_task(recipe: str) -> Any:
    """The data set of reasoning-gym for a recipe (JSON: task, seed, size, options). Raises `DataError`."""
    arguments = json.loads(recipe)
    task, options = arguments["task"], arguments["options"]
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(f"reasoning-gym:{task} needs the package reasoning-gym: pip install '.[data]' in the checkout ({error})") from error
    if task not in DATASETS:
        raise DataError(f"reasoning-gym:{task}: no such task{nearest(task, DATASETS)} (there are {len(DATASETS)})")
    settings = [field.name for field in dataclass_fields(DATASETS[task][1])]
    for name in options:
        if name not in settings:
            raise DataError(f"reasoning-gym:{task}: no option {name!r}{nearest(name, settings)} (its options: {', '.join(settings)})")
    try:
        return reasoning_gym.create_dataset(task, seed=arguments["seed"], size=arguments["size"], **options)
    # The boundary to a library: each task raises its own errors for invalid options.
    except Exception as error:
        reason = " ".join(str(error).split()) or "the data set's validation failed"
        raise DataError(f"reasoning-gym:{task} does not accept {options or 'its defaults'}: {reason}") from error


def _version() -> str:
    from importlib.metadata import version

    return version("reasoning-gym")
