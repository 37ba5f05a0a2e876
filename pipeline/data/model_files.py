"""Reads tokenizer, stop ids and chat template in a model's directory, as transformers does, without importing it."""

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.infra.errors import ConfigError
from penstock.pipeline.config.fields import local_model

MODES = ("auto", "on", "off")


class _Generation(Extension):
    """Jinja extension that renders the text between `{% generation %}` and `{% endgeneration %}` and ignores these tags."""

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
    """Compile the source of a chat template. Raises `ConfigError`."""
    try:
        return _environment().from_string(source)
    except TemplateError as error:
        raise ConfigError(f"data.chat_template: {one_line(error)}") from error


def variables(source: str) -> set[str]:
    """Return the undeclared variables of a chat template's source. Raises `jinja2.TemplateError`."""
    return meta.find_undeclared_variables(_environment().parse(source))


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the sandboxed Jinja environment in which transformers renders chat templates."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _json
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return environment


def chat_template_of(folder: Path, chat_template: str) -> str | None:
    """Return the source of the template that `data.chat_template` selects, if any. Raises `ConfigError` if a required one is missing."""
    if chat_template == "off":
        return None
    if chat_template not in MODES:
        try:
            return Path(chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"data.chat_template: cannot read {chat_template}: {reason}; use auto, on, off or a Jinja file") from error
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    names = ("chat_template.json", "tokenizer_config.json")
    template = next((value for name in names if (value := json_file(folder / name).get("chat_template"))), None)
    if isinstance(template, list):
        template = {named.get("name"): named.get("template") for named in template}
    if isinstance(template, dict):
        if "default" not in template:
            named = ", ".join(map(str, template))
            raise ConfigError(f"data.chat_template: {folder} has the templates {named}, none named default; set it to a Jinja file")
        template = template["default"]
    if isinstance(template, str):
        return template
    if chat_template == "on":
        raise ConfigError(f"data.chat_template: on, but {folder} has no chat template; set it to the path of a Jinja file, or to off")
    return None


def json_file(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model; empty if the file does not exist. Raises `ConfigError` if it is not JSON."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.path: {file} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens that chat templates use as variables, such as `bos_token`."""
    made: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in json_file(folder / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                made[key] = text
    return made


def one_line(error: BaseException) -> str:
    """Return the first 300 characters of an error's text, on one line."""
    return " ".join(str(error).split())[:300]


MADE_HERE = ("tiny", "lake", "smollm2")
"""Models that `penstock model` makes; the examples expect them in folders of these names."""


def model_folder(model_directory: str | Path) -> Path:
    """Return the model's directory if it contains the required files. Raises `ConfigError` with the fix."""
    folder = local_model(str(model_directory))
    if not folder.is_dir():
        # If the parent folder exists, the path is meant as a directory and not as a name on the hub.
        hub = "" if folder.parent.is_dir() else f"for a model of the hub write hf:{'/'.join(folder.parts[-2:])}; "
        own = f"`penstock model {folder.name} {folder}` makes it" if folder.name in MADE_HERE else ""
        made = own or "`penstock model tiny DIR` and `penstock model smollm2 DIR` create a model without the hub"
        raise ConfigError(f"model.path: there is no directory {folder}: {'' if own else hub}{made}")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"model.path: {folder} has no tokenizer.json: save one with AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r})"
        )
    return folder


def light_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of the `tokenizers` library in a model's directory, without truncation and padding. Raises `ConfigError`.

    Tokens that only the tokenizer's settings list as special are special, as in transformers.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The library raises plain Exception for a file it cannot read.
    except Exception as error:
        raise ConfigError(f"model.path: cannot read {folder / 'tokenizer.json'}: {one_line(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    named = [name for name in dict.fromkeys(_named(folder)) if name not in special and tokenizer.token_to_id(name) is not None]
    tokenizer.add_special_tokens(named)
    return tokenizer


def encode_prompt(folder: Path, tokenizer: Any) -> Callable[[str], list[int]]:
    """Return a function that encodes a prompt without a chat template, with the special tokens that the model adds.

    A text that starts with the model's BOS token gets no second one.
    """
    settings = json_file(folder / "tokenizer_config.json")
    if settings.get("add_bos_token") or settings.get("add_eos_token"):
        full = _full_tokenizer(folder)  # these settings work differently in each tokenizer class of transformers
        encode_with_special: Callable[[str], list[int]] = lambda text: list(full(text, return_attention_mask=False)["input_ids"])  # noqa: E731
    else:
        encode_with_special = lambda text: list(tokenizer.encode(text).ids)  # noqa: E731
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    bos = next((token for token in encode_with_special("a")[:1] if token not in plain), None)

    def encode(text: str) -> list[int]:
        ids = encode_with_special(text)
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    return encode


def stop_ids_of(folder: Path) -> list[int]:
    """Return the end-of-sequence ids of the model, its generation config and its tokenizer, ascending.

    Raises `ConfigError` with the file and the key if a value is not a token.
    """
    ids: set[int] = set()
    config, vocabulary = json_file(folder / "config.json"), _vocabulary(folder)
    inner = config.get("text_config")
    size = (inner or config).get("vocab_size") if isinstance(inner, dict | None) else None
    for name, table in (
        ("config.json", config),
        ("config.json", inner),
        ("generation_config.json", json_file(folder / "generation_config.json")),
    ):
        if isinstance(table, dict):
            ids.update(_ids(table.get("eos_token_id"), vocabulary, f"{folder / name}: eos_token_id", size))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (eos := json_file(folder / name).get("eos_token")) is not None:
            ids.update(_ids(eos, vocabulary, f"{folder / name}: eos_token", size, text=True))
            break
    return sorted(ids)


def _full_tokenizer(folder: Path) -> Any:
    """Load the tokenizer by transformers, which takes seconds. Raises `ConfigError`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    # The boundary to a library that reads a user's files: its errors have no common type.
    except Exception as error:
        raise ConfigError(f"model.path: cannot load the tokenizer in {folder}: {one_line(error)}") from error


def _ids(value: Any, vocabulary: Mapping[str, int], key: str, size: Any, *, text: bool = False) -> Iterator[int]:
    """Yield the ids of a token, an id, or a list of them; digits are a token only with `text`. Raises `ConfigError` that names `key`."""
    for item in value if isinstance(value, list) else [] if value is None else [value]:
        token = item.get("content") if isinstance(item, dict) else item
        number = int(token) if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 10 else token
        if isinstance(token, str) and token in vocabulary and (text or not isinstance(number, int)):
            yield vocabulary[token]
        elif isinstance(number, int) and not isinstance(number, bool) and 0 <= number < (size if isinstance(size, int) else 2**31):
            yield number
        else:
            raise ConfigError(f"model.path: {key} is {item!r}, which is not a token of the model; expected a token, id, or list of them")


def _vocabulary(folder: Path) -> dict[str, int]:
    """Return token -> id of a model's tokenizer, added tokens included."""
    tokenizer = json_file(folder / "tokenizer.json")
    words = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(words, list):  # a unigram model's, with scores
        words = {item[0]: number for number, item in enumerate(words)}
    return {**(words or {}), **{token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}}


def _named(folder: Path) -> Iterator[str]:
    """Yield the tokens that the tokenizer's settings name as special."""
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in json_file(folder / name).items():
            if key.endswith("_token") or key in ("additional_special_tokens", "extra_special_tokens"):
                values = (
                    value.values() if isinstance(value, dict) and "content" not in value else value if isinstance(value, list) else [value]
                )
                yield from (
                    text for item in values if isinstance(text := item.get("content") if isinstance(item, dict) else item, str) and text
                )
