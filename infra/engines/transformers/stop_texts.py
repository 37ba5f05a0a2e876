"""Ends completions at texts: says of the ids drawn so far whether a text is whole with the last of them.

The rule: only the end of a completion is decoded, so that a token costs the same however long its completion is.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.infra.errors import EngineError

Ends = Callable[[npt.NDArray[np.int32]], bool]
"""[T] ids drawn so far -> whether the newest one ends the completion."""
MARGIN = 8
"""Tokens before those that a text can consist of: they decide how its first one is decoded."""


class Texts:
    """The tokenizer of a model's directory, for stop texts."""

    def __init__(self, directory: Path) -> None:
        """Raises `EngineError` when there is none."""
        from tokenizers import Tokenizer

        try:
            self._tokenizer: Any = Tokenizer.from_file(str(directory / "tokenizer.json"))
        # The library raises plain Exception for a file it cannot read.
        except Exception as error:
            raise EngineError(f"sampling.stop: there is no tokenizer to read {directory / 'tokenizer.json'} with: {error}") from error

    def ends(self, stop: Sequence[str]) -> Ends:
        """The end of completions at any of these texts; a token stands for a byte of them at least."""
        window = max(len(text.encode()) for text in stop) + MARGIN

        def ended(ids: npt.NDArray[np.int32]) -> bool:
            text = self._tokenizer.decode(ids[-window:].tolist(), skip_special_tokens=True)
            return any(one in text for one in stop)

        return ended
