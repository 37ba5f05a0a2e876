"""The tokenizer and the stop ids in a model's directory, read without importing transformers."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.infra.errors import ConfigError
from penstock.pipeline.config.hub import local_model
from penstock.pipeline.envs.chat_template import json_file, one_line

MADE_HERE = ("tiny", "lake", "smollm2")
"""What `penstock model` makes; the examples look for it in a folder of that name."""


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
    """The tokenizer of the `tokenizers` library in a model's directory, which neither cuts nor pads. Raises `ConfigError`.

    Special tokens that are only named in the tokenizer's settings are special in it, as in transformers.
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
    """Prompt without a chat template -> token ids, with the special tokens that the model puts around a text.

    A text that begins with the model's begin token gets no second one.
    """
    settings = json_file(folder / "tokenizer_config.json")
    if settings.get("add_bos_token") or settings.get("add_eos_token"):
        full = _full_tokenizer(folder)  # only transformers knows which tokens a model's class puts where by these settings
        whole: Callable[[str], list[int]] = lambda text: list(full(text, return_attention_mask=False)["input_ids"])  # noqa: E731
    else:
        whole = lambda text: list(tokenizer.encode(text).ids)  # noqa: E731
    own = tokenizer.encode("a", add_special_tokens=False).ids
    begin = next((token for token in whole("a")[:1] if token not in own), None)

    def encode(text: str) -> list[int]:
        ids = whole(text)
        return ids[1:] if begin is not None and ids[:2] == [begin, begin] else ids

    return encode


def stop_ids_of(folder: Path) -> list[int]:
    """The end-of-sequence ids of the model, its generation config and its tokenizer, ascending.

    Raises:
        ConfigError: a value that names no token; it has the file and the key.
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
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    # The boundary to a library that reads a user's files: its errors have no common type.
    except Exception as error:
        raise ConfigError(f"model.path: cannot load the tokenizer in {folder}: {one_line(error)}") from error


def _ids(value: Any, vocabulary: Mapping[str, int], where: str, size: Any, *, text: bool = False) -> Iterator[int]:
    """The ids that a value means: a token, an id, or a list of them; digits are a token only where `text` is expected."""
    for item in value if isinstance(value, list) else [] if value is None else [value]:
        token = item.get("content") if isinstance(item, dict) else item
        number = int(token) if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 10 else token
        if isinstance(token, str) and token in vocabulary and (text or not isinstance(number, int)):
            yield vocabulary[token]
        elif isinstance(number, int) and not isinstance(number, bool) and 0 <= number < (size if isinstance(size, int) else 2**31):
            yield number
        else:
            raise ConfigError(
                f"model.path: {where} is {item!r}, which is no token of the model; expected a token, an id, or a list of them"
            )


def _vocabulary(folder: Path) -> dict[str, int]:
    """Token -> id, of the tokenizer's words and its added tokens."""
    tokenizer = json_file(folder / "tokenizer.json")
    words = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(words, list):  # a unigram model's, with scores
        words = {item[0]: number for number, item in enumerate(words)}
    return {**(words or {}), **{token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}}


def _named(folder: Path) -> Iterator[str]:
    """The special tokens that a tokenizer's settings name."""
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in json_file(folder / name).items():
            if key.endswith("_token") or key in ("additional_special_tokens", "extra_special_tokens"):
                values = (
                    value.values() if isinstance(value, dict) and "content" not in value else value if isinstance(value, list) else [value]
                )
                yield from (
                    text for item in values if isinstance(text := item.get("content") if isinstance(item, dict) else item, str) and text
                )
