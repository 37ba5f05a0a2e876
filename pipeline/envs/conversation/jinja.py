"""Compiles chat templates as transformers does, without importing it: sandboxed, with its filters, globals and tags."""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """Renders what stands between `{% generation %}` and `{% endgeneration %}` as if the tags were not there."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _json(value: Any, *, ensure_ascii: bool = False, **settings: Any) -> str:
    # jinja2's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, **settings)


@lru_cache
def compiled(source: str) -> Template:
    """The template of a Jinja source. Raises `jinja2.TemplateError`."""
    return _environment().from_string(source)


def variables(source: str) -> set[str]:
    """The names that a Jinja source reads and does not set. Raises `jinja2.TemplateError`."""
    return meta.find_undeclared_variables(_environment().parse(source))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _json
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return environment
