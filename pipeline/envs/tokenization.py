"""Turns rows into token ids and token ids into text; computes the digests by which workers check that they share a tokenizer.

The rule: a prompt is tokenised here and nowhere else, by `tokenizers` and Jinja: importing transformers takes 8 CPU-seconds and 0.8 GB.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from penstock.infra.errors import ConfigError
from penstock.pipeline.config.hub import local_model
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.envs.chat_template import chat_template_of, compiled, json_file, one_line, special_tokens
from penstock.pipeline.envs.datasets.rows import DataError, Row

MADE_HERE = ("tiny", "lake", "smollm2")
"""What `penstock model` makes; the examples look for it in a folder of that name."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


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
        self._mode, self._limit, self._system = chat_template, max_prompt_tokens, system_prompt
        source = chat_template_of(folder, chat_template)
        self._template = compiled(source) if source is not None else None
        self._variables = {**special_tokens(folder), **(template_arguments or {})}
        if self._template is None and (
            unused := "system_prompt" if system_prompt else "template_arguments" if template_arguments else None
        ):
            raise ConfigError(f"data.{unused}: there is no chat template to take it; name a Jinja file in data.chat_template")
        self._encode = _encoder(folder, plain_text=self._template is None)

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
        ids = self._encode(text)
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
        settings: dict[str, Any] = {"tools": None, "documents": None, **self._variables, "add_generation_prompt": True}
        try:
            return self._template.render(messages=self.messages(row), **settings)
        # The boundary to a template, which may raise any error.
        except Exception as error:
            raise DataError(f"{row.origin}: the chat template refuses the prompt: {one_line(error)}") from error


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


def light_tokenizer(folder: Path) -> Any:
    """The tokenizer of the `tokenizers` library in a model's directory, which neither cuts nor pads. Raises `ConfigError`."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The library raises plain Exception for a file it cannot read.
    except Exception as error:
        raise ConfigError(f"model.path: cannot read {folder / 'tokenizer.json'}: {one_line(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encoder(folder: Path, *, plain_text: bool) -> Callable[[str], list[int]]:
    """Text -> token ids: plain text with the special tokens that the model begins it with, a rendered template with none."""
    settings = json_file(folder / "tokenizer_config.json")
    if plain_text and (settings.get("add_bos_token") or settings.get("add_eos_token")):
        full = _full_tokenizer(folder)  # only transformers knows which tokens a model's class puts where by these settings
        return lambda text: list(full(text, return_attention_mask=False)["input_ids"])
    light = light_tokenizer(folder)
    return lambda text: list(light.encode(text, add_special_tokens=plain_text).ids)


def _full_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    # The boundary to a library that reads a user's files: its errors have no common type.
    except Exception as error:
        raise ConfigError(f"model.path: cannot load the tokenizer in {folder}: {one_line(error)}") from error


def _stop_ids(folder: Path) -> list[int]:
    ids: set[int] = set()
    config = json_file(folder / "config.json")
    for table in (config, config.get("text_config") or {}, json_file(folder / "generation_config.json")):
        stop_ids = table.get("eos_token_id")
        ids.update([stop_ids] if isinstance(stop_ids, int) else stop_ids or [])
    eos = json_file(folder / "tokenizer_config.json").get("eos_token") or json_file(folder / "special_tokens_map.json").get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if eos is not None:
        tokenizer = json_file(folder / "tokenizer.json")
        ids.update(token["id"] for token in tokenizer.get("added_tokens", []) if token.get("content") == eos)
        vocabulary = tokenizer.get("model", {}).get("vocab")
        if isinstance(vocabulary, dict) and eos in vocabulary:
            ids.add(vocabulary[eos])
    return sorted(ids)
