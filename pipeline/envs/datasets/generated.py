"""Rows made by code: a user's function, the built-in successor task, and reasoning-gym's procedural tasks.

The rule: row i is the same each time, given the same seed.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.pipeline.config.plugins import load, nearest, source_digest
from penstock.pipeline.envs.datasets.rows import DataError, jsonable

SUCCESSOR_ROWS = 256
REASONING_GYM_ROWS = 10_000
"""Number of rows of a task that makes them on demand, so that a large number costs nothing."""


class Rows:
    """Rows of an iterable of dicts, held as they are."""

    generated = False

    def __init__(self, rows: Sequence[Any], *, name: str, digest: str) -> None:
        self._rows, self._name, self.digest = rows, name, digest

    def __len__(self) -> int:
        return len(self._rows)

    def raw(self, index: int) -> Mapping[str, Any]:
        row = self._rows[index]
        if not isinstance(row, Mapping):
            raise DataError(f"{self.origin(index)}: expected a dict, found a {type(row).__name__}")
        return row

    def origin(self, index: int) -> str:
        return f"{self._name}:{index + 1}"


def open_function(spec: str, *, base_dir: Path, seed: int, size: int | None, split: str, options: Mapping[str, Any]) -> Rows:
    """Rows of a user's function that returns an iterable of dicts; it gets `seed`, `size` and `split` if its parameters name them.

    Raises:
        DataError: it does not load, breaks, or returns something else.
    """
    function = load(spec, base_dir=base_dir)
    offered: dict[str, Any] = {"seed": seed, "split": split, **({} if size is None else {"size": size})}
    parameters = inspect.signature(function).parameters
    arguments = {**{name: value for name, value in offered.items() if name in parameters}, **options}
    if unknown := [name for name in arguments if name not in parameters and not _takes_any(parameters.values())]:
        raise DataError(f"{spec}: the function has no parameter {unknown[0]!r}{nearest(unknown[0], parameters)}")
    try:
        rows = function(**arguments)
        held = rows if isinstance(rows, Sequence) else list(rows if size is None else islice(rows, size))
    # The boundary to a user's function: report any error in one line.
    except Exception as error:
        raise DataError(f"{spec}: the function broke: {type(error).__name__}: {' '.join(str(error).split())}") from error
    text = json.dumps([source_digest(spec, base_dir=base_dir), spec.rpartition(":")[2], arguments], default=str, sort_keys=True)
    return Rows(held, name=spec, digest=hashlib.sha256(text.encode()).hexdigest())


def open_tiny(task: str, *, seed: int, size: int | None, split: str) -> Rows:
    """Rows of a built-in task, `successor` or `lake`. Splits other than `train` are held out from it. Raises `DataError`."""
    from penstock.pipeline.envs.tiny import lake_rows, successor_rows

    makers: dict[str, Callable[..., Sequence[Mapping[str, Any]]]] = {"successor": successor_rows, "lake": lake_rows}
    if task not in makers:
        raise DataError(f"tiny:{task}: no such task{nearest(task, makers)}")
    held = list(makers[task](size or SUCCESSOR_ROWS, seed, split="train" if split == "train" else "held_out"))
    digest = hashlib.sha256(json.dumps(held, default=str, sort_keys=True).encode()).hexdigest()
    return Rows(held, name=f"tiny:{task}", digest=digest)


class ReasoningGym:
    """Rows of a reasoning-gym task. Their columns hold the recipe of the entry, because JSON loses types that scoring needs."""

    generated = True

    def __init__(self, task: str, *, seed: int, size: int | None, split: str, options: Mapping[str, Any]) -> None:
        self._task, self._size = task, size or REASONING_GYM_ROWS
        if split != "train":
            # The tasks have no splits: another split is another range of the generator's rows.
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
            raise DataError(f"{self.origin(index)}: the task broke: {type(error).__name__}: {' '.join(str(error).split())}") from error
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
    """reasoning-gym's own data set from a recipe (JSON: task, seed, size, options). Raises `DataError`."""
    wanted = json.loads(recipe)
    task, options = wanted["task"], wanted["options"]
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
            raise DataError(f"reasoning-gym:{task}: no option {name!r}{nearest(name, settings)} (it has: {', '.join(settings)})")
    try:
        return reasoning_gym.create_dataset(task, seed=wanted["seed"], size=wanted["size"], **options)
    # The boundary to a library: wrong options fail in as many ways as there are tasks.
    except Exception as error:
        reason = " ".join(str(error).split()) or "its own check failed"
        raise DataError(f"reasoning-gym:{task} with {options or 'its defaults'}: {reason}") from error


def _version() -> str:
    from importlib.metadata import version

    return version("reasoning-gym")


def _takes_any(parameters: Iterable[inspect.Parameter]) -> bool:
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
