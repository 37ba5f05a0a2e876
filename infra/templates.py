"""Texts from templates: a model card, a configuration, a job script."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def rendered(template: Path, values: Mapping[str, Any], *, filters: Mapping[str, Callable[..., object]] | None = None) -> str:
    """Return the text of a Jinja template, without escaping; lines with only a tag leave none. An unknown name is an error."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    environment.filters |= filters or {}
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)
