"""Converts rows to token ids and token ids to text; computes the digests with which workers check that they use the same tokenizer.

Prompts are tokenised only here, by `tokenizers` and Jinja: importing transformers takes 8 CPU-seconds and 0.8 GB.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from penstock.infra.errors import ConfigError
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.data.conversation.messages import TOOLS, TemplateRefused, tools_of
from penstock.pipeline.data.conversation.template import ChatTemplate, template_of
from penstock.pipeline.data.model_files import chat_template_of, encode_prompt, light_tokenizer, model_folder, stop_ids_of
from penstock.pipeline.data.read_files import DataError, Row

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


class Digests(TypedDict):
    """Digests of tokenizer, chat template and stop ids, which must be equal on all workers."""

    tokenizer: str
    """SHA-256 (hex) over the tokenizer's files."""
    template: str
    """SHA-256 (hex) of the chat template in use; of the empty string without one."""
    stop_ids: list[int]
    """Ids that end a completion, ascending: the end-of-sequence ids of the model, its generation config and its tokenizer."""


class Renderer:
    """Renders rows to prompt text and token ids.

    `chat_template`: "auto" applies the model's template if there is one, "on" requires it, "off" uses none, any other value is the path
    of a Jinja file. A prompt without messages becomes one user message. `system_prompt` is added to messages without one, and
    `template_arguments` are passed to the template; both need a template. Without one a prompt is pre-rendered text: control tokens in it
    are encoded as such, and no second BOS token is added.
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
        template = template_of(folder, chat_template=chat_template, stop_ids=stop_ids_of(folder), arguments=template_arguments)
        self._template = template if isinstance(template, ChatTemplate) else None
        if self._template is None and (
            unused := "system_prompt" if system_prompt else "template_arguments" if template_arguments else None
        ):
            raise ConfigError(f"data.{unused}: only a chat template uses it, and there is none; set data.chat_template to a Jinja file")
        self._encode = encode_prompt(folder, light_tokenizer(folder))

    @classmethod
    def of(cls, config: Config) -> "Renderer":
        data = config.data
        return cls(
            config.model.path,
            chat_template=data.chat_template,
            max_prompt_tokens=data.max_prompt_tokens,
            system_prompt=data.system_prompt,
            template_arguments=data.template_arguments,
        )

    def render(self, row: Row) -> tuple[str, NDArray[np.int32]]:
        """Return the text of a row's prompt, and its token ids, int32 [L].

        Raises `DataError` with the row's origin if the prompt is too long, empty, refused by the template, or messages without a template.
        """
        text, ids = self._rendered(row)
        if not ids:
            raise DataError(f"{row.origin}: the prompt has no tokens")
        if len(ids) > self._limit:
            raise DataError(f"{row.origin}: the prompt has {len(ids)} tokens, more than data.max_prompt_tokens = {self._limit}")
        return text, np.asarray(ids, dtype=np.int32)

    def ends_turns(self) -> bool:
        """False if the chat template writes no stop token after a completion."""
        return self._template is None or self._template.ends_turns()

    def messages(self, row: Row) -> list[dict[str, Any]] | None:
        """Return the chat messages of a row's prompt, with the system prompt; None without a chat template."""
        if self._template is None:
            return None
        messages = list(row.messages) if row.messages is not None else [{"role": "user", "content": row.prompt}]
        if self._system is not None and not any(message.get("role") in ("system", "developer") for message in messages):
            messages = [{"role": "system", "content": self._system}, *messages]
        return messages

    def _rendered(self, row: Row) -> tuple[str, list[int]]:
        """Return text and token ids, by the chat template if there is one. Raises `DataError`."""
        if self._template is None:
            if row.prompt is None:
                why = "data.chat_template is off" if self._mode == "off" else "the model has no chat template; set it to a Jinja file"
                raise DataError(f"{row.origin}: the prompt is a list of messages, but {why}")
            return row.prompt, self._encode(row.prompt)
        if TOOLS in row.not_json:
            raise DataError(f"{row.origin}: field {TOOLS!r} contains {row.not_json[TOOLS]}; expected a list of tools, or rename the column")
        try:
            tools = tools_of(row.columns.get(TOOLS))
        except ValueError as error:
            raise DataError(f"{row.origin}: field {TOOLS!r}: {error}; expected a list of tools, or rename the column") from error
        try:
            return self._template.rendered(self.messages(row) or (), tools)
        except TemplateRefused as error:
            raise DataError(f"{row.origin}: {error}") from error


class Decoder:
    """Decodes token ids to text without special tokens, with the `tokenizers` library."""

    def __init__(self, model_directory: str | Path) -> None:
        self._tokenizer = light_tokenizer(model_folder(model_directory))

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        return str(self._tokenizer.decode([int(token_id) for token_id in ids], skip_special_tokens=True))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def digests(model_directory: str | Path, *, chat_template: str = "auto") -> Digests:
    """Return the digests of a model's files for the run's record; every worker compares them with its own copy of the model.

    Raises `ValueError` if the directory, its tokenizer.json or the template is missing.
    """
    folder = model_folder(model_directory)
    tokenizer = hashlib.sha256()
    for name in TOKENIZER_FILES:
        content = (folder / name).read_bytes() if (folder / name).is_file() else b""
        tokenizer.update(f"{name} {len(content)}\n".encode() + content)
    template = hashlib.sha256((chat_template_of(folder, chat_template) or "").encode()).hexdigest()
    return Digests(tokenizer=tokenizer.hexdigest(), template=template, stop_ids=stop_ids_of(folder))
