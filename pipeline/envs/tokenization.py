"""Turns rows into token ids and token ids into text; computes the digests by which workers check that they share a tokenizer.

The rule: a prompt is tokenised here and nowhere else. Only a `Renderer` with a chat template needs transformers; the feeder has it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from penstock.infra.errors import ConfigError
from penstock.pipeline.config.hub import local_model
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.envs.datasets.rows import DataError, Row

MADE_HERE = ("tiny", "lake", "smollm2")
"""What `penstock model` makes; the examples look for it in a folder of that name."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
MODES = ("auto", "on", "off")


class Digests(TypedDict):
    """Tokenizer, chat template and stop ids: two workers must agree on them before they exchange token ids."""

    tokenizer: str
    """SHA-256 (hex) over the tokenizer's files."""
    template: str
    """SHA-256 (hex) of the chat template in use; of the empty string without one."""
    stop_ids: list[int]
    """Ids that end a completion, ascending: the end-of-sequence ids of the model, its generation config and its tokenizer."""


class Renderer:
    """Renders rows to prompt text and token ids.

    `chat_template`: "auto" applies the model's template if there is one, "on" requires it, "off" takes the prompt as it is,
    anything else is the path of a Jinja file. Prompts without messages become one user message. `system_prompt` comes before messages
    that have none, `template_arguments` go to the template; both need one.
    """

    def __init__(
        self,
        model_directory: str | Path,
        *,
        chat_template: str = "auto",
        max_prompt_tokens: int = 1024,
        system_prompt: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        folder = model_folder(model_directory)
        self._system, self._arguments = system_prompt, dict(template_arguments or {})
        self._template, self._mode, self._limit = chat_template_of(folder, chat_template), chat_template, max_prompt_tokens
        if self._template is None and (unused := "system_prompt" if system_prompt else "template_arguments" if self._arguments else None):
            raise ConfigError(f"data.{unused}: there is no chat template to take it; name a Jinja file in data.chat_template")
        self._light: Any = None
        self._full: Any = None
        settings = _json(folder / "tokenizer_config.json")
        # transformers takes 8 CPU-seconds to import: avoid it for plain text to which its settings add no tokens.
        if self._template is None and not settings.get("add_bos_token") and not settings.get("add_eos_token"):
            self._light = light_tokenizer(folder)
        else:
            self._full = _full_tokenizer(folder)

    @classmethod
    def of(cls, config: Config) -> "Renderer":
        """As the configuration says. Raises `ConfigError`."""
        data = config.data
        return cls(
            config.model.path,
            chat_template=data.chat_template,
            max_prompt_tokens=data.max_prompt_tokens,
            system_prompt=data.system_prompt,
            template_arguments=data.template_arguments,
        )

    def render(self, row: Row) -> tuple[str, NDArray[np.int32]]:
        """The prompt's text and its token ids, int32 [L].

        Raises:
            DataError: with the row's origin: too long, empty, messages without a template, or a template that refuses them.
        """
        text = self._text(row)
        if self._light is not None:
            ids = self._light.encode(text).ids
        else:
            ids = self._full(text, add_special_tokens=self._template is None, return_attention_mask=False)["input_ids"]
        if not ids:
            raise DataError(f"{row.origin}: the prompt has no tokens")
        if len(ids) > self._limit:
            raise DataError(f"{row.origin}: the prompt has {len(ids)} tokens, more than data.max_prompt_tokens = {self._limit}")
        return text, np.asarray(ids, dtype=np.int32)

    def messages(self, row: Row) -> list[dict[str, Any]] | None:
        """The chat messages that a row's prompt is rendered from; None without a chat template."""
        if self._template is None:
            return None
        messages = list(row.messages) if row.messages is not None else [{"role": "user", "content": row.prompt}]
        if self._system is not None and not any(message.get("role") == "system" for message in messages):
            messages = [{"role": "system", "content": self._system}, *messages]
        return messages

    def _text(self, row: Row) -> str:
        if self._template is None:
            if row.prompt is None:
                why = "data.chat_template is off" if self._mode == "off" else "the model has no chat template; name a Jinja file"
                raise DataError(f"{row.origin}: the prompt is a list of messages, but {why}")
            return row.prompt
        messages = self.messages(row)
        settings = {**self._arguments, "tokenize": False, "add_generation_prompt": True}
        try:
            text = self._full.apply_chat_template(messages, chat_template=self._template, **settings)
        # The boundary to a template, which may raise any error.
        except Exception as error:
            raise DataError(f"{row.origin}: the chat template refuses the prompt: {' '.join(str(error).split())[:300]}") from error
        return str(text)


class Decoder:
    """Decodes token ids to text, without special tokens, with the light `tokenizers` library."""

    def __init__(self, model_directory: str | Path) -> None:
        self._tokenizer = light_tokenizer(model_folder(model_directory))

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """The text of one completion."""
        return str(self._tokenizer.decode([int(token_id) for token_id in ids], skip_special_tokens=True))

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def digests(model_directory: str | Path, *, chat_template: str = "auto") -> Digests:
    """The digests in the run's record, which every worker compares with its own copy of the model; read from the files alone.

    Raises:
        ValueError: the directory, its tokenizer.json or the template is missing.
    """
    folder = model_folder(model_directory)
    tokenizer = hashlib.sha256()
    for name in TOKENIZER_FILES:
        content = (folder / name).read_bytes() if (folder / name).is_file() else b""
        tokenizer.update(f"{name} {len(content)}\n".encode() + content)
    template = hashlib.sha256((chat_template_of(folder, chat_template) or "").encode()).hexdigest()
    return Digests(tokenizer=tokenizer.hexdigest(), template=template, stop_ids=_stop_ids(folder))


def model_folder(model_directory: str | Path) -> Path:
    """The directory, after checking for the required files. Raises `ConfigError` that says what to do."""
    folder = local_model(str(model_directory))
    if not folder.is_dir():
        # Where the folder above is there, a directory is meant.
        hub = "" if folder.parent.is_dir() else f"a model of the hub is hf:{'/'.join(folder.parts[-2:])}; "
        own = f"`penstock model {folder.name} {folder}` makes it" if folder.name in MADE_HERE else ""
        made = own or "`penstock model tiny DIR` and `penstock model smollm2 DIR` make one without it"
        raise ConfigError(f"model.path: there is no directory {folder}: {'' if own else hub}{made}")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"model.path: {folder} has no tokenizer.json: save one with AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r})"
        )
    return folder


