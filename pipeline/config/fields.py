"""Types of configuration values: bounded numbers, names with a suggestion, paths relative to the configuration file."""

import json
import os
import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from penstock.infra.errors import ConfigError
from penstock.pipeline.config import synonyms
from penstock.pipeline.config.hub import is_hub_name
from penstock.pipeline.config.plugins import nearest, split_options

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
FinitePositive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Finite, because JSON has no infinity: the record would have `null`, which means absent."""
LONGEST_NAME = 255


def one_of(names: Collection[str], *, or_none: bool = False, or_function: bool = False, options: bool = False) -> AfterValidator:
    """A validator that refuses other names and suggests the nearest one.

    `or_none` accepts "none", `or_function` accepts package:function, `options` accepts options after a question mark.
    """

    def check(name: str) -> str:
        if (split_options(name)[0] if options else name) in names or (or_none and name == "none") or (or_function and ":" in name):
            return name
        function = " and no package:function" if or_function else ""
        meant = synonyms.VALUES.get(name)
        hint = f"; did you mean {meant!r}?" if meant in names else nearest(name, names)
        raise ValueError(f"{name!r} is none of {', '.join(names)}{function}{hint}")

    return AfterValidator(check)


@dataclass(frozen=True, slots=True)
class Resolve:
    """Marks a text with a relative path; `function(text, base)` makes it absolute, or reads the file."""

    function: Callable[[str, Path], Any]


def absolute(text: str, base: Path) -> str:
    """An absolute path. Raises `ValueError` if a name in it is too long for a file system."""
    path = (base / Path(text).expanduser()).resolve()
    if long := next((part for part in path.parts if len(os.fsencode(part)) > LONGEST_NAME), None):
        raise ValueError(f"{long[:40]}… has {len(os.fsencode(long))} bytes, a file's name at most {LONGEST_NAME}")
    return str(path)


def absolute_source(text: str, base: Path) -> str:
    """Make the path in a data source or in file.py:function absolute; names of packages, hubs and tasks stay."""
    scheme, colon, rest = text.partition(":")
    if scheme == "hf" and colon and rest.startswith((".", "~")):
        return f"hf:{absolute(rest, base)}"
    if scheme.endswith(".py") and colon:
        return f"{absolute(scheme, base)}:{rest}"
    return absolute(text, base) if not colon and ("/" in text or text.endswith((".jsonl", ".parquet"))) else text


def absolute_model(text: str, base: Path) -> str:
    """Make the path of a model absolute; a name on the hub stays."""
    return text if is_hub_name(text) else absolute(text, base)


def absolute_template(text: str, base: Path) -> str:
    """Make the path of a chat template absolute; auto, on and off stay."""
    return text if text in ("auto", "on", "off") else absolute(text, base)


def absolute_environment(text: str, base: Path) -> str:
    """Make the files in `agent:COMMAND` and the path in file.py:Class absolute; other names stay."""
    if not text.startswith("agent:"):
        return absolute_source(text, base)
    try:
        words = shlex.split(text.removeprefix("agent:"))
    except ValueError as error:
        raise ValueError(f"{text!r} is not a command: {error}") from error
    return f"agent:{shlex.join(absolute(word, base) if (base / word).is_file() else word for word in words)}"


def contents(text: str, base: Path) -> Any:
    """The value in a JSON file, read once so that the run's record is self-contained. Raises `ConfigError`."""
    file = Path(absolute(text, base))
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from error


JSON_FILE = Resolve(contents)
PATH, SOURCE, ENVIRONMENT = Resolve(absolute), Resolve(absolute_source), Resolve(absolute_environment)


class Section(BaseModel):
    """A table of the TOML file; unknown keys are errors, and values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
