"""Decodes single token ids with the run's tokenizer, if it is on this machine."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.infra.log import Log
from penstock.pipeline.data.model_files import model_folder
from penstock.pipeline.data.tokenization import digests
from penstock.pipeline.inspect.run_status import config_of, info_of
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.runtime.registration.run_registry import find


class TokenTexts:
    """Decoder with the tokenizer in a model's directory, if its SHA-256 (hexadecimal) is `digest`; otherwise `why_not` is the reason."""

    def __init__(self, model: str | None, digest: str | None) -> None:
        self._tokenizer: Any = None
        self.why_not: str | None = None
        try:
            self._tokenizer = _open(model, digest)
        except ValueError as error:
            self.why_not = str(error)

    @classmethod
    def of(cls, view: RunView) -> "TokenTexts":
        """Open the tokenizer of the model in a run's configuration."""
        return cls(config_of(view).get("model", {}).get("path"), info_of(view).get("digests", {}).get("tokenizer"))

    def completion(self, ids: Iterable[int]) -> str | None:
        """Return the text of a completion without special tokens; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return str(self._tokenizer.decode([int(token_id) for token_id in ids], skip_special_tokens=True))

    def one_by_one(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token id, special tokens by name; [] without a tokenizer."""
        if self._tokenizer is None:
            return []
        # Decode after a letter, because decoders drop the leading blank of the first word.
        anchor = self._tokenizer.encode("a", add_special_tokens=False).ids[:1]
        before = len(self._decode(anchor))
        return [self._decode([*anchor, token_id])[before:] for token_id in ids]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def texts_of(log: Log, run: str) -> TokenTexts:
    """Open the run's tokenizer; reads only the registration, which takes milliseconds."""
    return TokenTexts.of(RunView(run=run, record=find(log, run)))


def _open(path: str | None, expected: str | None) -> Any:
    """Load the tokenizer in a model's directory. Raises `ValueError` if there is none here, or if its digest is not the expected one."""
    from tokenizers import Tokenizer

    if not path:
        raise ValueError("the run's configuration names no model")
    if not Path(path).expanduser().is_dir():
        raise ValueError(f"the model's directory {path} is not on this machine")
    folder = model_folder(path)
    if expected is not None and digests(folder, chat_template="off")["tokenizer"] != expected:
        raise ValueError(f"the tokenizer in {folder} is not the one that the run was created with")
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The library raises Exception for a file that it cannot read.
    except Exception as error:
        raise ValueError(f"cannot read {folder / 'tokenizer.json'}: {' '.join(str(error).split())[:200]}") from error