def chat_template_of(folder: Path, chat_template: str) -> str | None:
    """The template in use, None for none. Raises `ConfigError` if one is required and missing."""
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
    template = _json(folder / "chat_template.json").get("chat_template") or _json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((named.get("template") for named in template if named.get("name") == "default"), None)
    if isinstance(template, str):
        return template
    if chat_template == "on":
        raise ConfigError(f"data.chat_template: on, but {folder} has no chat template; give the path of a Jinja file, or off")
    return None


def light_tokenizer(folder: Path) -> Any:
    """The tokenizer of the `tokenizers` library in a model's directory. Raises `ConfigError`."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The library raises plain Exception for a file it cannot read.
    except Exception as error:
        raise ConfigError(f"model.path: cannot read {folder / 'tokenizer.json'}: {' '.join(str(error).split())[:300]}") from error


def _full_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    # The boundary to a library that reads a user's files: its errors have no common type.
    except Exception as error:
        raise ConfigError(f"model.path: cannot load the tokenizer in {folder}: {' '.join(str(error).split())[:300]}") from error


def _stop_ids(folder: Path) -> list[int]:
    ids: set[int] = set()
    config = _json(folder / "config.json")
    for table in (config, config.get("text_config") or {}, _json(folder / "generation_config.json")):
        stop_ids = table.get("eos_token_id")
        ids.update([stop_ids] if isinstance(stop_ids, int) else stop_ids or [])
    eos = _json(folder / "tokenizer_config.json").get("eos_token") or _json(folder / "special_tokens_map.json").get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if eos is not None:
        tokenizer = _json(folder / "tokenizer.json")
        ids.update(token["id"] for token in tokenizer.get("added_tokens", []) if token.get("content") == eos)
        vocabulary = tokenizer.get("model", {}).get("vocab")
        if isinstance(vocabulary, dict) and eos in vocabulary:
            ids.add(vocabulary[eos])
    return sorted(ids)


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.path: {file} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}
