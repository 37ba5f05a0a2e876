"""Selects and compiles a model's chat template as transformers does, without importing it.

Templates run in Jinja's sandbox with the filters, globals and tags of transformers, and the model's special tokens as variables.
"""

import json
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.infra.errors import ConfigError

MODES = ("auto", "on", "off")


class _Generation(Extension):
    """Ignores the tags `{% generation %}` and `{% endgeneration %}` and renders the text between them."""

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
    """Compile a Jinja source. Raises `ConfigError`."""
    try:
        return _environment().from_string(source)
    except TemplateError as error:
        raise ConfigError(f"data.chat_template: {one_line(error)}") from error


def variables(source: str) -> set[str]:
    """The undeclared variables of a Jinja source. Raises `jinja2.TemplateError`."""
    return meta.find_undeclared_variables(_environment().parse(source))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _json
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return environment


def chat_template_of(folder: Path, chat_template: str) -> str | None:
    """The source of the template in use; None if there is none. Raises `ConfigError` if a required one is missing."""
    if chat_template == "off":
        return None
    if chat_template not in MODES:
        try:
            return Path(chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"data.chat_template: cannot read {chat_template}: {reason}; give auto, on, off or a Jinja file") from error
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    names = ("chat_template.json", "tokenizer_config.json")
    template = next((value for name in names if (value := json_file(folder / name).get("chat_template"))), None)
    if isinstance(template, list):
        template = {named.get("name"): named.get("template") for named in template}
    if isinstance(template, dict):
        if "default" not in template:
            named = ", ".join(map(str, template))
            raise ConfigError(
                f"data.chat_template: {folder} has the templates {named} and none called default; give the path of a Jinja file"
            )
        template = template["default"]
    if isinstance(template, str):
        return template
    if chat_template == "on":
        raise ConfigError(f"data.chat_template: on, but {folder} has no chat template; give the path of a Jinja file, or off")
    return None


def json_file(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a model; empty if the file is absent. Raises `ConfigError`."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.path: {file} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def special_tokens(folder: Path) -> dict[str, str]:
    """The template variables with special tokens, such as `bos_token`."""
    made: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in json_file(folder / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                made[key] = text
    return made


def one_line(error: BaseException) -> str:
    """The first 300 characters of an error's text, on one line."""
    return " ".join(str(error).split())[:300]
